"""``batch-variance bench gemm|nvfp4|decode|prefill|engine|profile``: time the invariant kernels against the default
ones, or read their hardware counters, and record it."""

import importlib
from pathlib import Path

import click

from ..common import BadInput, data_path, resolve_device

# Looked up by name: the engine's benchmark lies in a room above the kernels.
BENCHMARKS = {
    "gemm": "batch_variance.kernels.gemm.bench",
    "nvfp4": "batch_variance.kernels.nvfp4.bench",
    "decode": "batch_variance.kernels.decode.bench",
    "prefill": "batch_variance.kernels.prefill.bench",
    "engine": "batch_variance.studies.engine_bench",
    "profile": "batch_variance.kernels.profile.bench",
}


@click.command()
@click.argument("benchmark", metavar="gemm|nvfp4|decode|prefill|engine|profile")
@click.option("--budget-seconds", default=200.0, show_default=True, help="Stop in time to finish within this.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the tables. [default: data/recorded]"
)
@click.option("--rows", type=int, multiple=True, help="For gemm: tune these row counts again, in the class as it is.")
def bench(benchmark, budget_seconds, out, rows):
    """Time invariant kernels against the default ones on this GPU.

    Writes BENCHMARK.csv into the folder; rows of the same GPU measured before are replaced. Tuned configurations go to
    the folder ``tuned`` beside it. ``profile`` reads hardware counters and needs NVIDIA Nsight Compute (ncu).
    """
    if benchmark not in BENCHMARKS:
        raise BadInput(f"benchmark {benchmark!r} is unknown: give one of {', '.join(BENCHMARKS)}.")
    if not budget_seconds > 0:
        raise BadInput(f"--budget-seconds {budget_seconds:g} leaves no time: give a number above 0.")
    if rows and benchmark != "gemm":
        raise BadInput(f"--rows {rows[0]} with {benchmark}: only gemm tunes row counts one by one.")
    resolve_device("cuda")
    some = {"rows": rows} if rows else {}
    importlib.import_module(BENCHMARKS[benchmark]).run(out or data_path("recorded"), budget_seconds, **some)
