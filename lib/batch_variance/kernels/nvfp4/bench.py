"""Tunes and times the invariant NVFP4 matmul against gllm's dispatch (GEMV up to 32 rows, GEMM above), on CUDA."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ...common import BadInput, write_atomically
from ...common.provenance import gpu_columns
from ...numerics import NVFP4Tensor
from ..classes import FAR_SIZES, bit_name, classify, widest_class
from ..gemm.invariant import Config, by_rows, tuned
from ..recorded import Benchmark, replace_rows
from ..timing import alternating_microseconds, copies, graph_microseconds
from . import triton as default_kernels
from .invariant import DEFAULTS, INVARIANT, matmul
from .policy import policy
from .reference import matmul_float64

SHAPES = ((4096, 4096), (7168, 2048), (2048, 7168), (4096, 14336))  # (K, N)
ROWS = (1, 4, 16, 32, 33, 64, 256, 1024)
COUNTS = (1, 2, 4)
CHECKED = 16

_FEW = (
    "parallel 16x64x128 w4 s4 swap",
    "parallel 16x64x128 w4 s6 swap",
    "parallel 16x64x64 w4 s6 swap",
    "parallel 16x64x128 w4 s3 swap",
    "parallel 16x128x128 w8 s4 swap",
)
_THIRTY = ("parallel 32x64x128 w4 s4 swap", "parallel 32x64x64 w4 s6 swap", "parallel 32x128x128 w8 s4 swap")
_SIXTY = (
    "parallel 64x64x128 w4 s3 swap",
    "parallel 64x64x64 w4 s4 swap",
    "parallel 64x128x128 w8 s3 swap",
    "parallel 64x64x64 w4 s4",
)
_MORE = (
    "parallel 128x128x64 w8 s3 swap",
    "parallel 128x64x64 w4 s4 swap",
    "in-turn 64x128x64 w8 s4 swap",
    "in-turn 128x128x64 w8 s3 swap",
    "in-turn 128x64x64 w4 s4 swap",
)
_MANY = (
    "in-turn 128x128x64 w8 s3 swap",
    "in-turn 128x128x64 w8 s4 swap",
    "in-turn 128x128x64 w8 s3",
    "in-turn 256x64x64 w8 s3 swap",
    "in-turn 128x64x64 w4 s4 swap",
)
CANDIDATES = {1: _FEW, 4: _FEW, 16: _FEW, 32: _THIRTY, 33: _SIXTY, 64: _SIXTY, 256: _MORE, 1024: _MANY}


def random_weight(K: int, N: int, generator: torch.Generator) -> NVFP4Tensor:
    """Random codes and block scales: every value of the format occurs."""
    codes = torch.randint(0, 256, (N, K // 2), generator=generator, device="cuda", dtype=torch.uint8)
    scales = (torch.rand(N, K // 16, generator=generator, device="cuda") * 3 + 0.5).to(torch.float8_e4m3fn)
    return NVFP4Tensor(codes, scales, torch.tensor(0.01, device="cuda"))


def compile_ahead(workers: int) -> None:
    """Compile every candidate in processes of their own, which share the compiler's cache."""
    command = [sys.executable, "-m", "batch_variance.kernels.nvfp4.bench"]
    for one in [subprocess.Popen([*command, str(i), str(workers)], stderr=subprocess.DEVNULL) for i in range(workers)]:
        one.wait()


def _compile_share(index: int, workers: int) -> None:
    names = sorted({name for names in CANDIDATES.values() for name in names})
    jobs = [(name, count) for name in names for count in ((1, 2) if name.startswith("parallel") else COUNTS)]
    weight, x = random_weight(2048, 512, torch.Generator("cuda")), torch.randn(16, 2048, device="cuda")
    for name, count in jobs[index::workers]:
        try:
            matmul(x, weight, Config.parse(name), count)
        except Exception as error:  # noqa: BLE001 - one that does not fit the device is left out by the tuner
            print(f"compile {name} {count}: {str(error).splitlines()[0]}", flush=True)
    torch.cuda.synchronize()


def run(folder: Path, budget_seconds: float, workers: int = 12) -> None:
    """Tune and time every shape of SHAPES within the budget; writes nvfp4.csv, nvfp4_tuning.csv and gemm_classes.csv
    in the folder and tuned/nvfp4.csv beside it, after every shape. Raises BadInput where nothing fits the device."""
    start, where = time.time(), gpu_columns()
    compile_ahead(workers)
    print(f"compiled ahead in {time.time() - start:.0f} s", flush=True)
    bench, few, many = Benchmark("nvfp4"), [], []
    for index, (K, N) in enumerate(SHAPES):
        deadline = time.time() + 0.8 * (budget_seconds - (time.time() - start)) / (len(SHAPES) - index)
        x, weights, more = _inputs(K, N, index)
        exact = matmul_float64(x[:CHECKED], weights[0], INVARIANT)
        bound = K * 2.0**-22 * (x[:CHECKED].abs().double() @ weights[0].dequantize().abs().double().t())

        def calls(call, m):
            return [lambda w=w: call(x[:m], w) for w in (weights if m <= 64 else weights[:4])]

        def timed(call, m):
            return graph_microseconds(calls(call, m))

        before = {m: timed(_default, m) for m in ROWS}
        rows = []
        for count in COUNTS:
            mine = [
                dict(
                    k=K, n=N, segments=count, m=m, config=name, bit_class="", wrong=-1, time_us=float("nan"), failure=""
                )
                for m in ROWS
                for name in CANDIDATES[m]
            ]
            for row in mine:
                _attempt(row, deadline, lambda call, m: _look(call(x[:m], weights[0]), exact, bound))
            reference = widest_class(row for row in mine if row["wrong"] == 0)
            for row in mine:
                if row["wrong"] == 0 and row["bit_class"] == reference:
                    _attempt(row, deadline, lambda call, m: dict(time_us=round(timed(call, m), 3)))
            rows += mine
        tuning = pd.DataFrame(rows)
        replace_rows(
            folder / "nvfp4_tuning.csv",
            [{**row, **where} for row in rows],
            ("k", "n", "segments", "m", "config", "gpu"),
        )
        print(
            f"K {K} N {N}: {len(tuning)} runs, wrong {int((tuning.wrong > 0).sum())}, "
            f"failed {int((tuning.failure != '').sum())}, classes",
            tuning[tuning.failure == ""].groupby("segments").bit_class.nunique().to_dict(),
            tuning[tuning.failure != ""].failure.unique()[:3].tolist(),
            flush=True,
        )
        count, chosen = _choose(tuning, before)
        _write_table(folder.parent / "tuned" / "nvfp4.csv", N, K, count, chosen)
        for m in ROWS:
            config = Config.parse(chosen[m])
            base, mine = alternating_microseconds(
                calls(_default, m), calls(lambda a, w: matmul(a, w, config, count), m)
            )
            shape = f"N{N} K{K}"
            moved = 0.5625 * N * K + 4 * m * (K + N)
            for name, value in (("default", base), ("invariant", mine)):
                bench.add("nvfp4", name, shape, m, "time", "us", value, base)
                bench.add("nvfp4", name, shape, m, "bandwidth", "TB/s", moved / value / 1e6, moved / base / 1e6)
            (few if m <= 32 else many).append(mine / base)
            print(
                f"K {K} N {N} M {m} default {base:.1f} ours {mine:.1f} {mine / base:.3f} "
                f"{moved / mine / 1e6:.2f} TB/s segments {count} {config}",
                flush=True,
            )

        _record_classes(folder, bench, torch.cat([x, more]), weights[0], (N, K), count, chosen, where)
        bench.save(folder)
    for label, values in (("up to 32 rows", few), ("above", many)):
        print(f"{label}: geometric mean {np.exp(np.mean(np.log(values))):.3f} worst {max(values):.3f}", flush=True)
    print(f"{time.time() - start:.0f} s", flush=True)


def _default(x: torch.Tensor, weight: NVFP4Tensor) -> torch.Tensor:
    return default_kernels.matmul(x, weight, policy("default").choose(len(x)))


def _inputs(K: int, N: int, seed: int) -> tuple[torch.Tensor, list[NVFP4Tensor], torch.Tensor]:
    """Rows to time, as many weights as a cache does not hold, and more rows to classify."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(max(ROWS), K, generator=generator, device="cuda")
    weights = [random_weight(K, N, generator) for _ in range(copies(0.5625 * N * K))]
    return x, weights, torch.randn(max(FAR_SIZES) - max(ROWS), K, generator=generator, device="cuda")


def record_classes(folder: Path) -> None:
    """Name the bits of every shape of SHAPES again over row counts, with the table as it is; writes gemm_classes.csv
    and the classes in nvfp4.csv. Raises BadInput for a shape that the table does not hold."""
    missing = [f"N{N} K{K}" for K, N in SHAPES if (N, K) not in tuned("nvfp4")]
    if missing:
        raise BadInput(f"tuned/nvfp4.csv does not hold {', '.join(missing)}: tune first.")
    bench, start, where = Benchmark("nvfp4"), time.time(), gpu_columns()
    for index, (K, N) in enumerate(SHAPES):
        x, weights, more = _inputs(K, N, index)
        count, chosen = tuned("nvfp4")[N, K]
        table = {m: str(config) for m, config in chosen}
        _record_classes(folder, bench, torch.cat([x, more]), weights[0], (N, K), count, table, where)
        bench.save(folder)
        print(f"K {K} N {N}: {time.time() - start:.0f} s", flush=True)


def _record_classes(
    folder: Path, bench: Benchmark, x, weight, shape, count: int, chosen: dict[int, str], where
) -> None:
    """Bits over row counts: the default's, and the dispatch's between the chosen configurations."""
    (N, K), table = shape, sorted((m, Config.parse(name)) for m, name in chosen.items())

    def dispatched(rows):
        return matmul(rows, weight, by_rows(table, DEFAULTS, len(rows)), count)

    frame = classify({"default": lambda rows: _default(rows, weight), "invariant": dispatched}, x, FAR_SIZES)
    found = frame.assign(kernel="nvfp4", shape=f"N{N} K{K}").to_dict("records")
    replace_rows(
        folder / "gemm_classes.csv",
        [{**row, **where} for row in found],
        ("kernel", "shape", "candidate", "m", "gpu"),
    )
    counts = frame.groupby("candidate").bit_class.nunique()
    for name in counts.index:
        bench.add("nvfp4", name, f"N{N} K{K}", 0, "bit classes", "count", int(counts[name]), int(counts["default"]))
    print("bit classes:", counts.to_dict(), "rows moved:", int(frame.rows_moved.sum()), flush=True)


def _attempt(row: dict, deadline: float, work) -> None:
    if time.time() > deadline:
        row["failure"] = "no time left"
        return
    try:
        config = Config.parse(row["config"])
        row |= work(lambda x, w: matmul(x, w, config, row["segments"]), row["m"])
    except Exception as error:  # noqa: BLE001 - a candidate that does not fit the device is a result
        row["failure"] = (str(error) or repr(error)).splitlines()[0][:120]


def _look(y: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> dict:
    some = min(len(y), CHECKED)
    wrong = int((~((y[:some].double() - exact[:some]).abs() <= bound[:some])).sum())
    return dict(bit_class=bit_name(y[0]), wrong=wrong)


def _choose(tuning: pd.DataFrame, default: dict[int, float]) -> tuple[int, dict[int, str]]:
    best = {}
    for count, mine in tuning.dropna(subset="time_us").groupby("segments"):
        fastest = mine.loc[mine.groupby("m").time_us.idxmin()].set_index("m")
        if set(fastest.index) == set(ROWS):
            cost = float(np.mean([np.log(fastest.time_us[m] / default[m]) for m in ROWS]))
            best[int(count)] = (cost, fastest.config.to_dict())
    if not best:
        raise BadInput("no number of segments has a candidate at every row count: nothing can be chosen.")
    count = min(best, key=lambda c: best[c][0])
    return count, best[count][1]


def _write_table(path: Path, N: int, K: int, count: int, chosen: dict[int, str]) -> None:
    table = pd.DataFrame([dict(n=N, k=K, segments=count, m=m, config=config) for m, config in chosen.items()])
    if path.exists():
        old = pd.read_csv(path)
        table = pd.concat([old[(old.n != N) | (old.k != K)], table])
    write_atomically(path, lambda temporary: table.to_csv(temporary, index=False))


if __name__ == "__main__":
    _compile_share(int(sys.argv[1]), int(sys.argv[2]))
