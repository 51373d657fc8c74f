"""The verdict rule, what a check carries, and how figures and tables are displayed."""

import io
import itertools
import json

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from batch_variance.common import BadInput
from batch_variance.reporting import checks, collect, figures, judge, show, table

BASE = dict(id="02.solo-differs", claim="Rows differ.", holds=True, value=3, expected="> 0", n=64, tier="emulated")
GOOD = dict(negative_control=True, positive_control=True, occurred=True)


@pytest.mark.parametrize("states", itertools.product([True, False, None], repeat=3))
@pytest.mark.parametrize("holds", [True, False])
def test_no_verdict_without_all_three_controls(states, holds):
    made = judge(**BASE | {"holds": holds}, **dict(zip(checks.CONTROLS, states)))
    if all(state is True for state in states):
        assert made.verdict == ("pass" if holds else "fail")
        assert made.controls == "all three controls hold"
    else:
        assert made.verdict == "inconclusive"
        assert made.controls.count("missing") == states.count(None)
        assert made.controls.count("failed") == states.count(False)
        for name, state in zip(("negative control", "positive control", "occurred proof"), states):
            assert (name in made.controls) == (state is not True)


def test_the_fields_are_those_of_the_summary():
    assert list(judge(**BASE, **GOOD).model_dump()) == [
        "id", "notebook", "claim", "verdict", "evidence_tier", "value", "expected", "n", "interval",
        "negative_control", "positive_control", "occurred",
    ]  # fmt: skip


def test_scalars_become_plain_json_and_nan_becomes_null():
    import torch

    made = judge(
        **BASE | {"holds": np.bool_(True), "value": torch.tensor(2.5), "expected": np.float64("nan"), "n": np.int64(7)},
        negative_control=np.bool_(True), positive_control=torch.tensor(True), occurred=True,
        interval=(np.float32(0), 1),
    )  # fmt: skip
    plain = json.loads(json.dumps(made.model_dump(), allow_nan=False))
    assert (plain["value"], plain["expected"], plain["n"], plain["interval"]) == (2.5, None, 7, [0.0, 1.0])
    assert plain["verdict"] == "pass" and plain["negative_control"] is True
    assert judge(**BASE | {"value": float("inf")}).value is None
    assert judge(**BASE, interval=(float("nan"), 1)).interval is None


@pytest.mark.parametrize(
    "wrong, word",
    [
        (dict(tier="gpu"), "'gpu' is unknown"),
        (dict(id="solo"), "'solo'"),
        (dict(id="02.Solo"), "02.Solo"),
        (dict(claim=" "), "claim is empty"),
        (dict(n=2.5), "n = 2.5"),
        (dict(n=True), "no count"),
        (dict(n=""), "no count"),
        (dict(value=[1, 2]), "list"),
        (dict(value=np.array([1, 2])), "several values"),
        (dict(holds=3), "holds = 3"),
        (dict(holds=None), "holds is None"),
        (dict(negative_control=0), "negative_control = 0"),
        (dict(interval=(1, 0)), "in order"),
        (dict(interval=0.5), "pair"),
        (dict(interval=(0, float("inf"))), "finite"),
    ],
)
def test_wrong_arguments_are_named(wrong, word):
    with pytest.raises(BadInput, match="(?s).*") as caught:
        judge(**BASE | wrong)
    assert word in str(caught.value)


def notebook_with(*made):
    outputs = [new_output("display_data", data=one._repr_mimebundle_()) for one in made]
    return new_notebook(cells=[new_code_cell("check(...)", outputs=outputs)])


def test_collect_reads_them_back_from_a_file(tmp_path):
    first, second = judge(**BASE, **GOOD), judge(**BASE | {"id": "02.other", "value": None})
    nbformat.write(notebook_with(first, second), tmp_path / "02_split.ipynb")
    found = collect(tmp_path / "02_split.ipynb")
    assert [one.id for one in found] == ["02.solo-differs", "02.other"]
    assert {one.notebook for one in found} == {"02_split"}
    assert found[0].model_dump(exclude={"notebook"}) == first.model_dump(exclude={"notebook"})


def test_collect_refuses_a_repeated_id_and_another_notebooks_id():
    made = judge(**BASE)
    with pytest.raises(BadInput, match="02.solo-differs occurs twice in notebook 02_split"):
        collect(notebook_with(made, made), "02_split")
    with pytest.raises(BadInput, match="must begin with that notebook's number"):
        collect(notebook_with(made), "03_decode")


def test_a_check_reads_in_words_too():
    bundle = judge(**BASE | {"claim": "a < b & c"}, negative_control=True)._repr_mimebundle_()
    assert "a &lt; b &amp; c" in bundle["text/html"] and "inconclusive" in bundle["text/html"]
    for words in ("value 3", "n = 64", "emulated", "positive control missing", "occurred proof missing"):
        assert words in bundle["text/html"] and words in bundle["text/plain"]


@pytest.fixture
def shown(monkeypatch):
    calls = []
    monkeypatch.setattr(figures, "display", lambda data, **kw: calls.append((data, kw)))
    return calls


def test_a_figure_is_shown_once_with_alt_text_and_stamp(shown):
    fig, axes = plt.subplots()
    axes.plot([1, 2], [1, 4])
    show(fig, "ulp-by-rows", " Distance grows\nwith rows. ", "cpu-native", "2,670 rows")
    (data, kw), = shown  # fmt: skip
    assert data["image/png"].startswith(b"\x89PNG")
    assert kw["metadata"]["image/png"]["alt"] == "Distance grows with rows."
    assert kw["metadata"]["batch_variance"] == {
        "figure": "ulp-by-rows", "alt": "Distance grows with rows.", "tier": "cpu-native", "n": "2,670 rows",
    }  # fmt: skip
    assert [text.get_text() for text in fig.texts] == ["cpu-native · 2,670 rows"]
    assert not plt.fignum_exists(fig.number)


def test_the_stamp_is_in_the_picture_below_the_drawing(shown):
    """The PNG grows by a strip at the bottom that holds ink, in the right half only."""
    from PIL import Image

    def picture(stamped):
        fig, axes = plt.subplots()
        axes.set_xlabel("rows\nin the\nstep")
        if stamped:
            show(fig, "stamped", "A figure.", "emulated", 3)
            return np.asarray(Image.open(io.BytesIO(shown[-1][0]["image/png"])).convert("L"))
        plain = io.BytesIO()
        fig.savefig(plain, bbox_inches="tight")
        plt.close(fig)
        return np.asarray(Image.open(plain).convert("L"))

    without, with_stamp = picture(False), picture(True)
    strip = with_stamp[without.shape[0] - 12 :]  # 12 px: the margin that both have
    assert strip.shape[0] > 15
    half = strip.shape[1] // 2
    assert (strip[:, half:] < 128).sum() > 50
    assert (strip[:, :half] < 250).sum() == 0


@pytest.mark.parametrize("name, alt, tier, n", [
    ("A b", "text", "emulated", 1), ("../x", "text", "emulated", 1), ("a", "  ", "emulated", 1),
    ("a", None, "emulated", 1), ("a", "text", "gpu", 1), ("a", "text", "emulated", None),
])  # fmt: skip
def test_a_figure_without_what_it_needs_is_refused(shown, name, alt, tier, n):
    fig = plt.figure()
    with pytest.raises(BadInput):
        show(fig, name, alt, tier, n)
    assert shown == []
    plt.close(fig)


def test_a_table_is_escaped_aligned_and_counted(shown):
    frame = pd.DataFrame(
        {
            "policy": ["<default>", None],
            "rows differ": [1234567, 2],
            "rate": [0.123456, float("nan")],
            "same": [True, False],
        }
    )
    table(frame, "Rows by policy", "recorded-gpu", 2)
    (data, kw), = shown  # fmt: skip
    text = data["text/html"]
    assert "&lt;default&gt;" in text and "1,234,567" in text and "0.1235" in text and "–" in text and "yes" in text
    assert (
        text.count('<th scope="col"') == 4
        and "<figcaption><strong>Rows by policy" in text
        and "Rows by policy" in text
        and "recorded-gpu · n = 2" in text
    )
    assert kw["metadata"]["batch_variance"]["tier"] == "recorded-gpu"
    with pytest.raises(BadInput):
        table(frame, "", "recorded-gpu", 2)


def test_a_named_index_is_kept(shown):
    table(pd.DataFrame({"x": [1.0]}, index=pd.Index(["solo"], name="axis")), "By axis", "emulated", 1)
    assert "axis" in shown[0][0]["text/html"] and "solo" in shown[0][0]["text/html"]
