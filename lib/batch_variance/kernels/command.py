"""``batch-variance bench gemm|nvfp4|decode|prefill|engine|profile``: time the invariant kernels against the default
ones, or read their hardware counters, and record it."""

import importlib
import re
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
@click.option("--weight", "weights", multiple=True, metavar="NxK", help="For gemm: tune this weight instead.")
@click.option("--classes-only", is_flag=True, help="For gemm and nvfp4: only name bits over row counts again.")
def bench(benchmark, budget_seconds, out, rows, weights, classes_only):
    """Time invariant kernels against the default ones on this GPU.

    Writes BENCHMARK.csv into the folder; rows of the same GPU measured before are replaced. Tuned configurations go to
    the folder ``tuned`` beside it. ``profile`` reads hardware counters and needs NVIDIA Nsight Compute (ncu).
    --rows and --weight may be given again and again: a weight of your own model is tuned by, for example,
    ``--weight 4096x2048 --rows 1 --rows 16 --rows 64 --rows 256``.
    """
    if benchmark not in BENCHMARKS:
        raise BadInput(f"benchmark {benchmark!r} is unknown: give one of {', '.join(BENCHMARKS)}.")
    if not budget_seconds > 0:
        raise BadInput(f"--budget-seconds {budget_seconds:g} leaves no time: give a number above 0.")
    for name, given in (("--rows", rows), ("--weight", weights)):
        if given and benchmark != "gemm":
            raise BadInput(f"{name} {given[0]} with {benchmark}: only gemm tunes one by one.")
    if classes_only and (benchmark not in ("gemm", "nvfp4") or rows):
        raise BadInput(
            f"--classes-only with {benchmark}{' and --rows' if rows else ''}: gemm and nvfp4 have classes, "
            "over all row counts."
        )
    some = {"shapes": tuple(map(_shape, weights))} if weights else {}
    resolve_device("cuda")
    folder, module = out or data_path("recorded"), importlib.import_module(BENCHMARKS[benchmark])
    if classes_only:
        module.record_classes(folder, **some)
    else:
        module.run(folder, budget_seconds, **some, **({"rows": rows} if rows else {}))


def _shape(text: str) -> tuple[int, int]:
    """(K, N), as the benchmark has it, of "NxK"."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise BadInput(f"--weight {text!r} is no weight: give its rows and columns, as 4096x2048.")
    return int(found[2]), int(found[1])
