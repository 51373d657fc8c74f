"""Figures kept as data: every committed one is redrawn to the same bytes, and frames come back without losing a bit."""

import json
import math

import matplotlib
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from pandas.testing import assert_frame_equal

from batch_variance.common import BadInput
from batch_variance.common.data import repository
from batch_variance.reporting.drawings import drawn, frames_of, redraw, source_of
from batch_variance.reporting.figures import bundle
from batch_variance.reporting.rebuild import main, rebuild, take_over

FIGURES = repository() / "figures"
RECORDS = sorted((FIGURES / "recorded").glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_committed_figure_is_redrawn_to_the_same_bytes(record, tmp_path):
    """The committed files were drawn by another process, so this holds across processes too."""
    pinned = matplotlib.__version__ == "3.11.2"
    for path in rebuild(record, tmp_path):
        committed = (FIGURES / path.name).read_bytes()
        assert committed[:4] in (b"\x89PNG", b"<?xm")
        assert path.read_bytes() == committed or not pinned, f"{path.name}: run make figures and look at it"


def test_a_changed_number_changes_the_bytes(tmp_path):
    """The control of the test above: the comparison can fail."""
    record = FIGURES / "recorded" / "02_split-scheduler-batch.json"
    text = record.read_text()
    kept = json.loads(text)
    kept["arguments"]["frame"]["values"][2][0] += 1
    (tmp_path / record.name).write_text(json.dumps(kept))
    png, svg = rebuild(tmp_path / record.name, tmp_path)
    assert (
        png.read_bytes() != (FIGURES / png.name).read_bytes() and svg.read_bytes() != (FIGURES / svg.name).read_bytes()
    )


def test_every_committed_picture_has_its_record():
    names = {path.stem for path in RECORDS}
    assert names == {path.stem for path in FIGURES.glob("*.png")} == {path.stem for path in FIGURES.glob("*.svg")}


def test_records_name_their_evidence():
    for record in RECORDS:
        kept = json.loads(record.read_text())
        assert kept["tier"] and kept["n"] and kept["alt"].strip() and kept["commit"] and kept["date"]


FRAME = pd.DataFrame(
    {
        "exact": [0.1 + 0.2, math.pi * 1e-300, np.nextafter(1.0, 2.0)],
        "edge": [math.inf, -math.inf, math.nan],
        "count": [2**53 + 1, 0, -1],
        "flag": [True, False, True],
        "word": ['a, "b"\n', "é", ""],
    }
)


@pytest.mark.parametrize(
    "frame",
    [FRAME, FRAME.set_index("word"), FRAME.iloc[:0], FRAME[["flag"]].iloc[1:], FRAME.assign(word=[None, "x", 3])],
    ids=["range", "named index", "empty", "cut", "mixed"],
)
def test_a_frame_comes_back_as_it_was(frame):
    drawing = redraw_of(frame)
    assert_frame_equal(drawing, frame, check_exact=True)
    assert list(drawing.dtypes) == list(frame.dtypes)


def redraw_of(frame):
    """The frame after its way through a record's JSON text."""
    kept = {}

    @drawn
    def plot(frame, label="x"):
        kept["frame"] = frame
        return matplotlib.figure.Figure()

    text = json.dumps(source_of(plot(frame)), allow_nan=False)
    from batch_variance.reporting import drawings

    return drawings._unpack(json.loads(text)["arguments"]["frame"])


def test_a_shown_figure_carries_the_call_that_drew_it():
    from batch_variance.reporting.plots import split_scheduler as plots

    frame = pd.DataFrame({"schedule": ["flashmla"] * 2, "batch": [1, 2], "splits": [4, 2]})
    data, _ = bundle(plots.split_counts(frame, "batch", "rows"), "counts", "Two counts.", "emulated", 2)
    source = next(value for name, value in data.items() if name.endswith("figure+json"))
    assert source["draw"] == "split_scheduler.split_counts"
    assert_frame_equal(frames_of(source)["frame"], frame)
    again, _ = bundle(redraw(source), "counts", "Two counts.", "emulated", 2)
    assert again["image/png"] == data["image/png"]


def test_what_cannot_be_kept_is_named():
    @drawn
    def plot(frame):
        return matplotlib.figure.Figure()

    with pytest.raises(TypeError, match="argument frame holds a set"):
        plot({1, 2})


@pytest.mark.parametrize(
    "text, words",
    [("{", "no record"), ("{}", "no record"), ('{"draw": "no.where", "tier": "emulated", "n": 1}', "'no.where'")],
)
def test_a_bad_record_is_one_sentence(tmp_path, text, words):
    (tmp_path / "01_a.json").write_text(text)
    with pytest.raises(BadInput, match=words):
        rebuild(tmp_path / "01_a.json", tmp_path)


def test_taking_over_a_report_drops_what_it_no_longer_draws(tmp_path):
    """But not of a notebook that did not finish: what it had not drawn yet is no reason to drop it."""
    report, records = tmp_path / "report", tmp_path / "figures" / "recorded"
    (report / "figures").mkdir(parents=True)
    records.mkdir(parents=True)
    notebooks = [{"name": "02_a", "status": "ok"}, {"name": "03_b", "status": "timeout"}]
    (report / "summary.json").write_text(json.dumps({"notebooks": notebooks, "checks": [], "provenance": {}}))
    with pytest.raises(BadInput, match="no figure records"):
        take_over(report, records)
    for name in ("02_new", "03_first"):
        (report / "figures" / f"{name}.json").write_text("{}")
    for name in ("01_other", "02_old", "03_second"):
        (records / f"{name}.json").write_text("{}")
        (records.parent / f"{name}.png").write_bytes(b"")
    assert take_over(report, records) == ["02_new"]
    assert sorted(path.stem for path in records.iterdir()) == ["01_other", "02_new", "03_second"]
    assert sorted(path.name for path in records.parent.glob("*.png")) == ["01_other.png", "03_second.png"]


def test_the_command_says_what_it_cannot_use(tmp_path):
    found = CliRunner().invoke(main, ["--record", str(tmp_path)])
    assert isinstance(found.exception, BadInput) and "there is no report" in str(found.exception)
