"""The log: whole at every moment, also for a reader beside a writer and after a kill; and the verdicts read back from
it.
"""

import os
import signal
import subprocess
import sys
import time
import types

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.hooks import AXES, CallSiteProbe, ProbeLog, read_log, verdicts
from batch_variance.hooks import log as logs
from batch_variance.hooks.checks import LengthsMatch, summarise
from batch_variance.hooks.zoo import alone_differs, instance

WRITER = """
import sys, time
from batch_variance.hooks import ProbeLog
log = ProbeLog(sys.argv[1])
call = 0
while True:
    time.sleep(0.001)
    log.append([{"kind": "axis", "axis": "solo", "call": call, "rows_checked": 1, "note": "x" * 50}])
    call += 1
"""


@pytest.mark.parametrize("controls", ["now", "later"])
def test_a_log_gives_the_same_verdicts_as_the_probe(tmp_path, controls):
    engine = types.SimpleNamespace(kernel=lambda x, lengths: alone_differs(x, lengths))
    generator = torch.Generator().manual_seed(1)
    path = tmp_path / "session.parquet"
    check = LengthsMatch("lengths", "x")  # wrong on purpose: x holds no indices
    with CallSiteProbe(
        (engine, "kernel"), {"x": 0, "lengths": 0}, axes=AXES, log=path, checks=[check], controls=controls
    ) as probe:
        for _ in range(5):
            engine.kernel(*instance(generator))
    log = read_log(path)
    axis_rows = log[log["kind"] == "axis"].reset_index(drop=True)
    assert len(axis_rows) == 5 * len(AXES)
    pd.testing.assert_frame_equal(verdicts(axis_rows), probe.explain())
    pd.testing.assert_frame_equal(summarise(log[log["kind"] == "check"]), probe.well_formed(), check_dtype=False)
    assert probe.verdict()["solo"] == "variant" and probe.well_formed()["verdict"][0] == "fails"
    counts = axis_rows.loc[axis_rows["axis"] == "solo", ["elements_differ", "ulp_histogram"]]
    assert (
        all(sum(row.ulp_histogram) == row.elements_differ for row in counts.itertuples())
        and counts["elements_differ"].sum() > 0
    )


def test_readable_while_it_grows_and_after_a_kill(tmp_path):
    path = tmp_path / "session.parquet"
    seen = 0
    for attempt in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            deadline = time.time() + 60
            reads, start = 0, seen
            while (reads < 40 or seen < start + 100) and time.time() < deadline:
                if not path.exists():
                    time.sleep(0.02)
                    continue
                table = pq.read_table(path, columns=["call", "session"]).to_pandas()
                assert len(table) >= seen  # nothing is lost between two reads
                for _, session in table.groupby("session", sort=False):
                    assert session["call"].tolist() == list(range(len(session)))  # a prefix, in order
                seen, reads = len(table), reads + 1
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
        assert reads >= 40 and seen >= start + 100, (reads, seen)
        after = read_log(path)
        assert len(after) >= seen and after["session"].nunique() == attempt + 1
        seen = len(after)
    ProbeLog(path).append([{"kind": "axis", "axis": "solo", "call": 0}])
    assert len(read_log(path)) >= seen


def test_flushes_take_a_two_hundredth_of_the_time_and_hold_nobody_up(tmp_path, monkeypatch):
    took, write = [], logs._write

    def slow(*args):
        started = time.perf_counter()
        time.sleep(0.01)
        result = write(*args)
        took.append((started, time.perf_counter()))
        return result

    log = ProbeLog(tmp_path / "session.parquet")
    monkeypatch.setattr(logs, "PAUSE", 20)
    monkeypatch.setattr(logs, "_write", slow)
    ended, longest, appended = time.perf_counter() + 3, 0.0, 0
    while time.perf_counter() < ended:
        started = time.perf_counter()
        log.append([{"kind": "axis", "axis": "solo"}])
        longest, appended = max(longest, time.perf_counter() - started), appended + 1
        time.sleep(0.001)
    flushes = list(took)  # those that the timer made
    assert len(flushes) >= 3 and longest < 20 * 0.01
    for (began, done), (next_began, _) in zip(flushes, flushes[1:]):
        assert next_began - done >= 20 * (done - began) * 0.95
    log.flush()
    assert len(read_log(log.path)) == appended


def test_rows_come_to_the_file_though_no_other_follows(tmp_path):
    log = ProbeLog(tmp_path / "session.parquet")
    log.append([{"kind": "axis", "axis": "solo", "call": 7}])
    deadline = time.time() + 60
    while not pq.read_metadata(log.path).num_rows and time.time() < deadline:
        time.sleep(0.02)
    assert read_log(log.path)["call"].tolist() == [7]


def test_what_could_not_be_written_is_said_and_kept(tmp_path):
    log = ProbeLog(tmp_path / "session.parquet")
    log.path.write_text("mine")
    log.append([{"kind": "axis", "call": 0}])
    with pytest.warns(UserWarning, match="is no parquet file.* records are held in memory"):
        log._flush_when_due()
    with pytest.raises(BadInput, match="is no parquet file"):
        log.flush()
    assert log.path.read_text() == "mine"
    log.path.unlink()
    log.append([{"kind": "axis", "call": 1}])
    log.flush()
    assert read_log(log.path)["call"].tolist() == [0, 1]


def test_a_fork_writes_a_session_of_its_own(tmp_path):
    log = ProbeLog(tmp_path / "session.parquet")
    log.append([{"kind": "axis", "call": 0}])
    child = os.fork()
    if not child:
        log.append([{"kind": "axis", "call": 1}])
        log.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.flush()
    found = read_log(log.path)
    assert sorted(found["call"]) == [0, 1] and found["session"].nunique() == 2


def test_what_was_written_keeps_its_bytes_and_places(tmp_path):
    """So that a reader may take the index from one version of the file and the rows from a later one."""
    path = tmp_path / "session.parquet"
    log = ProbeLog(path)
    for call in range(30):
        if call == 15:
            log = ProbeLog(path)  # continued by another process
        before = path.read_bytes()
        rows_end = (
            len(before) - 8 - int.from_bytes(before[-8:-4], "little")
        )  # the index's size stands before the last magic
        log.append([{"kind": "axis", "axis": "solo", "call": call, "note": f"note {call}", "ulp_histogram": [call, 1]}])
        log.flush()
        assert path.read_bytes()[:rows_end] == before[:rows_end]
    assert read_log(path)["call"].tolist() == list(range(30))


SHARER = """
import sys, threading
from batch_variance.hooks import ProbeLog
def write(log, name):
    for call in range(100):
        log.append([{"kind": "axis", "axis": "solo", "site": name, "call": call}])
        if call % 10 == 9:
            log.flush()
shared = ProbeLog(sys.argv[1])  # by two threads, beside a log of a third
logs = [shared, shared, ProbeLog(sys.argv[1])]
threads = [threading.Thread(target=write, args=(log, sys.argv[2] + str(i))) for i, log in enumerate(logs)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
"""


def test_many_write_one_log_and_none_loses_a_row(tmp_path):
    path = tmp_path / "session.parquet"
    writers = [subprocess.Popen([sys.executable, "-c", SHARER, str(path), name]) for name in "abc"]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            rows = pq.read_metadata(path).num_rows
            assert rows >= seen
            seen = rows
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = read_log(path)
    written = {f"{name}{i}": [*range(100)] for name in "abc" for i in range(3)}
    assert found.groupby("site")["call"].apply(list).to_dict() == written
    assert found["session"].nunique() == 6
    assert os.listdir(tmp_path) == [path.name]


def test_probes_at_several_sites_share_a_log_by_its_path(tmp_path):
    engine = types.SimpleNamespace(double=lambda x: x * 2, triple=lambda x: x * 3)
    path = tmp_path / "session.parquet"
    with (
        CallSiteProbe((engine, "double"), {"x": 0}, axes=("rerun",), log=path) as one,
        CallSiteProbe((engine, "triple"), {"x": 0}, axes=("rerun",), log=path) as other,
    ):
        for _ in range(3):
            engine.double(torch.randn(2, 4)), engine.triple(torch.randn(2, 4))
    assert read_log(path).groupby("site")["call"].apply(list).to_dict() == {one.site: [0, 1, 2], other.site: [0, 1, 2]}


def test_a_log_that_was_taken_away_is_written_again_whole(tmp_path):
    log = ProbeLog(tmp_path / "session.parquet")
    for call in range(3):
        log.append([{"kind": "axis", "axis": "solo", "call": call}])
        log.flush()
        log.path.unlink()
    log.append([{"kind": "axis", "axis": "solo", "call": 3}])
    log.flush()
    assert read_log(log.path)["call"].tolist() == [0, 1, 2, 3]


def test_bad_logs_are_one_sentence(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        read_log(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(BadInput, match="is no parquet file"):
        read_log(tmp_path / "text.parquet")
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(BadInput, match="not a probe's log"):
        ProbeLog(tmp_path / "other.parquet")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        ProbeLog(tmp_path / "file" / "session.parquet")
    log = ProbeLog(tmp_path / "good.parquet")
    with pytest.raises(BadInput, match="no column colour"):
        log.append([{"colour": "red"}])
