"""Times prefill attention that agrees with decode against the library's causal attention, on CUDA.

Bits come first: rows of the timed step are held against a decode step of their length.
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F

from ...schedules import make_plan
from ..decode import launch as decode
from ..recorded import Benchmark
from ..timing import graph_microseconds
from . import RULE, DeviceTiles, PrefillInputs, launch

SHAPES = ((1, 512), (1, 2048), (8, 1024), (1, 8192))  # (prompts, tokens of each)
HEADS, KV_HEADS, D, PAGE = 32, 8, 128, 64
CHECKED = 64  # rows held against decode


def random_inputs(prompts: int, tokens: int, seed: int) -> PrefillInputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    pages = tokens // PAGE
    table = torch.randperm(prompts * pages, generator=generator, device="cuda").view(prompts, pages).int()
    starts = tuple(tokens * i for i in range(prompts + 1))
    keys, values = (make(prompts * pages, PAGE, KV_HEADS, D) for _ in "kv")
    return PrefillInputs(make(prompts * tokens, HEADS, D), starts, (0,) * prompts, keys, values, table.contiguous())


def library(inputs: PrefillInputs, prompts: int):
    """The library's causal attention on the same keys, gathered beforehand into the layout that it wants."""
    q = inputs.q.view(prompts, -1, HEADS, D).transpose(1, 2).contiguous()
    k, v = (t[inputs.block_table.long()].flatten(1, 2).transpose(1, 2).contiguous() for t in (inputs.keys, inputs.values))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _rows_unlike_decode(inputs: PrefillInputs, found) -> int:
    rows = inputs.as_decode()
    unlike = 0
    for row in torch.linspace(0, len(inputs.q) - 1, CHECKED).long().tolist():
        one = rows.row(row)
        out, lse = decode(one, make_plan(RULE, one.lengths(PAGE), 16))
        same = torch.equal(out.view(torch.int16), found[0][row : row + 1].view(torch.int16))
        unlike += not (same and torch.equal(lse.view(torch.int32), found[1][row : row + 1].view(torch.int32)))
    return unlike


def run(folder: Path, budget_seconds: float) -> None:
    """Time every shape that the budget allows; writes prefill.csv in the folder."""
    start, bench = time.time(), Benchmark("prefill")
    for prompts, tokens in SHAPES:
        if time.time() - start > budget_seconds:
            print(f"no time left for {prompts} x {tokens} and what follows", flush=True)
            break
        sets = [random_inputs(prompts, tokens, seed) for seed in range(3)]
        tiles = [DeviceTiles.upload(inputs, RULE) for inputs in sets]
        outs = [torch.empty_like(inputs.q) for inputs in sets]
        unlike = _rows_unlike_decode(sets[0], launch(sets[0], tiles[0], outs[0]))
        default = graph_microseconds([library(inputs, prompts) for inputs in sets])
        ours = graph_microseconds([lambda i=i, t=t, o=o: launch(i, t, o) for i, t, o in zip(sets, tiles, outs)])
        shape = f"h{HEADS} kv{KV_HEADS} d{D} {prompts} prompts of {tokens}"
        work = 2 * prompts * tokens * tokens * HEADS * D  # both products, half of them masked
        bench.add("prefill", "default", shape, prompts * tokens, "time", "us", default, default)
        bench.add("prefill", f"invariant-{RULE}", shape, prompts * tokens, "time", "us", ours, default)
        for policy, value in (("default", default), (f"invariant-{RULE}", ours)):
            bench.add("prefill", policy, shape, prompts * tokens, "rate", "TFLOP/s", work / value / 1e6, work / default / 1e6)
        bench.add("prefill", f"invariant-{RULE}", shape, prompts * tokens, "rows unlike decode", "count", unlike, CHECKED)
        print(f"{shape}: library {default:.1f} us, ours {ours:.1f} us, {ours / default:.2f}; rows unlike decode {unlike}", flush=True)
        bench.save(folder)
