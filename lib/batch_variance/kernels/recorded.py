"""The recorded benchmark tables: long CSV files under ``data/recorded`` whose rows a re-run replaces."""

from pathlib import Path

import pandas as pd

from ..common import write_atomically
from ..common.provenance import GPU_COLUMNS, gpu_columns

COLUMNS = ("benchmark", "kernel", "policy", "shape", "m", "metric", "unit", "value", "baseline", "ratio", *GPU_COLUMNS)
KEY = ("benchmark", "kernel", "policy", "shape", "m", "metric", "gpu")


class Benchmark:
    """Rows of one benchmark run. name: gemm, nvfp4, decode, prefill or engine."""

    def __init__(self, name: str):
        self.name, self.where, self.rows = name, gpu_columns(), []

    def add(
        self, kernel: str, policy: str, shape: str, m: int, metric: str, unit: str, value: float, baseline: float
    ) -> None:
        """One figure. policy: ``default``, or begins with ``invariant``; baseline: the default's value in this run."""
        ratio = round(value / baseline, 4) if baseline else float("nan")
        figures = dict(value=round(value, 4), baseline=round(baseline, 4), ratio=ratio)
        self.rows.append(
            dict(
                benchmark=self.name,
                kernel=kernel,
                policy=policy,
                shape=shape,
                m=m,
                metric=metric,
                unit=unit,
                **figures,
                **self.where,
            )
        )

    def save(self, folder: Path) -> Path:
        """Write ``<name>.csv`` in the folder: rows of an earlier run stay where this run has none of the same key."""
        return replace_rows(folder / f"{self.name}.csv", self.rows, KEY)


def replace_rows(path: Path, rows: list[dict], key) -> Path:
    """Add rows to a CSV file; of rows with the same key the newest stays. The file is whole or as before."""
    table = pd.DataFrame(rows)
    if path.exists():
        table = pd.concat([pd.read_csv(path), table])
    table = table.drop_duplicates(list(key), keep="last")
    return write_atomically(path, lambda temporary: table.to_csv(temporary, index=False))
