"""Tables under ``data/recorded/``: written with what ran beside every row, read back, and told from one another."""

from functools import partial
from pathlib import Path

import pandas as pd

from ..common import data_path, write_atomically
from ..common.provenance import GPU_COLUMNS, gpu_columns


def save_tables(prefix: str, tables: dict[str, pd.DataFrame], folder: str | Path, stamp: dict) -> list[Path]:
    """Write each table as ``<folder>/<prefix>_<name>.csv`` with ``stamp`` and the provenance beside every row; ""
    writes none."""
    if not folder:
        return []
    columns = stamp | gpu_columns()
    return [
        write_atomically(Path(folder) / f"{prefix}_{name}.csv", partial(frame.assign(**columns).to_csv, index=False))
        for name, frame in tables.items()
    ]


def recorded_table(prefix: str, name: str) -> pd.DataFrame:
    """A committed table, empty where there is none."""
    path = data_path("recorded", f"{prefix}_{name}.csv")
    return pd.read_csv(path) if path.is_file() else pd.DataFrame()


def without_columns(frame: pd.DataFrame, *stamp: str) -> pd.DataFrame:
    """A recorded table without the columns that say what ran."""
    return frame.drop(columns=[name for name in (*stamp, *GPU_COLUMNS) if name in frame])


def recorded_source(frame: pd.DataFrame) -> str:
    """One sentence on where a recorded table comes from. It must have a column ``label`` among its stamp."""
    row = frame.iloc[0]
    return (
        f"Recorded on {row.gpu} (driver {row.driver}, torch {row.torch}, triton {row.triton}) on {row.date}, "
        f"commit {row.commit}; {row.label}."
    )
