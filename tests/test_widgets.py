"""The explorers without a browser: what they draw and say, how fast they answer, and that each output has its twin."""

import base64
import io
import re
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from batch_variance.common import BadInput
from batch_variance.common.data import repository
from batch_variance.numerics.trees import Tree
from batch_variance.reporting.figures import METADATA
from batch_variance.reporting.html import WIDGET
from batch_variance.reporting.parameters import read_defaults
from batch_variance.reporting.widgets import divergence_explorer, explorer, fold_trees, schedule_explorer
from batch_variance.reporting.widgets import threshold_explorer, tree_explorer
from batch_variance.reporting.widgets.divergence import DivergenceExplorer, side_by_side
from batch_variance.reporting.widgets.schedule import RULES, ScheduleExplorer, state, timeline
from batch_variance.reporting.widgets.threshold import ThresholdExplorer
from batch_variance.reporting.widgets.tree import TreeExplorer, additions, fold, lines_of, words
from batch_variance.schedules import make_plan
from batch_variance.studies import split_scheduler
from batch_variance.studies.row_threshold_routing import Routing
from batch_variance.studies.sources import plain

SECONDS = 0.2  # an answer's limit, on a machine that draws a plain line in a third of it or less
PLAIN = 3  # its limit in drawings of a plain line, on a slower machine


@pytest.fixture(scope="module")
def p():
    return split_scheduler.Parameters.checked(read_defaults(repository() / "notebooks" / "02_split_scheduler.ipynb"))


@pytest.fixture(scope="module")
def routing():
    """Two layers, three prompts of 5, 40 and 9 rows, 48 groups."""
    scores = np.random.default_rng(0).lognormal(size=(2, 54, 48)).astype("float32")
    return Routing(scores, [1, 4], np.repeat([0, 1, 2], [5, 40, 9]), "random scores")


def token_table(noise=True):
    rng = np.random.default_rng(1)
    rows = []
    for prompt, concurrency, split in (("One?", 8, None), ("One?", 32, 12), ("Two?", 8, 3), ("Two?", 32, 20)):
        for position in range(24):
            same = split is None or position < split
            rows.append(
                (
                    prompt,
                    concurrency,
                    position,
                    f" w{position}",
                    f" w{position}" if same else f" <{position}>",
                    rng.lognormal(),
                    rng.lognormal(),
                    1e-3,
                )
            )
    names = ["prompt", "concurrency", "position", "alone", "together", "margin_alone", "margin_together", "noise"]
    frame = pd.DataFrame(rows, columns=names)
    return frame if noise else frame.drop(columns="noise")


@pytest.fixture
def live(p, routing):
    """One of each."""
    trees = fold_trees(p)
    return {
        "schedule": ScheduleExplorer([4096, 2000, 100, 8192] * 2, 0, 132, 64, 5, "flashmla", 8192),
        "threshold": ThresholdExplorer(routing, 32, 16, 12),
        "divergence": DivergenceExplorer(token_table(), "One?", 32),
        "tree": TreeExplorer(trees, *list(trees)[:2]),
    }


def said(one) -> str:
    return re.sub(r"<[^>]*>", "", one.sentence.value)


def picture(one) -> bytes:
    return base64.b64decode(re.search(r'base64,([^"]*)', one.picture.value).group(1))


MOVES = {
    "schedule": {
        "row 0": [100, 7000, 0],
        "rows": [12, 2],
        "parts": [16, 132],
        "block": [128],
        "rule": list(RULES[1:]),
        "watched": [1],
    },
    "threshold": {
        "requests": [64, 3],
        "tokens": [64, 2],
        "experts": [48, 8],
        "top_k": [1, 8],
        "layer": [1],
        "threshold": [0, 128],
    },
    "divergence": {"prompt": ["Two?"], "concurrency": [8, 32]},
    "tree": {"second": ["root-length, batch of 1", "flashmla, batch of 64"], "first": ["root-length, batch of 8"]},
}


def seconds_of_a_plain_line() -> float:
    started = time.thread_time()
    fig, ax = plt.subplots(figsize=(8, 4))
    ax.plot(range(9))
    fig.savefig(io.BytesIO(), format="png")
    plt.close(fig)
    return time.thread_time() - started


@pytest.mark.parametrize("name", MOVES)
def test_each_control_moves_the_figure_in_time(live, name):
    """Processor time of the thread, so that other work on the machine does not count; drawing is one thread's work. The
    median, so that a garbage collection in one of them does not."""
    one, spent, plain_lines = live[name], [], []
    for control, values in MOVES[name].items():
        for value in values:
            before, started = picture(one), time.thread_time()
            one.controls[control].value = value
            spent.append(time.thread_time() - started)
            plain_lines.append(seconds_of_a_plain_line())
            assert picture(one) != before, f"{control} = {value} changed nothing"
            assert picture(one).startswith(b"\x89PNG") and len(said(one)) > 40
    median, limit = np.median(spent), max(SECONDS, PLAIN * np.median(plain_lines))
    assert median < limit, f"median {median:.3f} s of at most {limit:.3f} s"
    assert set(MOVES[name]) == {key for key in one.controls if not re.match(r"row [1-9]", key)}


@pytest.mark.parametrize("name", MOVES)
def test_controls_have_labels_and_the_picture_its_words(live, name):
    one = live[name]
    assert all(control.description.strip() for control in one.controls.values())
    alt = re.search(r'alt="([^"]*)"', one.picture.value).group(1)
    assert alt and alt in one.sentence.value and 'role="status"' in one.sentence.value
    assert Image.open(io.BytesIO(picture(one))).width >= 800


def test_several_controls_move_at_once(live):
    drawn = []
    one = live["schedule"]
    one._draw, before = (
        (lambda draw: lambda **values: drawn.append(values) or draw(**values))(one._draw),
        one.picture.value,
    )
    one.set(parts=8, block=128, rule="free-4")
    assert len(drawn) == 1 and drawn[0]["parts"] == 8 and one.picture.value != before


# What the schedule explorer says, against the schedules themselves.


@pytest.mark.parametrize("rule", RULES)
def test_the_timeline_is_the_plan(rule):
    lengths = [1000, 1, 0, 5000, 64]
    plan = make_plan(rule, lengths, 10, 64, 5)
    frame = timeline(plan, 5, watched=3)
    assert len(frame) == len(plan.segments)
    assert (frame.stop - frame.start == plan.segments[:, 2] - plan.segments[:, 1] + 5).all()
    for _, part in frame.groupby("part"):
        assert part.start.tolist() == [0, *part.stop.tolist()[:-1]], "no gap and no overlap on a part"
    assert (frame.watched == (plan.segments[:, 0] == 3)).all()


def test_the_schedule_explorer_counts_pieces(live):
    one = live["schedule"]
    _, pieces = state([4096, 2000, 100, 8192] * 2, 0, 132, 64, 5, "flashmla")
    alone = make_plan("flashmla", [4096], 132).pieces[0]
    batch = make_plan("flashmla", [4096, 2000, 100, 8192] * 2, 132).pieces[0]
    assert pieces.groupby("case").size().to_dict() == {"alone": alone, "in the batch": batch} and batch != alone
    assert f"cut into {batch} pieces in this batch of 8 and into {alone} alone: another reduction tree" in said(one)
    one.controls["rule"].value = "root-length"
    assert "cut into 8 pieces in this batch of 8 and into 8 alone: the same reduction tree" in said(one)


def test_rows_are_added_and_removed_by_button_and_the_watched_row_stays_within(live):
    one = live["schedule"]
    buttons = {}
    stack = [one.view]
    while stack:
        widget = stack.pop()
        stack += getattr(widget, "children", ())
        if type(widget).__name__ == "Button":
            buttons[widget.description] = widget
    one.controls["watched"].value = 7
    buttons["Remove the last row"].click()
    assert one.controls["rows"].value == 7 and one.controls["watched"].value == 6 and len(one._lengths.children) == 7
    for _ in range(9):
        buttons["Add a row"].click()
    assert one.controls["rows"].value == 12 == len(one._lengths.children)


def test_a_row_without_tokens_is_drawn(live):
    one = live["schedule"]
    for rule in RULES:
        one.set(**{"rule": rule, "rows": 1, "row 0": 0, "watched": 0})
        assert "row 0 (0 tokens, 0 blocks of 64)" in said(one)


# The threshold explorer.


def test_rows_per_expert_are_counted_right(routing):
    """Against a plain loop over rows."""
    rows = routing.rows_per_expert(4, requests=5, tokens=7, experts=12, top_k=3)
    expected = np.zeros(12, dtype=int)
    starts = {0: 0, 1: 5, 2: 45}
    sizes = {0: 5, 1: 40, 2: 9}
    for request in range(5):
        prompt, shift = request % 3, 7 * request
        for token in range(7):
            row = starts[prompt] + (shift + token) % sizes[prompt]
            score = [routing.scores[1, row, 4 * e : 4 * e + 4].sum() for e in range(12)]
            for expert in sorted(range(12), key=lambda e: -score[e])[:3]:
                expected[expert] += 1
    assert rows.rows.tolist() == expected.tolist() and rows.rows.sum() == 5 * 7 * 3
    with pytest.raises(BadInput, match="top-k is 13, but there are 12 experts"):
        routing.rows_per_expert(4, 1, 1, 12, 13)


def test_fewer_experts_lower_the_top_k_with_them(live):
    one = live["threshold"]
    one.set(experts=48, top_k=40)
    one.controls["experts"].value = 8
    assert one.controls["top_k"].max == 8 and one.controls["top_k"].value == 8
    assert "8 of 8 experts cross" in said(one) or "0 of 8 experts cross" in said(one)


def test_routing_is_the_models_own(write_llama, tmp_path):
    """On a tiny model: the chosen experts are those that the engine's forward pass chooses, for every layer and row."""
    import torch

    from batch_variance.studies import row_threshold as study
    from batch_variance.studies.row_threshold_routing import routing as route

    folder = write_llama(tmp_path / "llama", num_hidden_layers=5)
    values = read_defaults(repository() / "notebooks" / "01_row_threshold.ipynb")
    values |= {"model": str(folder), "experts": 6, "top_k": 2, "expert_split": "contiguous", "device": "cpu"}
    setup = study.prepare(study.Parameters.checked(values))
    found = route(setup)
    assert found.scores.shape == (2, sum(map(len, setup.prompts[:4])), 6) and found.layers == [1, 4]
    for place, layer in enumerate(found.layers):
        chosen = setup.model("default")._route(setup.ffn_inputs[layer], setup.weights.layers[layer].ffn)
        mine = torch.from_numpy(found.scores[place]).topk(2, dim=1).indices.sort(1).values
        assert torch.equal(mine, chosen.nonzero()[:, 1].view(-1, 2))


# The divergence explorer.


def test_the_split_and_its_margins_are_named(live):
    table = token_table()
    at = table[(table.prompt == "One?") & (table.concurrency == 32) & (table.position == 12)].iloc[0]
    text = said(live["divergence"])
    assert "split at token 12" in text and f"{at.margin_alone:.3g}" in text and f"{at.margin_together:.3g}" in text
    live["divergence"].controls["concurrency"].value = 8
    assert "all 24 tokens are those of the prompt served alone" in said(live["divergence"])


def test_the_two_texts_stand_side_by_side_escaped_and_marked():
    table = token_table()
    part = table[(table.prompt == "Two?") & (table.concurrency == 8)].assign(same=lambda t: t.alone == t.together)
    text = side_by_side(part)
    assert text.count("<mark") == 2 and "&lt;3&gt;" in text and "<3>" not in text
    assert re.findall(r"<td[^>]*>(.*?)<mark", text) == [" w0 w1 w2"] * 2
    assert "<mark" not in side_by_side(part.assign(same=True))


def test_a_table_without_noise_is_drawn_and_one_without_margins_refused():
    assert "noise" not in said(DivergenceExplorer(token_table(noise=False), "One?", 32))
    with pytest.raises(BadInput, match="lacks margin_alone"):
        DivergenceExplorer(token_table().drop(columns="margin_alone"), "One?", 32)
    with pytest.raises(BadInput, match="is empty"):
        divergence_explorer(token_table().iloc[:0], "emulated", 0)


def test_a_pair_that_was_not_served_is_said_and_the_picture_stays():
    table = token_table()
    one = DivergenceExplorer(table[(table.prompt == "One?") | (table.concurrency == 8)], "One?", 32)
    before = one.picture.value
    one.controls["prompt"].value = "Two?"
    assert 'role="alert"' in one.sentence.value and "was not served at concurrency 32" in said(one)
    assert one.picture.value == before


# The tree explorer.


def test_a_fold_is_pieces_in_turn():
    assert fold([0, 2, 5]) == ((0, 1), ((2, 3), 4))
    assert fold([0, 3]) == ((0, 1), 2) and fold([0, 1]) == 0 and fold([0]) == 0


def test_additions_are_compared_by_what_they_add():
    left, pairs = (((0, 1), 2), 3), ((0, 1), (2, 3))
    assert set(additions(left)) == {(1, 2), (3, 4), (7, 8)}
    lines = lines_of(left, pairs)
    assert lines.groupby("own").size().to_dict() == {False: 3, True: 6}, "0 + 1 is shared, two additions are not"
    assert not lines_of(left, left).own.any() and lines.leaves.iloc[0] == 4
    assert "1 are the same" in words("a", left, "b", pairs) and "the same 3 additions" in words(
        "a", left, "b", (3, (2, (1, 0)))
    )
    assert additions(Tree.of(left)) == additions(left)


def test_a_deep_and_a_wide_tree_are_drawn():
    deep = 0
    for term in range(1, 1500):
        deep = (deep, term)
    wide = tuple(range(1500))
    one = TreeExplorer({"deep": deep, "wide": wide}, "deep", "wide")
    assert "1499 additions, 1499 deep" in said(one) and "wide 1, 1 deep" in said(one)


@pytest.mark.parametrize(
    "trees, pairs, words",
    [
        ({"a": (0, 1)}, None, "give two or more"),
        ({"a": (0, 1), "b": (0, 1)}, [("a", "c")], "no tree is named 'c'"),
        ({"a": (0, 1), "b": (0, 2)}, None, "leaves"),
    ],
)
def test_what_is_no_pair_of_trees_is_refused(trees, pairs, words):
    with pytest.raises(BadInput, match=words):
        tree_explorer(trees, "emulated", 2, pairs)


def test_fold_trees_follow_the_schedules(p):
    trees = fold_trees(p)
    assert len(trees) == 6
    own = [trees[f"{p.rule}, batch of {size}"] for size in (1, 8, 64)]
    assert own[0] == own[1] == own[2] and len({str(trees[f"flashmla, batch of {size}"]) for size in (1, 8, 64)}) == 3


# Outputs: the live control and its twin.


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setattr(explorer, "display", lambda data, **kw: found.append((data, kw)))
    return found


@pytest.mark.parametrize("name", MOVES)
def test_an_explorers_output_holds_its_twin(shown, p, routing, name):
    class RowThreshold:
        threshold, experts, top_k = 32, 16, 12

    said = {
        "schedule": lambda: schedule_explorer(p),
        "threshold": lambda: threshold_explorer(routing, RowThreshold, "emulated"),
        "divergence": lambda: divergence_explorer(token_table(), "emulated", "4 texts"),
        "tree": lambda: tree_explorer(fold_trees(p), "emulated", 6),
    }[name]()
    ((data, kw),) = shown
    about = kw["metadata"][METADATA]
    assert data["image/png"].startswith(b"\x89PNG") and WIDGET in data and about["explorer"] is True
    assert plain(said) == about["alt"] == kw["metadata"]["image/png"]["alt"] and re.search(r"\d", said)
    assert f'data-source="figure:{name}-explorer"' in said, "its numbers lead to the twin's data"
    assert about["figure"] == f"{name}-explorer" and data["text/plain"].startswith(f"Figure {name}-explorer")
    assert any(kind.endswith("figure+json") for kind in data), "the twin can be redrawn"


def test_the_makefile_has_jupyterlab_keep_widgets():
    assert 'jupyterlab-manager:plugin": {"saveState": true}' in (repository() / "Makefile").read_text()
