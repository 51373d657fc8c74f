"""Recorded audits: the JSON files that ``batch-variance audit --json`` writes, as tables under ``data/recorded``.

``python -m batch_variance.hooks.record FILE...`` adds each file's run; a run of the same model, dtype, device and
batch replaces its own rows. Four tables: ``audit.csv`` (a row a kind of operation), ``audit_axes.csv``,
``audit_sizes.csv`` (bit class by batch size) and ``audit_tokens.csv``.
"""

import json
import sys
from pathlib import Path

import pandas as pd

from ..common import BadInput, data_path, write_atomically

RUN = ["model", "dtype", "device", "batch"]
TABLES = {"audit": "operations", "audit_axes": "axes", "audit_sizes": "batch_sizes", "audit_tokens": "tokens"}


def tables(report: dict) -> dict[str, pd.DataFrame]:
    """A report's tables by file name, with the run and its provenance in columns.

    Raises BadInput when the report is no audit's.
    """
    try:
        found, packages = report["provenance"], report["provenance"]["packages"]
        run = {name: report[name] for name in RUN}
        shared = {
            "rows_watched": report["rows_watched"],
            "negative_control": report["controls"]["negative_control"],
            "positive_control": report["controls"]["positive_control"],
            "gpu": found["gpu"],
            "driver": found["driver"],
            "processor": found["processor"],
            "threads": found["threads"],
            "torch": packages["torch"],
            "transformers": packages["transformers"],
            "triton": packages["triton"],
            "commit": found["commit"],
            "date": found["date"][:10],
        }
        return {name: pd.DataFrame(report[key]).assign(**run, **shared) for name, key in TABLES.items()}
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"this is no audit's JSON (it lacks {error}): give files written by `batch-variance audit --json`."
        ) from None


def add(report: dict, folder: Path | None = None) -> None:
    """Add a report's tables to those in ``folder`` (default: data/recorded), in place of its own earlier rows."""
    for name, table in tables(report).items():
        path = (folder or data_path("recorded")) / f"{name}.csv"
        if path.exists():
            old = pd.read_csv(path)
            same = (old[RUN].astype(str) == [str(report[key]) for key in RUN]).all(axis=1)
            table = pd.concat([old[~same], table], ignore_index=True)
        write_atomically(path, lambda temporary, table=table: table.to_csv(temporary, index=False))


def recorded(name: str) -> pd.DataFrame:
    """One of the tables, or an empty frame where none is recorded. ``tier`` is recorded-gpu for a GPU's rows, else
    cpu-native.
    """
    path = data_path("recorded", f"{name}.csv")
    if not path.exists():
        return pd.DataFrame(columns=[*RUN, "tier"])
    table = pd.read_csv(path)
    return table.assign(tier=table["device"].map({"cuda": "recorded-gpu"}).fillna("cpu-native"))


def main() -> None:
    for file in sys.argv[1:]:
        add(json.loads(Path(file).read_text()))


if __name__ == "__main__":
    main()
