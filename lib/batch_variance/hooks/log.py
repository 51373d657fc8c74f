"""The probe's log: one parquet file a session that any reader may open at any moment.

A parquet file ends in its index, so it cannot grow in place and stay readable. Here each flush writes the session to
a temporary file beside it and renames that over the old one: a reader sees the last flush, whole, and so does whoever
comes after a crash. Append-only holds for the bytes too: a flush adds one row group, and those before it are written
again to the same bytes at the same places, so that a reader that took the index from the old file and the rows from
the new one still reads right (pandas and pyarrow open a path twice). A flush so takes half a millisecond for each
one before it. It is made in a thread of its own, and only when the last one is past by 200 times what that took: a
crash loses at most as much, which is a second at first and half a minute after an hour.

Several probes, threads and processes may write one log. Each flush holds the file's lock and first takes in what others
have written since; readers need no lock.
"""

import contextlib
import fcntl
import os
import threading
import time
import uuid
import warnings
from pathlib import Path
from typing import Iterable, Iterator, Mapping

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

_NAMES = set(SCHEMA.names)
PAUSE = 200  # times what a flush took is until the next
_ENCODING = {"compression": "snappy", "use_dictionary": False, "write_statistics": False}  # the quickest


class ProbeLog:
    """Appends records to ``path``. An existing log is continued as another session in the same file.

    Raises BadInput when the path is no log or cannot be written.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._groups: list[pa.Table] = []
        self._written: tuple[int, ...] = ()  # which file it was that the groups were last read from or written to
        self._begin()
        self._flush([])

    def _begin(self) -> None:
        self._process, self.session = os.getpid(), uuid.uuid4().hex[:12]
        self._pending: list[dict] = []
        self._timer: threading.Timer | None = None
        self._due = 0.0
        self._adding, self._flushing = threading.Lock(), threading.Lock()

    def append(self, records: Iterable[Mapping]) -> None:
        """Add records: dicts with the schema's names; others raise BadInput. They are in the file a while later."""
        if self._process != os.getpid():  # a fork has neither the timer's thread nor a claim to what was pending
            self._begin()
        records, now = list(records), time.time()
        unknown = {name for record in records for name in record} - _NAMES
        if unknown:
            raise BadInput(f"the log has no column {', '.join(sorted(unknown))}: it has {', '.join(SCHEMA.names)}.")
        with self._adding:
            self._pending += [{"session": self.session, "time": now, **record} for record in records]
            if self._timer is None:
                self._start_timer()

    def _start_timer(self) -> None:
        self._timer = None
        if self._pending:
            self._timer = threading.Timer(max(self._due - time.perf_counter(), 0), self._flush_when_due)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Bring the file up to the last record. Raises BadInput where it cannot be written: then no record is lost."""
        with self._flushing:
            with self._adding:
                if self._timer is not None:  # and until the end of this flush no other is started
                    self._timer.cancel()
                pending, self._pending = self._pending, []
            try:
                if pending:
                    self._flush([pa.Table.from_pylist(pending, schema=SCHEMA)])
                    pending = []
            finally:
                with self._adding:
                    self._pending = pending + self._pending
                    self._start_timer()

    def _flush_when_due(self) -> None:
        try:
            self.flush()
        except BadInput as error:
            warnings.warn(f"{error} Until it can be, records are held in memory.")

    def _flush(self, new: list[pa.Table]) -> None:
        started = time.perf_counter()
        try:
            self._write(new)
        finally:
            now = time.perf_counter()
            self._due = now + PAUSE * (now - started)

    def _write(self, new: list[pa.Table]) -> None:
        """Bring the file up to new groups after those that it has. A file that was taken away is written anew."""
        with _lock(self.path) as file:
            if _which(os.fstat(file)) != self._written:
                self._groups = read_groups(self.path) or self._groups
            groups = [*self._groups, *new]
            self._groups, self._written = groups, _write(self.path, groups)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Hold the lock of the log at ``path``, which is begun where there is none; gives its descriptor."""
    while True:
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            _write(path, [], replace=False)
            continue
        except OSError as error:
            raise BadInput(f"{path} cannot be written ({error.strerror}): give a file that you may write to.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):  # nobody has put another in its place meanwhile
                yield file
                return
        finally:
            os.close(file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _write(path: Path, groups: list[pa.Table], replace: bool = True) -> tuple[int, ...]:
    """Write a log, and say which file it is: by the time that it has its name another may follow it."""
    which = ()

    def write(temporary: Path) -> None:
        nonlocal which
        with pq.ParquetWriter(temporary, SCHEMA, **_ENCODING) as writer:
            for group in groups:
                writer.write_table(group)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())  # the rename must not reach the disk before the contents
            which = _which(os.fstat(file.fileno()))

    write_atomically(path, write, replace)
    return which


def _which(file: os.stat_result) -> tuple[int, ...]:
    return file.st_ino, file.st_mtime_ns, file.st_size


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
