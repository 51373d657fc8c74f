"""The probe's log: one parquet file a session that any reader may open at any moment.

A parquet file ends in its index, so it cannot grow in place and stay readable. Here each flush writes the session to
a temporary file beside it and renames that over the old one: a reader sees the last flush, whole, and so does whoever
comes after a crash. Append-only holds for the bytes too: a flush adds one row group, and those before it are written
again to the same bytes at the same places, so that a reader that took the index from the old file and the rows from
the new one still reads right (pandas and pyarrow open a path twice). To keep the work bounded, a flush waits until a
twentieth of the session is pending or two seconds have passed since the first pending row; a crash loses at most
that. A session of 10,000 sampled calls is a few megabytes.
"""

import os
import time
import uuid
from pathlib import Path
from typing import Iterable, Mapping

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..common import BadInput, write_atomically

SCHEMA = pa.schema(
    [
        ("session", pa.string()),
        ("time", pa.float64()),
        ("kind", pa.string()),
        ("site", pa.string()),
        ("call", pa.int64()),
        ("batch", pa.int64()),
        ("axis", pa.string()),
        ("replays", pa.int64()),
        ("rows_checked", pa.int64()),
        ("rows_differ", pa.int64()),
        ("rows_unmoved", pa.int64()),
        ("differ_unmoved", pa.int64()),
        ("rows_sensitive", pa.int64()),
        ("elements", pa.int64()),
        ("elements_differ", pa.int64()),
        ("max_ulp", pa.int64()),
        ("max_row_scaled_ulp", pa.float64()),
        ("ulp_histogram", pa.list_(pa.int64())),
        ("occurred", pa.int64()),
        ("flip_seen", pa.bool_()),
        ("witness", pa.bool_()),
        ("note", pa.string()),
        ("check", pa.string()),
        ("failed", pa.int64()),
        ("rows", pa.int64()),
        ("controlled", pa.bool_()),
        ("detail", pa.string()),
    ]
)

SHARE, SECONDS = 20, 2.0


class ProbeLog:
    """Appends records to ``path``. An existing log is continued as another session in the same file.

    Raises BadInput when the path is no log or cannot be written.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.session = uuid.uuid4().hex[:12]
        self._pending: list[dict] = []
        self._since = 0.0
        self._groups = read_groups(self.path) if self.path.exists() else []
        self._write(self._groups)

    def append(self, records: Iterable[Mapping]) -> None:
        """Add records (dicts with the schema's names; others are an error) and flush when enough is pending."""
        now = time.time()
        if not self._pending:
            self._since = now
        for record in records:
            unknown = set(record) - set(SCHEMA.names)
            if unknown:
                raise BadInput(f"the log has no column {', '.join(sorted(unknown))}: it has {', '.join(SCHEMA.names)}.")
            self._pending.append({"session": self.session, "time": now, **record})
        if len(self._pending) * SHARE >= sum(map(len, self._groups)) or now - self._since >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Bring the file up to the last record."""
        if not self._pending:
            return
        groups = [*self._groups, pa.Table.from_pylist(self._pending, schema=SCHEMA)]
        self._write(groups)
        self._groups, self._pending = groups, []

    def _write(self, groups: list[pa.Table]) -> None:
        def write(temporary: Path) -> None:
            with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
                for group in groups:
                    writer.write_table(group)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())  # the rename must not reach the disk before the contents

        write_atomically(self.path, write)


def read_groups(path: Path | str) -> list[pa.Table]:
    """The log's row groups, one a flush. Raises BadInput when there is no file, or the file is something else."""
    try:
        with open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            groups = [parquet.read_row_group(i) for i in range(parquet.num_row_groups)]
            names = parquet.schema_arrow.names
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist: give the path that the probe's log was written to.") from None
    except (pa.ArrowException, OSError) as error:
        raise BadInput(
            f"{path} is no parquet file ({str(error).splitlines()[0]}): give a log that a probe wrote."
        ) from None
    if names != SCHEMA.names:
        lacking = ", ".join(sorted(set(SCHEMA.names) - set(names))) or "nothing, but has others"
        raise BadInput(f"{path} is a parquet file, but not a probe's log: it lacks {lacking}.")
    return [group.cast(SCHEMA) for group in groups]


def read_log(path: Path | str) -> pd.DataFrame:
    """The log as a frame. ``kind`` is ``axis`` (rows for ``verdicts``) or ``check`` (rows for ``checks.summarise``)."""
    return pa.concat_tables([SCHEMA.empty_table(), *read_groups(path)]).to_pandas()
