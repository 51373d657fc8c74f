"""Tunes and times the invariant GEMM against the library's, on CUDA: classes first, then accuracy, then time.

Candidates are launch shapes; every one is run at every row count and must have the class's bits there, or it is out.
What is fastest inside the class becomes the table that `invariant.matmul` reads.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from ...common import BadInput, write_atomically
from ...common.provenance import gpu_columns
from ..classes import FAR_SIZES, bit_name, classify, watch, widest_class
from ..recorded import Benchmark, replace_rows
from ..timing import alternating_microseconds, copies, graph_microseconds
from .invariant import DEFAULTS, STEP, Config, by_rows, matmul, tuned
from .reference import matmul_float64

SHAPES = ((4096, 4096), (7168, 2048), (2048, 7168), (4096, 14336))  # (K, N) of the recorded comparison
ROWS = (1, 16, 64, 256, 1024, 4096)
CHECKED = 64  # rows held against float64

# Candidates by the row counts they are tried at.
_FEW = (
    "parallel 16x64x128 w4 s5 tma swap",
    "parallel 16x64x128 w4 s5 swap",
    "parallel 16x64x64 w4 s8 tma swap",
    "parallel 16x128x128 w8 s5 tma swap",
    "parallel 16x128x64 w8 s4",
    "parallel 16x64x64 w4 s3",
    "parallel 16x32x128 w4 s6 tma",
    "parallel 16x16x128 w4 s8 tma",
    "parallel 16x16x128 w2 s8 tma",
)
_THIRTY = (
    "parallel 32x64x128 w4 s4 tma swap",
    "parallel 32x64x128 w4 s5 tma swap",
    "parallel 32x64x128 w4 s5 swap",
    "parallel 32x64x64 w4 s8 tma swap",
    "parallel 32x128x64 w4 s7 tma swap",
    "parallel 32x128x128 w8 s4 tma swap",
    "parallel 32x32x128 w4 s6 tma",
    "parallel 16x64x128 w4 s5 tma swap",
    "parallel 64x32x128 w4 s6 tma",
    "parallel 64x64x128 w4 s5 tma",
)
_SOME = (
    "parallel 64x64x128 w4 s5 tma",
    "parallel 64x64x128 w4 s5 tma swap",
    "parallel 64x64x64 w4 s7 tma",
    "parallel 64x32x128 w4 s6 tma",
    "parallel 64x128x64 w4 s6 tma",
    "parallel 64x128x128 w8 s4 tma swap",
    "parallel 64x64x128 w8 s3",
    "parallel 64x16x128 w4 s8 tma",
)
_MORE = (
    "parallel 64x128x64 w4 s5 tma",
    "parallel 64x128x128 w4 s4 tma",
    "parallel 64x128x128 w4 s4",
    "parallel 128x64x128 w4 s4 tma",
    "parallel 128x128x64 w4 s5 tma",
    "parallel 128x128x64 w8 s5 tma",
    "parallel 128x128x128 w8 s3 tma",
    "parallel 64x256x64 w4 s4 tma",
    "parallel 128x256x64 w8 s4 tma",
    "in-turn 64x256x64 w4 s4 tma",
    "in-turn 128x128x64 w4 s5 tma",
    "in-turn 128x256x64 w8 s4 tma",
    "in-turn 256x128x64 w8 s4 tma",
    "parallel 256x128x64 w8 s3 tma",
    "parallel 128x64x128 w4 s4 tma swap",
    "parallel 128x64x64 w4 s6 tma swap",
    "parallel 256x64x64 w4 s5 tma swap",
    "parallel 64x64x128 w4 s6 tma",
    "parallel 128x32x128 w4 s5 tma",
)
_MANY = (
    "in-turn 128x256x64 w8 s3 tma",
    "in-turn 128x256x64 w8 s4 tma",
    "in-turn 256x128x64 w8 s3 tma",
    "in-turn 256x128x64 w8 s4 tma",
    "in-turn 128x128x64 w4 s5 tma",
    "in-turn 128x128x64 w8 s4 tma",
    "parallel 128x256x64 w8 s4 tma",
    "parallel 128x128x64 w4 s5 tma",
    "in-turn 128x128x64 w8 s5 tma hold",
    "in-turn 128x128x64 w8 s4 tma hold",
    "in-turn 128x128x128 w8 s3 tma hold",
)
CANDIDATES = {1: _FEW, 16: _FEW, 32: _THIRTY, 64: _SOME, 256: _MORE, 1024: _MANY, 4096: _MANY}


def counts_tried(K: int, N: int) -> tuple[int, ...]:
    """Numbers of segments worth trying for a weight [N, K], of those into which K can fall."""
    worth = (1, 2) if N > 6144 else (1, 2, 4) if N > 3072 else (1, 2, 3, 4)
    steps = -(-K // STEP)
    return tuple(count for count in worth if (count - 1) * -(-steps // count) < steps)


def compile_ahead(workers: int, rows: tuple[int, ...] = ROWS) -> None:
    """Compile every candidate in processes of their own, which share the compiler's cache; failures show up later."""
    command = [sys.executable, "-m", "batch_variance.kernels.gemm.bench", *map(str, rows)]
    running = [subprocess.Popen([*command, str(i), str(workers)], stderr=subprocess.DEVNULL) for i in range(workers)]
    for one in running:
        one.wait()


def _compile_share(index: int, workers: int, rows: tuple[int, ...]) -> None:
    names = sorted({name for m in rows for name in CANDIDATES[m]})
    jobs = [(name, count) for name in names for count in ((1, 2) if name.startswith("parallel") else (1, 2, 3, 4))]
    x, w = (torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16) for n in (16, 512))
    for name, count in jobs[index::workers]:
        try:
            matmul(x, w, config=Config.parse(name), count=count)
        except Exception as error:  # noqa: BLE001 - one that does not fit the device is left out by the tuner
            print(f"compile {name} {count}: {str(error).splitlines()[0]}", flush=True)
    torch.cuda.synchronize()


class _Shape:
    """Inputs of one weight shape, random and rotating."""

    def __init__(self, K: int, N: int, seed: int = 0):
        generator = torch.Generator("cuda").manual_seed(seed)
        make = lambda *size: torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.K, self.N, self.x = K, N, make(max(ROWS), K)
        self.weights = [make(N, K) for _ in range(copies(2 * N * K))]
        self.more = make(max(FAR_SIZES) - max(ROWS), K)  # made last: classes tried on x keep their names
        self.exact = matmul_float64(self.x[:CHECKED], self.weights[0])
        self.bound = 2.0**-8 * self.exact.abs() + 2.0**-16 * (
            self.x[:CHECKED].double().abs() @ self.weights[0].double().abs().t()
        )

    def sets(self, m: int):
        # Rows differ from call to call, too; beyond a few hundred rows the time is arithmetic's, and fewer sets will
        # do.
        count = len(self.weights) if m <= 256 else min(3, len(self.weights))
        return [(self.x[:m].roll(i, 0), self.weights[i]) for i in range(count)]

    def calls(self, call, m: int) -> list:
        return [lambda x=x, w=w: call(x, w) for x, w in self.sets(m)]

    def time(self, call, m: int) -> float:
        return graph_microseconds(self.calls(call, m))

    def wrong(self, y: torch.Tensor) -> int:
        """Values of the first rows of y that lie farther from float64 than rounding can bring them."""
        rows = min(len(y), CHECKED)
        return int((~((y[:rows].double() - self.exact[:rows]).abs() <= self.bound[:rows])).sum())


def tune(shape: _Shape, count: int, deadline: float, rows: tuple[int, ...] = ROWS) -> tuple[list[dict], str]:
    """Name every candidate's bits at its row counts, then time those in the widest class. Returns rows of
    ``gemm_tuning.csv`` and the class."""
    found = [
        dict(
            k=shape.K,
            n=shape.N,
            segments=count,
            m=m,
            config=name,
            bit_class="",
            wrong=-1,
            time_us=float("nan"),
            failure="",
        )
        for m in rows
        for name in CANDIDATES[m]
    ]

    def attempt(row, work):
        if time.time() > deadline:
            row["failure"] = "no time left"
            return
        try:
            config = Config.parse(row["config"])
            row |= work(row["m"], lambda x, w: matmul(x, w, config=config, count=count))
        except Exception as error:  # noqa: BLE001 - a candidate that does not fit the device is a result
            row["failure"] = (str(error) or repr(error)).splitlines()[0][:120]

    def look(m, call):
        y, watched = watch(lambda x: call(x, shape.weights[0]), shape.x, m)
        return dict(bit_class=bit_name(watched), wrong=shape.wrong(y))

    for row in found:
        attempt(row, look)
    reference = widest_class(row for row in found if row["wrong"] == 0)
    for row in found:
        if row["wrong"] == 0 and row["bit_class"] == reference:
            attempt(row, lambda m, call: dict(time_us=round(shape.time(call, m), 3)))
    return found, reference


def library_times(shape: _Shape, rows: tuple[int, ...] = ROWS) -> dict[int, float]:
    return {m: shape.time(F.linear, m) for m in rows}


def _choose(tuning: pd.DataFrame, library: dict[int, float]) -> tuple[int, dict[int, str]]:
    """The number of segments with the least geometric mean of time over the library's, and its configurations by
    rows."""
    best = {}
    for count, mine in tuning.dropna(subset="time_us").groupby("segments"):
        fastest = mine.loc[mine.groupby("m").time_us.idxmin()].set_index("m")
        if set(fastest.index) == set(library):
            ratios = [fastest.time_us[m] / library[m] for m in library]
            best[int(count)] = (float(np.exp(np.mean(np.log(ratios)))), fastest.config.to_dict())
    if not best:
        raise BadInput("no number of segments has a candidate at every row count: nothing can be chosen.")
    count = min(best, key=lambda c: best[c][0])
    return count, best[count][1]


def run(
    folder: Path,
    budget_seconds: float,
    rows: tuple[int, ...] = ROWS,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    workers: int = 12,
) -> None:
    """Tune and time every shape (K, N) within the budget; writes gemm.csv, gemm_tuning.csv and gemm_classes.csv in the
    folder, and tuned/gemm.csv beside it, each as soon as a shape is done.

    rows: ROWS, which choose a shape's class anew; or other row counts that have candidates, to tune these in the class
    that the table names and leave the others. They choose the class of a shape outside SHAPES that has none. Raises
    BadInput for row counts without candidates, and for some rows of SHAPES where the table names no class.
    """
    if not rows or set(rows) - set(CANDIDATES):
        raise BadInput(f"rows {list(rows)}: give some of {', '.join(map(str, CANDIDATES))}.")
    known = tuned("gemm") if tuple(rows) != ROWS else {}
    missing = [f"N{N} K{K}" for K, N in shapes if tuple(rows) != ROWS and (K, N) in SHAPES and (N, K) not in known]
    if missing:
        raise BadInput(f"tuned/gemm.csv has no class for {', '.join(missing)}: tune all rows first.")
    start = time.time()
    where = gpu_columns()
    compile_ahead(workers, rows)
    print(f"compiled ahead in {time.time() - start:.0f} s", flush=True)
    bench, ratios = Benchmark("gemm"), []
    for index, (K, N) in enumerate(shapes):
        left = budget_seconds - (time.time() - start)
        deadline = time.time() + 0.8 * left / (len(shapes) - index)
        shape, begun = _Shape(K, N), time.time()
        library = library_times(shape, rows)
        tried, classes = [], {}
        for count in (known[N, K][0],) if (N, K) in known else counts_tried(K, N):
            more, classes[count] = tune(shape, count, deadline, rows)
            tried += more
        tuning = pd.DataFrame(tried)
        replace_rows(
            folder / "gemm_tuning.csv",
            [{**row, **where} for row in tried],
            ("k", "n", "segments", "m", "config", "gpu"),
        )
        for count in classes:
            part = tuning[(tuning.segments == count) & (tuning.failure == "")]
            outside = part[part.bit_class != classes[count]]
            print(
                f"K {K} N {N} segments {count}: {len(part)} runs, {len(outside)} outside class {classes[count]}, "
                f"{int((part.wrong > 0).sum())} wrong, "
                f"{int((tuning[tuning.segments == count].failure != '').sum())} failed",
                flush=True,
            )
            for line in outside.head(4).itertuples():
                print("   outside:", line.m, line.config, line.bit_class, flush=True)
        count, chosen = _choose(tuning, library)
        if (N, K) in known:
            chosen = {m: str(config) for m, config in known[N, K][1]} | chosen
        _write_table(folder.parent / "tuned" / "gemm.csv", N, K, count, chosen)
        for m in rows:
            config = Config.parse(chosen[m])
            default, mine = alternating_microseconds(
                shape.calls(F.linear, m), shape.calls(lambda x, w: matmul(x, w, config=config, count=count), m)
            )
            name = f"N{N} K{K}"
            bench.add("gemm", "default", name, m, "time", "us", default, default)
            bench.add("gemm", "invariant", name, m, "time", "us", mine, default)
            for policy, value in (("default", default), ("invariant", mine)):
                moved = 2 * (N * K + m * K + m * N) / value / 1e6
                rate = 2 * m * N * K / value / 1e6
                base = 2 * (N * K + m * K + m * N) / default / 1e6, 2 * m * N * K / default / 1e6
                bench.add("gemm", policy, name, m, "bandwidth", "TB/s", moved, base[0])
                bench.add("gemm", policy, name, m, "rate", "TFLOP/s", rate, base[1])
            ratios.append(mine / default)
            print(
                f"K {K} N {N} M {m} library {default:.1f} ours {mine:.1f} {mine / default:.3f} "
                f"segments {count} {config}",
                flush=True,
            )
        _record_classes(folder, bench, shape, count, chosen, where)
        bench.save(folder)
        print(f"K {K} N {N}: {time.time() - begun:.0f} s", flush=True)
    print(
        f"geometric mean {np.exp(np.mean(np.log(ratios))):.3f} worst {max(ratios):.3f}, {time.time() - start:.0f} s",
        flush=True,
    )


def record_classes(folder: Path, shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
    """Name the bits of every shape (K, N) again over row counts, with the table as it is; writes gemm_classes.csv and
    the classes in gemm.csv. Raises BadInput for a shape that the table does not hold."""
    missing = [f"N{N} K{K}" for K, N in shapes if (N, K) not in tuned("gemm")]
    if missing:
        raise BadInput(f"tuned/gemm.csv does not hold {', '.join(missing)}: tune first.")
    bench, start, where = Benchmark("gemm"), time.time(), gpu_columns()
    for K, N in shapes:
        count, chosen = tuned("gemm")[N, K]
        _record_classes(folder, bench, _Shape(K, N), count, {m: str(config) for m, config in chosen}, where)
        bench.save(folder)
        print(f"K {K} N {N}: {time.time() - start:.0f} s", flush=True)


def _write_table(path: Path, N: int, K: int, count: int, chosen: dict[int, str]) -> None:
    table = pd.DataFrame([dict(n=N, k=K, segments=count, m=m, config=config) for m, config in chosen.items()])
    if path.exists():
        old = pd.read_csv(path)
        table = pd.concat([old[(old.n != N) | (old.k != K)], table])
    write_atomically(path, lambda temporary: table.to_csv(temporary, index=False))


def _record_classes(
    folder: Path, bench: Benchmark, shape: _Shape, count: int, chosen: dict[int, str], where: dict
) -> None:
    """Bits over row counts: the library's, the chosen configurations', and the dispatch that changes between them."""
    weight, x = shape.weights[0], torch.cat([shape.x, shape.more])
    table = sorted((m, Config.parse(name)) for m, name in chosen.items())

    def dispatched(x):
        return matmul(x, weight, config=by_rows(table, DEFAULTS, len(x)), count=count)

    candidates = {"library": lambda x: F.linear(x, weight), "invariant": dispatched}
    candidates |= {
        name: lambda x, c=Config.parse(name): matmul(x, weight, config=c, count=count)
        for name in dict.fromkeys(chosen.values())
    }
    frame = classify(candidates, x, FAR_SIZES)
    key = ("kernel", "shape", "candidate", "m", "gpu")
    rows = frame.assign(kernel="gemm", shape=f"N{shape.N} K{shape.K}").to_dict("records")
    replace_rows(folder / "gemm_classes.csv", [{**row, **where} for row in rows], key)
    for policy, name in (("default", "library"), ("invariant", "invariant")):
        mine = frame[frame.candidate == name]
        default = frame[frame.candidate == "library"].bit_class.nunique()
        bench.add(
            "gemm", policy, f"N{shape.N} K{shape.K}", 0, "bit classes", "count", mine.bit_class.nunique(), default
        )
    print(
        "bit classes:",
        frame.groupby("candidate").bit_class.nunique().to_dict(),
        "rows moved:",
        int(frame.rows_moved.sum()),
        "failures:",
        frame[frame.failure != ""].failure.unique().tolist(),
        flush=True,
    )


if __name__ == "__main__":
    *row_counts, share, shares = map(int, sys.argv[1:])
    _compile_share(share, shares, tuple(row_counts))
