"""Run by test_decode.py in a process of its own, where Triton's interpreter is on: prints one JSON line of results."""

import json

import torch

from batch_variance.kernels.decode import DecodeInputs, emulate, exact, launch, plan_decode, random_inputs
from batch_variance.kernels.decode.launch import KERNEL_FOLDS, DevicePlan, Workspace
from batch_variance.schedules import one_program_a_row, spread

LENGTHS = [100, 0, 33, 16]
SHAPES = (
    (dict(heads=16, d_qk=48, d_v=32), torch.float16, 1e-3),
    (
        dict(heads=16, d_qk=32, d_v=32, sparse=True, extra_lengths=[40, 9, 17, 5], sink=True, invalid=0.1),
        torch.float32,
        1e-6,
    ),
    (dict(heads=34, kv_heads=2, d_qk=16, d_v=16), torch.float16, 1e-3),
)


def poisoned(inputs: DecodeInputs, plan, fold):
    """Launch with NaN in every place that the kernels must write before it is read."""
    out = torch.full((inputs.batch, inputs.heads, inputs.d_v), torch.nan, dtype=inputs.q.dtype)
    work = Workspace.for_slots(plan.num_slots, inputs.heads, inputs.d_v, "cpu")
    work.accumulators.fill_(torch.nan)
    work.states.fill_(torch.nan)
    return launch(inputs, DevicePlan.upload(plan, "cpu"), fold, work, out)


results = []
for shape, dtype, bound in SHAPES:
    inputs = random_inputs(LENGTHS, dtype=dtype, page_size=16, **shape)
    truth, lse = exact(inputs, 16)
    for rule, folds in (
        ("flashmla", ("left",)),
        ("free-1", ("left",)),
        ("free-2", ("left",)),
        ("free-most-3", ("left",)),
        ("fixed-count-3", KERNEL_FOLDS),
    ):
        plan = plan_decode(inputs, rule, 5, 16)
        for fold in folds:
            out, got = poisoned(inputs, plan, fold)
            finite = ~lse.isinf()
            solo = [
                poisoned(inputs.row(row), plan_decode(inputs.row(row), rule, 5, 16), fold)[0]
                for row in range(len(LENGTHS))
            ]
            everywhere = poisoned(inputs, spread(plan), fold)
            by_one = poisoned(inputs, one_program_a_row(plan), fold) if plan.folds else (out, got)
            results.append(
                {
                    "spread_differs": sum(
                        not torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip((out, got), everywhere)
                    ),
                    "by_one_differs": sum(
                        not torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip((out, got), by_one)
                    ),
                    "spread_slots": spread(plan).num_slots - plan.num_slots,
                    "rule": rule,
                    "fold": fold,
                    "heads": inputs.heads,
                    "bound": bound,
                    "error": ((out.double() - truth).norm() / truth.norm()).item(),
                    "lse_error": (got - lse)[finite].abs().max().item()
                    if torch.equal(got.isinf(), lse.isinf())
                    else 1.0,
                    "poison": int(out.isnan().sum() + got.isnan().sum()),
                    "emulation_equal": (out == emulate(inputs, plan, fold)[0]).float().mean().item()
                    if dtype == torch.float16
                    else 1.0,
                    "solo_differs": sum(
                        not torch.equal(one.view(torch.int16), out[row : row + 1].view(torch.int16))
                        for row, one in enumerate(solo)
                    ),
                }
            )
print(json.dumps(results))
