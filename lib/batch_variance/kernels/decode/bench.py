"""Times split-KV decode under the free schedule against the best batch-wide schedule of the same kernel, on CUDA.

Pieces of a fixed number of blocks fold left to right whatever the schedule, so the number of programs may be tuned for
each batch without a bit changing: every tuned launch is held against one program a row, and against the row alone.
"""

import time
from pathlib import Path

import numpy as np
import torch

from ...schedules import BATCH_WIDE, make_plan, one_program_a_row
from ..recorded import Benchmark
from ..timing import copies, graph_microseconds
from .inputs import Cache, DecodeInputs
from .launch import DevicePlan, Workspace, launch, programs_for

BATCHES = (1, 4, 16, 64, 128, 256)
LENGTHS = (1024, 8192)
RULES = ("free-1", "free-2", "free-4", "free-8", "free-most-4", "free-most-8", "free-most-16", "free-most-32")
POOL_PAGES = 16384
PAGE = 64


def random_inputs(pool, lengths: list[int], seed: int) -> DecodeInputs:
    """64 query and 8 key/value heads of 128 numbers, bfloat16, over shuffled pages of a shared pool."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = -(-max(lengths) // PAGE)
    table = torch.randperm(POOL_PAGES, generator=generator, device="cuda")[: pages * len(lengths)].view(
        len(lengths), pages
    )
    q = torch.randn(len(lengths), 64, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    cache = Cache(*pool, torch.tensor(lengths, dtype=torch.int32, device="cuda"), table.int().contiguous())
    return DecodeInputs(q, (cache,), 128)


def row_lengths(batch: int, longest: int, kind: str, seed: int) -> list[int]:
    if kind == "full":
        return [longest] * batch
    return np.random.default_rng(seed).integers(1, longest + 1, batch).tolist()


def _bits(pair) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].view(torch.int16), pair[1].view(torch.int32)


def _time(sets: list[DecodeInputs], rule: str, programs: int) -> float:
    calls = []
    for inputs in sets:
        plan = DevicePlan.upload(make_plan(rule, inputs.lengths(PAGE), programs), "cuda")
        work = Workspace.for_slots(plan.plan.num_slots, inputs.heads, inputs.d_v, "cuda")
        calls.append(lambda i=inputs, p=plan, w=work: launch(i, p, workspace=w))
    return graph_microseconds(calls)


def fastest(sets: list[DecodeInputs], rule: str) -> tuple[float, int]:
    fill = programs_for(sets[0], torch.cuda.get_device_properties("cuda").multi_processor_count, per_sm=1)
    return min((_time(sets, rule, fill * times), fill * times) for times in (1, 2, 4))


def _moved(inputs: DecodeInputs, programs: int, rule: str) -> bool:
    """Whether the tuned launch has other bits than one program a row, or than the first row alone."""
    plan = make_plan(rule, inputs.lengths(PAGE), programs)
    found = launch(inputs, plan)
    other = launch(inputs, one_program_a_row(plan))
    alone = launch(inputs.row(0), make_plan(rule, inputs.lengths(PAGE)[:1], programs))
    return not (
        all(map(torch.equal, _bits(found), _bits(other)))
        and torch.equal(found[0][:1].view(torch.int16), alone[0].view(torch.int16))
    )


def run(folder: Path, budget_seconds: float) -> None:
    """Time every shape that the budget allows, smallest first; writes decode.csv in the folder after every shape.

    policy ``invariant-<rule>``, the rules as in ``schedules.rules``, with blocks of 64 tokens.
    """
    start, bench, ratios, moved = time.time(), Benchmark("decode"), {}, 0
    pool = [torch.randn(POOL_PAGES, PAGE, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    cases = [
        (n, kind, b) for b in BATCHES for n in LENGTHS for kind in ("full", "ragged") if b * n <= POOL_PAGES * PAGE
    ]
    for longest, kind, batch in cases:
        if time.time() - start > budget_seconds:
            print(f"no time left for batch {batch}, {longest} {kind} and what follows", flush=True)
            break
        tokens = sum(row_lengths(batch, longest, kind, 0))
        size = tokens * 8 * 128 * 2 * 2
        sets = [random_inputs(pool, row_lengths(batch, longest, kind, seed), seed) for seed in range(copies(size, 8))]
        shape = f"h64 kv8 d128 {longest} {kind}"
        default, _ = fastest(sets, BATCH_WIDE)
        bench.add("triton", "default", shape, batch, "time", "us", default, default)
        bench.add("triton", "default", shape, batch, "bandwidth", "TB/s", size / default / 1e6, size / default / 1e6)
        line = []
        for rule in RULES:
            mine, programs = fastest(sets, rule)
            moved += _moved(sets[0], programs, rule)
            ratios.setdefault(rule, []).append(mine / default)
            bench.add("triton", f"invariant-{rule}", shape, batch, "time", "us", mine, default)
            bench.add(
                "triton",
                f"invariant-{rule}",
                shape,
                batch,
                "bandwidth",
                "TB/s",
                size / mine / 1e6,
                size / default / 1e6,
            )
            line.append(f"{mine / default:.2f}")
        print(
            f"{shape} batch {batch}: default {default:.1f} us {size / default / 1e6:.2f} TB/s, "
            f"{' '.join(RULES)}: {' '.join(line)}",
            flush=True,
        )
        bench.save(folder)
    for rule, values in ratios.items():
        print(f"{rule}: geometric mean {np.exp(np.mean(np.log(values))):.3f} worst {max(values):.2f}")
    print(
        f"tuned launches whose bits differ from one program a row or from the row alone: {moved}; "
        f"{time.time() - start:.0f} s",
        flush=True,
    )
