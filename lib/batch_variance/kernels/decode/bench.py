"""Times split-KV decode under the free schedule against the best batch-wide schedule of the same kernels, on CUDA.

Pieces of a fixed number of blocks fold left to right whatever the schedule, so the number of programs may be tuned for
each batch without a bit changing: every tuned launch is held against one program a row, and against the row alone.
"""

import importlib
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...common import BadInput
from ...schedules import BATCH_WIDE, Plan, make_plan, one_program_a_row
from ..recorded import Benchmark
from ..timing import copies, graph_microseconds
from .inputs import Cache, DecodeInputs
from .launch import WARPGROUPS, DevicePlan, Tile, Workspace, launch, programs_for

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (1024, 8192)
RULES = ("free-1", "free-2", "free-4", "free-8", "free-most-8", "free-most-16", "free-most-32")
LATENT_BATCHES, LATENT_PAGES = (1, 8, 32, 128), 4096
LATENT_SHAPES = ((64, 2048), (64, 512), (128, 2048))  # query heads, places a row
LATENT_RULES = ("never-split", "free-4", "free-8", "free-16")
TILES = (Tile(16, 4, 5), Tile(16, 4, 3))
LATENT_TILES = (Tile(32, 8, 5), WARPGROUPS)
FILLS = (1, 2, 4, 8)  # programs, in times of what fills the multiprocessors once
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


def latent_inputs(pool: torch.Tensor, batch: int, seed: int, heads: int = 64, topk: int = 2048) -> DecodeInputs:
    """Query heads over one latent cache of 512 + 64 numbers a token, ``topk`` random places a row."""
    generator = torch.Generator("cuda").manual_seed(seed)
    places = (len(pool) * PAGE, (batch, topk))
    indices = torch.randint(0, *places, generator=generator, device="cuda", dtype=torch.int32)
    lengths = torch.full((batch,), topk, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
    return DecodeInputs(q, (Cache(pool, None, lengths, indices=indices),), 512)


def row_lengths(batch: int, longest: int, kind: str, seed: int) -> list[int]:
    if kind == "full":
        return [longest] * batch
    return np.random.default_rng(seed).integers(1, longest + 1, batch).tolist()


def _bits(pair) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].view(torch.int16), pair[1].view(torch.int32)


@dataclass(frozen=True)
class Choice:
    """What leaves no trace in the bits and is tuned for each batch: the launch shape, and programs a column of heads."""

    tile: Tile
    programs: int

    def plan(self, inputs: DecodeInputs, rule: str) -> Plan:
        return self.tile.takes(make_plan(rule, inputs.lengths(PAGE), self.programs), inputs.d_v)

    def call(self, inputs: DecodeInputs, rule: str):
        """A launch with everything that it needs on the device."""
        plan = DevicePlan.upload(self.plan(inputs, rule), "cuda")
        work = Workspace.for_slots(plan.slots, inputs.heads, inputs.d_v, "cuda")
        return lambda: launch(inputs, plan, workspace=work, tile=self.tile)


def choices(inputs: DecodeInputs) -> list[Choice]:
    """What is tried for inputs of this shape, by number."""
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    tiles = LATENT_TILES if inputs.latent else TILES
    return [Choice(tile, times * programs_for(inputs, processors, tile, per_sm=1)) for tile in tiles for times in FILLS]


def fastest(sets: list[DecodeInputs], rule: str) -> tuple[float, int]:
    """Microseconds of the fastest choice, and its number."""
    numbered = enumerate(choices(sets[0]))
    return min((graph_microseconds([choice.call(inputs, rule) for inputs in sets]), number) for number, choice in numbered)


def _moved(inputs: DecodeInputs, choice: Choice, rule: str) -> bool:
    """Whether the tuned launch has other bits than one program a row in another tile, or than the first row alone."""
    found = launch(inputs, choice.plan(inputs, rule), tile=choice.tile)
    other = launch(inputs, one_program_a_row(choice.plan(inputs, rule)), tile=choices(inputs)[-1].tile)
    alone = launch(inputs.row(0), choice.plan(inputs.row(0), rule), tile=choice.tile)
    return not (
        all(map(torch.equal, _bits(found), _bits(other)))
        and torch.equal(found[0][:1].view(torch.int16), alone[0].view(torch.int16))
    )


def _flashmla_time(batch: int, heads: int, topk: int) -> float | None:
    """FlashMLA's own time, where its extension is found."""
    # Looked up by name: FlashMLA's adapter lies in a room above the kernels.
    flashmla = importlib.import_module("batch_variance.hooks.flashmla")
    try:
        op = flashmla.load()
    except BadInput:
        return None
    sets = [flashmla.random_flashmla_inputs(batch, heads, 576, topk, pages=LATENT_PAGES, seed=s) for s in range(2)]
    made = [flashmla.decode(op, some)[-2:] for some in sets]
    calls = [lambda some=some, two=two: flashmla.decode(op, some, *two) for some, two in zip(sets, made)]
    return graph_microseconds(calls)


@dataclass
class _Recorder:
    """Points as they are timed: a batch-wide default and rules, each at its fastest choice."""

    folder: Path
    bench: Benchmark
    ratios: dict[str, list[float]]
    moved: int = 0

    def point(self, shape: str, batch: int, sets: list[DecodeInputs], rules: tuple[str, ...], size: int) -> None:
        default, _ = fastest(sets, BATCH_WIDE)
        line = []
        for rule in (BATCH_WIDE, *rules):
            mine, policy = default, "default"
            if rule != BATCH_WIDE:
                mine, number = fastest(sets, rule)
                policy = f"invariant-{rule}"
                self.moved += rule != "never-split" and _moved(sets[0], choices(sets[0])[number], rule)
                self.ratios.setdefault(f"{sets[0].d_v} columns, {rule}", []).append(mine / default)
                line.append(f"{mine / default:.2f}")
            self.bench.add("triton", policy, shape, batch, "time", "us", mine, default)
            self.bench.add("triton", policy, shape, batch, "bandwidth", "TB/s", size / mine / 1e6, size / default / 1e6)
        print(
            f"{shape} batch {batch}: default {default:.1f} us {size / default / 1e6:.2f} TB/s, "
            f"{' '.join(rules)}: {' '.join(line)}",
            flush=True,
        )
        self.bench.save(self.folder)


def run(folder: Path, budget_seconds: float) -> None:
    """Time every shape that the budget allows, smallest first; writes decode.csv in the folder after every shape.

    policy ``invariant-<rule>``, the rules as in ``schedules.rules``, with blocks of 64 tokens. A latent cache's points
    are timed first, FlashMLA beside them where it is found.
    """
    start, recorder = time.time(), _Recorder(folder, Benchmark("decode"), {})
    latent = torch.randn(LATENT_PAGES, PAGE, 1, 576, device="cuda", dtype=torch.bfloat16)
    for (heads, topk), batch in itertools.product(LATENT_SHAPES, LATENT_BATCHES):
        shape = f"h{heads} d576 topk{topk} full"
        sets = [latent_inputs(latent, batch, seed, heads, topk) for seed in range(2)]
        recorder.point(shape, batch, sets, LATENT_RULES, batch * topk * 576 * 2)
        if theirs := _flashmla_time(batch, heads, topk):
            recorder.bench.add("flashmla", "default", shape, batch, "time", "us", theirs, theirs)
            print(f"{shape} batch {batch}: FlashMLA {theirs:.1f} us", flush=True)
    pool = [torch.randn(POOL_PAGES, PAGE, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    cases = [
        (n, kind, b) for b in BATCHES for n in LENGTHS for kind in ("full", "ragged") if b * n <= POOL_PAGES * PAGE
    ]
    for longest, kind, batch in cases:
        if time.time() - start > budget_seconds:
            print(f"no time left for batch {batch}, {longest} {kind} and what follows", flush=True)
            break
        size = sum(row_lengths(batch, longest, kind, 0)) * 8 * 128 * 2 * 2
        sets = [random_inputs(pool, row_lengths(batch, longest, kind, seed), seed) for seed in range(copies(size, 8))]
        recorder.point(f"h64 kv8 d128 {longest} {kind}", batch, sets, RULES, size)
    recorder.bench.save(folder)
    for rule, values in recorder.ratios.items():
        print(f"{rule}: geometric mean {np.exp(np.mean(np.log(values))):.3f} worst {max(values):.2f}")
    print(
        f"tuned launches whose bits differ from one program a row in another tile or from the row alone: "
        f"{recorder.moved}; {time.time() - start:.0f} s",
        flush=True,
    )
