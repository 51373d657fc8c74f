"""Measures split-KV decode on a GPU and writes ``data/recorded``: bits of a row alone and in a batch, and what each
rule costs.

Two kernels are measured: this project's Triton kernels, and FlashMLA where its extension is found. Correctness comes
first, then bits, then CUDA-graph timings; what fails is reported and the rest goes on. Run it on the GPU machine as
``python -m batch_variance.studies.split_scheduler_recording OUT [check] [tune] [bits] [time] [missing]``: ``missing``
times only the kernels, shapes and batches of which OUT has no time.
"""

import sys
import time
import traceback
from pathlib import Path
from typing import Callable

import numpy as np
import pandas as pd
import torch

from ..common import BadInput, resolve_device, write_atomically
from ..common.provenance import gpu_columns
from ..hooks import flashmla
from ..kernels.decode import (
    Cache,
    DecodeInputs,
    DevicePlan,
    Tile,
    WARPGROUPS,
    Workspace,
    default_tile,
    emulate,
    exact,
    launch,
    programs_for,
)
from ..numerics import row_scaled_ulp, ulp_distance
from ..schedules import BATCH_WIDE, make_plan, one_program_a_row

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHECKED_ROWS = 24
POOL_PAGES = 65536
FLASHMLA_RULES = (
    "never-split",
    "fixed-count-2",
    "fixed-count-3",
    "fixed-count-4",
    "fixed-count-6",
    "fixed-count-8",
    "fixed-chunk-4",
    "fixed-chunk-8",
    "fixed-chunk-16",
    "root-length",
    "by-length-2-8",
    "by-length-4-16",
    "by-length-1-4-16",
    "by-length-8-24",
)
STREAMS = (1, 2, 4)
FLASHMLA_SHAPES = ((64, 512), (64, 2048), (128, 512), (128, 2048))
TRITON_RULES = {
    "grouped": ("free-4", "free-8", "fixed-chunk-4", "fixed-count-4", "never-split"),
    "latent": ("free-2", "free-4", "free-8", "fixed-chunk-4", "fixed-count-4", "never-split"),
}
ULP_EDGES = (0, 1, 2, 4, 8, 16, 64, 1024)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def differs(a, b) -> bool:
    """Whether two (out, lse) pairs differ in any bit."""
    return any(not torch.equal(bits(x), bits(y)) for x, y in zip(a, b))


def graph_microseconds(calls: list[Callable[[], object]], replays: int = 12) -> float:
    """Median time of one call in microseconds: the calls (one input set each, so that no cache stays warm) in one
    graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in events])) * 1e3 / len(calls)


def compare(batch, rerun, solos: dict, splits_batch, splits_solo: dict, truth=None) -> tuple[dict, dict]:
    """Counts of one batch: rows that differ, by whether their split count changed, and how far the values lie apart.

    batch, rerun: (out ``[rows, heads, d_v]``, lse ``[rows, heads]``); solos: row -> the same of that row alone.
    Returns the row of ``decode_bits.csv`` and a histogram of ULP distances over the rows that differ.
    """
    rows = list(solos)
    changed = {row: int(splits_batch[row]) != int(splits_solo[row]) for row in rows}
    different = [row for row in rows if differs([t[row : row + 1] for t in batch], solos[row])]
    found = {
        "rows_checked": len(rows),
        "rerun_differs": int(differs(batch, rerun)),
        "solo_differs": len(different),
        "rows_split_changed": sum(changed.values()),
        "differ_split_changed": sum(changed[r] for r in different),
        "differ_split_same": sum(not changed[r] for r in different),
        "splits_low": int(min(splits_batch)),
        "splits_high": int(max(splits_batch)),
    }
    histogram = {}
    if different:
        a = torch.stack([batch[0][row] for row in different])
        b = torch.cat([solos[row][0] for row in different])
        distance = ulp_distance(a, b)
        scaled = row_scaled_ulp(a.flatten(1), b.flatten(1))
        edges = torch.tensor(ULP_EDGES, device=distance.device)
        slots = torch.bucketize(distance.flatten(), edges)
        counts = torch.bincount(slots, minlength=len(ULP_EDGES) + 1).tolist()
        histogram = dict(zip([*map(str, ULP_EDGES), "more"], counts))
        found |= {
            "values": a.numel(),
            "values_differ": int((distance > 0).sum()),
            "ulp_median": float(distance[distance > 0].double().median()),
            "ulp_max": int(distance.max()),
            "row_scaled_ulp_max": float(scaled.max()),
        }
        if truth is not None:
            inside = [row for row in different if row < len(truth)]
            if inside:
                a, b, t = (
                    torch.stack([x[row] for row in inside])
                    for x in (batch[0], {r: solos[r][0][0] for r in inside}, truth)
                )
                far_a, far_b = (a.double() - t).abs(), (b.double() - t).abs()
                found |= {
                    "batch_closer": int((far_a < far_b).sum()),
                    "solo_closer": int((far_b < far_a).sum()),
                    "error_batch": float((a.double() - t).norm() / t.norm()),
                    "error_solo": float((b.double() - t).norm() / t.norm()),
                }
    return found, histogram


def checked_rows(batch: int) -> list[int]:
    return (
        list(range(batch))
        if batch <= CHECKED_ROWS
        else sorted(np.random.default_rng(batch).choice(batch, CHECKED_ROWS, replace=False).tolist())
    )


# ---------------------------------------------------------------- this project's kernels


def grouped_inputs(pool, lengths: list[int], seed: int) -> DecodeInputs:
    """64 query and 8 key/value heads of 128 over shuffled pages of a shared pool."""
    keys, values = pool
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = -(-max(lengths) // 64)
    table = (
        torch.randperm(POOL_PAGES, generator=generator, device="cuda")[: pages * len(lengths)]
        .view(len(lengths), pages)
        .int()
    )
    q = torch.randn(len(lengths), 64, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    return DecodeInputs(
        q, (Cache(keys, values, torch.tensor(lengths, dtype=torch.int32, device="cuda"), table.contiguous()),), 128
    )


def latent_inputs(latent, lengths: list[int], heads: int, topk: int, seed: int) -> DecodeInputs:
    """Sparse MLA over a shared latent pool ``[pages, 64, 1, d_qk]``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(len(lengths), heads, latent.shape[3], generator=generator, device="cuda", dtype=torch.bfloat16)
    indices = torch.randint(
        0, latent.shape[0] * 64, (len(lengths), topk), generator=generator, device="cuda", dtype=torch.int32
    )
    return DecodeInputs(
        q, (Cache(latent, None, torch.tensor(lengths, dtype=torch.int32, device="cuda"), indices=indices),), 512
    )


def drawn_lengths(batch: int, longest: int, kind: str, seed: int) -> list[int]:
    if kind == "full":
        return [longest] * batch
    return np.random.default_rng(seed).integers(1, longest + 1, batch).tolist()


def triton_cases(quick: bool = False):
    """(kind of heads, shape name, batch, maker of inputs by seed)."""
    keys = torch.randn(POOL_PAGES, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(POOL_PAGES, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
    for longest in (1024, 8192):
        for kind in ("full", "ragged"):
            for batch in BATCHES:
                if not (quick and batch not in (1, 16, 128)):
                    yield (
                        "grouped",
                        f"h64 kv8 d128 {longest} {kind}",
                        batch,
                        lambda seed, b=batch, n=longest, k=kind: grouped_inputs(
                            (keys, values), drawn_lengths(b, n, k, seed), seed
                        ),
                    )
    for d_qk in (576, 512):
        latent = torch.randn(4096, 64, 1, d_qk, device="cuda", dtype=torch.bfloat16)
        for heads, topk in FLASHMLA_SHAPES:
            kind = "full" if d_qk == 576 else "ragged"
            for batch in BATCHES:
                if not (quick and batch not in (1, 16, 128)):
                    yield (
                        "latent",
                        f"h{heads} d{d_qk} topk{topk} {kind}",
                        batch,
                        lambda seed, b=batch, n=topk, k=kind, h=heads, pool=latent: latent_inputs(
                            pool, drawn_lengths(b, n, k, seed), h, n, seed
                        ),
                    )


def programs_tried(inputs: DecodeInputs) -> list[int]:
    fill = programs_for(inputs, 132, per_sm=1)
    return [fill, 2 * fill, 4 * fill]


def triton_bits(shape, batch, rule, make) -> tuple[dict, dict]:
    inputs = make(batch)
    lengths = inputs.lengths(64)
    programs = programs_tried(inputs)[0]
    plan = make_plan(rule, lengths, programs)
    run = launch(inputs, plan)
    rerun = launch(inputs, plan)
    solos, splits = {}, {}
    for row in checked_rows(batch):
        alone = make_plan(rule, [lengths[row]], programs)
        solos[row] = launch(inputs.row(row), alone)
        splits[row] = alone.pieces[0]
    truth = _truth(inputs) if rule in (BATCH_WIDE, "free-4") else None
    found, histogram = compare(run, rerun, solos, plan.pieces, splits, truth)
    found["schedules_tried"] = 1
    found["schedules_differ"] = 0
    if rule.startswith("free"):
        plans = [
            make_plan(rule, lengths, n, 64, o)
            for n, o in ((1, 5), (7, 5), (programs * 2, 0), (programs * 4, 5), (997, 3))
        ]
        plans += [one_program_a_row(plan), make_plan("fixed-chunk-" + rule.split("-")[1], lengths, programs)]
        found["schedules_tried"] = 1 + len(plans)
        found["schedules_differ"] = sum(differs(launch(inputs, other), run) for other in plans)
    return found, histogram


def _truth(inputs: DecodeInputs, rows: int = 4):
    some = min(inputs.batch, rows)
    caches = tuple(
        Cache(
            c.keys,
            c.values,
            c.lengths[:some].contiguous(),
            **{"block_table" if c.indices is None else "indices": c.table[:some].contiguous()},
        )
        for c in inputs.caches
    )
    return exact(DecodeInputs(inputs.q[:some].contiguous(), caches, inputs.d_v, inputs.scale, inputs.sink))[0]


def triton_time(make, rule: str, tile: Tile | None = None, programs: list[int] | None = None) -> tuple[float, int]:
    """Best median over the program counts tried, and that count."""
    first = make(0)
    tile = tile or default_tile(first)
    tokens = sum(first.lengths(64))
    wide = first.kv_heads * (first.q.shape[2] + (0 if first.latent else first.d_v)) * 2
    sets = [make(seed) for seed in range(int(np.clip(200e6 / (tokens * wide), 1, 8)))]
    found = []
    for count in programs or programs_tried(first):
        calls = []
        for inputs in sets:
            plan = DevicePlan.upload(tile.takes(make_plan(rule, inputs.lengths(64), count), inputs.d_v), "cuda")
            work = Workspace.for_slots(plan.plan.num_slots, inputs.heads, inputs.d_v, "cuda")
            calls.append(lambda i=inputs, p=plan, w=work: launch(i, p, workspace=w, tile=tile))
        found.append((graph_microseconds(calls), count))
    return min(found)


# ---------------------------------------------------------------- FlashMLA


def flashmla_maker(heads: int, d_qk: int, topk: int, extra: int, kind: str, batch: int):
    """Maker of inputs by seed over one pool of pages for the shape."""
    base = flashmla.random_flashmla_inputs(1, heads, d_qk, topk, extra, kind == "ragged", pages=4096, seed=1)

    def make(seed):
        generator = torch.Generator("cuda").manual_seed(1000 + seed)

        def draw(shape, low, high):
            return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=torch.int32)

        q = torch.randn(batch, 1, heads, d_qk, generator=generator, device="cuda", dtype=torch.bfloat16)
        ragged = kind == "ragged"
        return flashmla.FlashMLAInputs(
            q,
            base.cache,
            draw((batch, 1, topk), 0, 4096 * 64),
            draw((batch,), 1, topk + 1) if ragged else None,
            None,
            base.extra_cache,
            draw((batch, 1, extra), 0, 4096 * 64) if extra else None,
            draw((batch,), 0, extra + 1) if ragged and extra else None,
        )

    return make


def flashmla_bits(op, make, batch: int, rule: str) -> tuple[dict, dict]:
    inputs = make(batch)

    def run(some):
        if rule == BATCH_WIDE:
            out, lse, _, splits = flashmla.decode(op, some)
            return (out[:, 0], lse[..., 0]), np.diff(splits.cpu().numpy())
        plan = flashmla.batch_invariant_plan(some, rule)
        out, lse = flashmla.batch_invariant_decode(op, some, plan=plan)
        counts = np.concatenate([np.diff(splits.cpu().numpy()) for *_, splits in plan.calls])
        return (out[:, 0], lse[..., 0]), counts

    whole, splits = run(inputs)
    again, _ = run(inputs)
    solos, alone = {}, {}
    for row in checked_rows(batch):
        solos[row], counts = run(inputs.rows(row, row + 1))
        alone[row] = counts[0]
    some = min(batch, 4)
    truth = exact(inputs.rows(0, some).as_decode_inputs())[0] if rule in (BATCH_WIDE, "fixed-count-4") else None
    return compare(whole, again, solos, splits, alone, truth)


def flashmla_time(op, make, rule: str, streams: int = 1) -> tuple[float, int]:
    sets = [make(seed) for seed in range(6 if make(0).batch <= 32 else 3)]
    calls, count = [], 1
    for inputs in sets:
        if rule == BATCH_WIDE:
            _, _, metadata, splits = flashmla.decode(op, inputs)
            calls.append(lambda i=inputs, m=metadata, s=splits: flashmla.decode(op, i, m, s))
        else:
            plan = flashmla.batch_invariant_plan(inputs, rule)
            count = max(count, len(plan.calls))
            calls.append(lambda i=inputs, p=plan: flashmla.batch_invariant_decode(op, i, plan=p, streams=streams))
    return graph_microseconds(calls), count


# ---------------------------------------------------------------- the run


KEYS = {
    "decode": ["benchmark", "kernel", "policy", "shape", "m", "metric"],
    "decode_bits": ["kernel", "policy", "shape", "m"],
    "decode_ulp": ["kernel", "policy", "shape", "m", "ulp_up_to"],
    "decode_tuning": ["shape", "m", "heads", "warps", "stages", "policy", "programs_per_fill"],
}


class Recorder:
    """Rows of the tables, saved after every stage; failures are counted and printed, not raised."""

    def __init__(self, folder: Path):
        self.folder, self.columns, self.failures = folder, gpu_columns(), 0
        self.tables: dict[str, list[dict]] = {name: [] for name in KEYS}

    def attempt(self, label: str, work: Callable[[], object]):
        """The work's result, or None where it failed."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the recording goes on past any one shape
            self.failures += 1
            print("FAILED", label, str(error).splitlines()[0] if str(error) else repr(error), flush=True)
            if self.failures <= 3:
                traceback.print_exc()
            return None

    def bits(self, kernel, policy, shape, batch, found):
        if found is None:
            return
        counts, histogram = found
        where = {"kernel": kernel, "policy": policy, "shape": shape, "m": batch}
        self.tables["decode_bits"].append({**where, **counts, **self.columns})
        for ulp, values in histogram.items():
            self.tables["decode_ulp"].append({**where, "ulp_up_to": ulp, "values": values, **self.columns})

    def measure(self, kernel, policy, shape, batch, metric, unit, value, default):
        """One row of the benchmark table; ``baseline`` is the default policy's value in this run."""
        where = {"benchmark": "decode", "kernel": kernel, "policy": policy, "shape": shape, "m": batch}
        figures = {"value": round(value, 3), "baseline": round(default, 3), "ratio": round(value / default, 4)}
        self.tables["decode"].append({**where, "metric": metric, "unit": unit, **figures, **self.columns})

    def time(self, kernel, policy, shape, batch, microseconds, default):
        self.measure(kernel, policy, shape, batch, "time", "us", microseconds, default)

    def timed(self) -> set[tuple[str, str, int]]:
        """(kernel, shape, batch) whose default has a time in the folder."""
        path = self.folder / "decode.csv"
        if not path.exists():
            return set()
        table = pd.read_csv(path)
        table = table[(table.metric == "time") & (table.policy == "default")]
        return set(zip(table.kernel, table["shape"], table.m))

    def calls(self, policy, shape, batch, calls):
        self.measure("flashmla", policy, shape, batch, "calls", "count", calls, 1)

    def save(self):
        """Write the tables; rows of an earlier run stay where this run has none of the same key."""
        for name, rows in self.tables.items():
            if rows:
                path, table = self.folder / f"{name}.csv", pd.DataFrame(rows)
                if path.exists():
                    table = pd.concat([pd.read_csv(path, dtype={"ulp_up_to": str}), table])
                table = table.drop_duplicates(KEYS[name], keep="last")
                write_atomically(path, lambda temporary, table=table: table.to_csv(temporary, index=False))


def policy_of(rule: str) -> str:
    return "default" if rule == BATCH_WIDE else "invariant-" + rule


def check_stage(rec: Recorder, op) -> None:
    """Every kernel and shape against float64 before anything else is believed."""
    for group, shape, batch, make in triton_cases(quick=True):
        if batch == 16:
            inputs = make(3)
            for rule in (BATCH_WIDE, TRITON_RULES[group][0]):

                def one():
                    truth, some = (
                        _truth(inputs, 4),
                        launch(inputs, make_plan(rule, inputs.lengths(64), programs_tried(inputs)[0]))[0][:4],
                    )
                    print(
                        f"check triton {shape} {rule}: relative error {float((some.double() - truth).norm() / truth.norm()):.2e}",
                        flush=True,
                    )

                rec.attempt(f"check {shape} {rule}", one)
    if op is not None:
        for d_qk, topk, extra, kind in ((576, 2048, 0, "full"), (512, 512, 128, "ragged")):

            def one():
                inputs = flashmla_maker(64, d_qk, topk, extra, kind, 6)(1)
                plain = inputs.as_decode_inputs()
                truth = exact(plain)[0]
                fm = flashmla.decode(op, inputs)[0][:, 0]
                mine = flashmla.batch_invariant_decode(op, inputs, "fixed-count-2")[0][:, 0]
                ours = launch(plain, make_plan("free-8", plain.lengths(64), 33))[0]
                model = emulate(plain, make_plan(BATCH_WIDE, plain.lengths(64), 132), "flashmla")[0]
                show = [f"{float((x.double() - truth).norm() / truth.norm()):.2e}" for x in (fm, mine, ours, model)]
                print(f"check flashmla d{d_qk} {kind}: default, invariant, our kernels, emulation: {show}", flush=True)

            rec.attempt(f"check flashmla {d_qk}", one)


def tune_stage(rec: Recorder) -> None:
    tiles = {
        "grouped": [Tile(16, 4, 5), Tile(16, 4, 3), Tile(16, 4, 7), Tile(16, 2, 5)],
        "latent": [WARPGROUPS, Tile(32, 8, 5), Tile(32, 8, 3), Tile(16, 8, 5), Tile(16, 8, 3), Tile(16, 4, 3)],
    }
    for group, shape, batch, make in triton_cases(quick=True):
        wanted = shape in ("h64 kv8 d128 8192 ragged", "h64 d576 topk2048 full")
        if not wanted or batch == 1:
            continue
        for tile in tiles[group]:
            for rule in (BATCH_WIDE, TRITON_RULES[group][0]):
                inputs = make(0)
                fill = programs_for(inputs, 132, tile, 1)
                got = rec.attempt(
                    f"tune {shape} {tile} {rule}",
                    lambda: [(n, round(triton_time(make, rule, tile, [n * fill])[0], 1)) for n in (1, 2, 4)],
                )
                print("tune", shape, batch, tile, rule, got, flush=True)
                for n, value in got or []:
                    rec.tables["decode_tuning"].append(
                        {
                            "shape": shape,
                            "m": batch,
                            "heads": tile.heads,
                            "warps": tile.warps,
                            "stages": tile.stages,
                            "policy": policy_of(rule),
                            "programs_per_fill": n,
                            "time_us": value,
                            **rec.columns,
                        }
                    )


def bits_stage(rec: Recorder, op) -> None:
    for group, shape, batch, make in triton_cases():
        for rule in (BATCH_WIDE, *TRITON_RULES[group]):
            if rule == "free-8" and group == "grouped" and batch > 16:
                continue
            rec.bits(
                "triton",
                policy_of(rule),
                shape,
                batch,
                rec.attempt(f"bits {shape} {batch} {rule}", lambda: triton_bits(shape, batch, rule, make)),
            )
    rec.save()
    if op is None:
        return
    for heads, d_qk, topk, extra, kind in (
        (64, 576, 2048, 0, "full"),
        (128, 576, 2048, 0, "full"),
        (64, 576, 512, 0, "full"),
        (64, 512, 512, 0, "ragged"),
        (64, 512, 2048, 0, "ragged"),
        (128, 512, 2048, 0, "ragged"),
        (64, 512, 512, 512, "ragged"),
        (128, 512, 1024, 256, "ragged"),
    ):
        shape = f"h{heads} d{d_qk} topk{topk}" + (f"+{extra}" if extra else "") + f" {kind}"
        for batch in BATCHES:
            make = flashmla_maker(heads, d_qk, topk, extra, kind, batch)
            for rule in (BATCH_WIDE, *FLASHMLA_RULES):
                rec.bits(
                    "flashmla",
                    policy_of(rule),
                    shape,
                    batch,
                    rec.attempt(f"bits flashmla {shape} {batch} {rule}", lambda: flashmla_bits(op, make, batch, rule)),
                )


def time_stage(rec: Recorder, op, known: set[tuple[str, str, int]] = frozenset()) -> None:
    """known: (kernel, shape, batch) to pass over."""
    if op is not None:
        for heads, topk in FLASHMLA_SHAPES:
            for d_qk, kind in ((576, "full"), (512, "ragged")):
                shape = f"h{heads} d{d_qk} topk{topk} {kind}"
                for batch in BATCHES:
                    if ("flashmla", shape, batch) in known:
                        continue
                    make = flashmla_maker(heads, d_qk, topk, 0, kind, batch)
                    default = rec.attempt(f"time {shape} {batch}", lambda: flashmla_time(op, make, BATCH_WIDE))
                    if default is None:
                        continue
                    rec.time("flashmla", "default", shape, batch, default[0], default[0])
                    for rule in FLASHMLA_RULES:
                        got = rec.attempt(f"time {shape} {batch} {rule}", lambda: flashmla_time(op, make, rule))
                        if got is None:
                            continue
                        best = got[0]
                        for streams in STREAMS if got[1] > 1 else ():
                            more = rec.attempt(
                                f"time {shape} {batch} {rule} {streams}", lambda: flashmla_time(op, make, rule, streams)
                            )
                            if more:
                                rec.time(
                                    "flashmla",
                                    f"{policy_of(rule)}-{streams}-streams",
                                    shape,
                                    batch,
                                    more[0],
                                    default[0],
                                )
                                best = more[0]  # the last, and most, streams are the function's default
                        rec.time("flashmla", policy_of(rule), shape, batch, best, default[0])
                        rec.calls(policy_of(rule), shape, batch, got[1])
        rec.save()
    for group, shape, batch, make in triton_cases():
        if ("triton", shape, batch) in known:
            continue
        default = rec.attempt(f"time triton {shape} {batch}", lambda: triton_time(make, BATCH_WIDE))
        if default is None:
            continue
        rec.time("triton", "default", shape, batch, default[0], default[0])
        for rule in TRITON_RULES[group]:
            got = rec.attempt(f"time triton {shape} {batch} {rule}", lambda: triton_time(make, rule))
            if got:
                rec.time("triton", policy_of(rule), shape, batch, got[0], default[0])


def summary(rec: Recorder) -> None:
    times = pd.DataFrame(rec.tables["decode"])
    if len(times):
        times = times[times.metric == "time"]
        print(
            times.groupby(["kernel", "shape", "policy"])
            .ratio.agg(lambda r: round(float(np.exp(np.log(r).mean())), 3))
            .unstack("policy")
            .T.to_string()
        )
    found = pd.DataFrame(rec.tables["decode_bits"])
    if len(found):
        cols = [
            "rows_checked",
            "rerun_differs",
            "solo_differs",
            "rows_split_changed",
            "differ_split_changed",
            "differ_split_same",
        ]
        print(found.groupby(["kernel", "policy"])[cols].sum().to_string())
        if "schedules_tried" in found:
            print(
                found[found.kernel == "triton"]
                .groupby("policy")[["schedules_tried", "schedules_differ"]]
                .sum()
                .to_string()
            )
    print("failures", rec.failures)


def main(arguments: list[str]) -> int:
    """Record into the folder named first, the stages named after it (all but ``tune`` if none). Returns failures.

    Raises BadInput without a GPU, without a folder, or for an unknown stage.
    """
    stages = arguments[1:] or ["check", "bits", "time"]
    unknown = sorted(set(stages) - {"check", "tune", "bits", "time", "missing"})
    if not arguments or unknown:
        raise BadInput(
            f"{', '.join(unknown) or 'nothing'} was given:"
            " name a folder, then stages of check, tune, bits, time, missing."
        )
    resolve_device("cuda")
    torch.manual_seed(0)
    rec = Recorder(Path(arguments[0]))
    print(rec.columns, flush=True)
    op = rec.attempt("load FlashMLA", flashmla.load)
    for stage, work in (
        ("check", lambda: check_stage(rec, op)),
        ("tune", lambda: tune_stage(rec)),
        ("bits", lambda: bits_stage(rec, op)),
        ("time", lambda: time_stage(rec, op)),
        ("missing", lambda: time_stage(rec, op, rec.timed())),
    ):
        if stage in stages:
            start = time.time()
            rec.attempt(stage, work)
            rec.save()
            print(f"stage {stage}: {time.time() - start:.0f} s", flush=True)
    summary(rec)
    return rec.failures


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
