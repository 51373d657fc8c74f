"""Run by test_prefill.py in a process of its own, where Triton's interpreter is on: prints one JSON line of results."""

import json

import torch
from prefill_cases import prefill_case, rows_of, same_bits

from batch_variance.kernels.decode import launch as decode
from batch_variance.kernels.decode.reference import exact
from batch_variance.kernels.prefill import DeviceTiles, launch
from batch_variance.schedules import make_plan

CASES = (
    (dict(counts=[37, 0, 1, 20], cached=[0, 5, 33, 15]), 1e-3),
    (dict(counts=[18, 3], cached=[14, 0], heads=6, kv_heads=2, sink=True, dtype=torch.float32), 1e-6),
    (dict(counts=[21], cached=[0], heads=2, kv_heads=2), 1e-3),
)
results = []
for case, bound in CASES:
    inputs = prefill_case(**case)
    rows = inputs.as_decode()
    truth, lse = exact(rows, 16)
    for rule in ("free-1", "free-2", "free-most-2", "never-split"):
        out = torch.full(inputs.q.shape, torch.nan, dtype=inputs.q.dtype)
        found = launch(inputs, DeviceTiles.upload(inputs, rule, 16), out)
        alone = decode(rows, make_plan(rule, rows.lengths(16), 5, 16))
        chunk = rows_of(inputs, 0, 5, 12)
        part = launch(chunk, DeviceTiles.upload(chunk, rule, 16), torch.full_like(chunk.q, torch.nan))
        planted = case["cached"][0] + 9  # the token of the first request's row 9
        page, place = inputs.block_table[0, planted // 16].item(), planted % 16
        kept = [pages[page, place].clone() for pages in (inputs.keys, inputs.values)]
        for pages in (inputs.keys, inputs.values):
            pages[page, place] = torch.inf
        beside = launch(inputs, DeviceTiles.upload(inputs, rule, 16), torch.full_like(inputs.q, torch.nan))
        for pages, value in zip((inputs.keys, inputs.values), kept):
            pages[page, place] = value
        results.append(
            {
                "rule": rule,
                "bound": bound,
                "error": ((found[0].double() - truth).norm() / truth.norm()).item(),
                "lse_error": (found[1] - lse).abs().max().item(),
                "unlike_decode": sum(not same_bits([t[i] for t in found], [t[i] for t in alone]) for i in range(len(out))),
                "reached": sum(not same_bits([t[i] for t in found], [t[i] for t in beside]) for i in range(9)),
                "not_finite": int((~beside[0][9].isfinite()).sum()),
                "unlike_chunk": not same_bits([t[5:12] for t in found], part),
            }
        )
print(json.dumps(results))
