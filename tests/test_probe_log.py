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
from batch_variance.hooks.checks import LengthsMatch, summarise
from batch_variance.hooks.zoo import alone_differs, instance

WRITER = """
import sys
from batch_variance.hooks import ProbeLog
log = ProbeLog(sys.argv[1])
call = 0
while True:
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


def test_rows_pend_for_a_share_of_the_session_and_two_seconds_at_most(tmp_path):
    log = ProbeLog(tmp_path / "session.parquet")
    behind = 0
    for call in range(400):
        log.append([{"kind": "axis", "axis": "solo", "call": call}])
        behind = max(behind, call + 1 - pq.read_metadata(log.path).num_rows) if call % 50 == 0 else behind
    assert behind <= 400 / 20 + 1
    log.flush()
    assert pq.read_metadata(log.path).num_rows == 400


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
