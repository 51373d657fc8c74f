"""Cells: what they serve, that workers do not change it, and that each request is compared with its own prompt
alone."""

import pandas as pd
import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.engine import MECHANISMS, Load, Mechanisms, Settings
from batch_variance.studies import cells as study
from batch_variance.studies.cells import Cell, Subject, occurred, serve_cells, workers_for
from batch_variance.studies.texts import ASKED, SUBJECTS, first_divergence, many_prompts

TEXTS = ["a", "what is it", "tell me more of this thing", "no", "why, and since when"]
OFF = Settings(threshold=8)
ON = Settings(Mechanisms.all(), threshold=8)


@pytest.fixture(scope="module")
def subjects(tiny_folder):
    make = lambda ffn: Subject.of(
        str(tiny_folder), ffn=ffn, experts=6, top_k=4, expert_split="contiguous", prompts=TEXTS
    )  # noqa: E731
    return {ffn: make(ffn) for ffn in ("dense", "moe")}


@pytest.fixture(scope="module")
def served(subjects):
    plan = [
        Cell(settings, concurrency, 70, 5, seed)
        for settings in (OFF, ON)
        for concurrency, seed in ((1, 0), (6, 0), (6, 1))
    ]
    return serve_cells(subjects["moe"], plan, processes=2, progress=False)


def test_all_off_changes_nothing_and_all_on_something(served):
    off = served.requests[served.requests.mechanisms == "none"]
    assert len(off) == 210 and not off.changed.any() and off.margins_moved.sum() == 0 and off.largest_move.max() == 0
    on = served.requests[(served.requests.mechanisms != "none") & (served.requests.concurrency == 6)]
    assert len(on) == 140 and on.margins_moved.sum() > 0 and on.changed.any()
    alone = served.requests[(served.requests.mechanisms != "none") & (served.requests.concurrency == 1)]
    assert not alone.changed.any() and alone.margins_moved.sum() == 0


def test_each_request_is_compared_with_its_own_prompt_alone(served):
    key = ["mechanisms", "prompt"]
    assert not served.solo.duplicated(key).any() and len(served.solo) == 2 * len(TEXTS)
    both = served.requests.merge(served.solo, on=key, suffixes=("", "_alone"))
    assert len(both) == len(served.requests) == 420
    for row in both.itertuples():
        split = next((i for i in range(5) if row.text[i] != row.text_alone[i]), -1)
        assert row.first_divergence == split and row.changed == (split >= 0) and len(row.text) == len(row.margins) == 5
        shared = 5 if split < 0 else split
        assert row.compared == shared
        assert row.margins_moved == sum(a != b for a, b in zip(row.margins[:shared], row.margins_alone[:shared]))


def test_every_request_is_served_once_with_its_prompt(served):
    for _, part in served.requests.groupby(["mechanisms", "concurrency", "seed"]):
        assert sorted(part.request) == list(range(70))
        assert (part.prompt == part.request % len(TEXTS)).all()


def test_co_resident_rows_are_measured(served):
    alone = served.requests[served.requests.concurrency == 1]
    assert (alone.co_resident_rows < 15).all()
    busy = served.requests[served.requests.concurrency == 6]
    assert busy.co_resident_rows.mean() > 10 and (busy.most_rows >= busy.co_resident_rows).all()
    steps = served.steps.set_index(["mechanisms", "concurrency", "seed"]).steps
    assert (
        steps["none", 1, 0] == 70 * 5
        and steps["none", 0, 0] == len(TEXTS) * 5
        and 70 * 5 / 6 <= steps["none", 6, 0] < 175
    )


def test_the_trace_proves_what_occurred(served):
    on = served.choices[served.choices.mechanisms != "none"]
    found = {name: occurred(on, name) for name in MECHANISMS}
    assert all(found.values()), found
    off = served.choices[served.choices.mechanisms == "none"]
    assert not any(
        occurred(off, name)
        for name in ("split_k", "norm_blocks", "row_threshold", "attention_dispatch", "expert_order", "batch_scale")
    )
    assert not occurred(on[on.concurrency == 0], "split_k")


def test_what_never_happens_alone_is_told_by_kind_of_step():
    rows = [
        (0, "decode", "4"),
        (0, "prefill", "2"),
        (8, "decode", "2"),
        (8, "decode", "4"),
        (8, "prefill", "2"),
        (8, "prefill", "1"),
        (1, "decode", "9"),
    ]
    frame = pd.DataFrame(
        [{"concurrency": c, "step": s, "mechanism": "split_k", "choice": v, "count": 1} for c, s, v in rows]
    )
    assert [tuple(row) for row in study.never_alone(frame)[["step", "choice"]].values] == [
        ("decode", "2"),
        ("prefill", "1"),
    ]
    assert occurred(frame, "split_k") and not occurred(frame, "norm_blocks") and not occurred(frame[:2], "split_k")
    assert not occurred(frame[frame.choice == "4"], "split_k") and list(study.never_alone(frame[:2])) == list(frame)


def test_runs_that_differ_by_seed_differ_in_company_only(served):
    part = served.requests[(served.requests.mechanisms == "none") & (served.requests.concurrency == 6)]
    a, b = (part[part.seed == seed].reset_index(drop=True) for seed in (0, 1))
    assert (a.co_resident_rows != b.co_resident_rows).any() and a.text.equals(b.text)


@pytest.mark.parametrize("processes", [1, 3])
def test_the_number_of_workers_changes_nothing(subjects, served, processes):
    plan = [Cell(ON, 6, 70, 5, 0), Cell(OFF, 6, 70, 5, 0)]
    again = serve_cells(subjects["moe"], plan, processes=processes, progress=False)
    expected = pd.concat(
        [
            served.requests[
                (served.requests.mechanisms == str(m))
                & (served.requests.concurrency == 6)
                & (served.requests.seed == 0)
            ]
            for m in (Mechanisms.all(), Mechanisms.none())
        ],
        ignore_index=True,
    )
    pd.testing.assert_frame_equal(again.requests, expected)
    assert torch.get_num_threads() > 0


def test_cells_are_told_as_they_complete(subjects):
    told = []
    plan = [Cell(OFF, c, 8, 3, 0) for c in (1, 4)]
    found = serve_cells(subjects["dense"], plan, 2, lambda cell, frame: told.append((cell, len(frame))), progress=False)
    assert sorted(told, key=lambda t: t[0].concurrency) == [(plan[0], 8), (plan[1], 8)]
    assert len(found.requests) == 16


def test_a_failing_cell_is_an_error_not_a_gap(subjects, monkeypatch):
    monkeypatch.setattr(study, "_run", lambda subject, task: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serve_cells(subjects["dense"], [Cell(OFF, 1, 1, 1)], progress=False)


@pytest.mark.parametrize("requests,concurrency", [(1, 1), (5, 8), (64, 1), (65, 1), (1000, 32), (1000, 64), (130, 2)])
def test_shards_cover_the_cell(requests, concurrency):
    cell = Cell(OFF, concurrency, requests, 4, seed=3)
    shards = cell.shards()
    assert [start for start, _ in shards] == [sum(load.requests for _, load in shards[:i]) for i in range(len(shards))]
    assert sum(load.requests for _, load in shards) == requests
    assert len({load.seed for _, load in shards}) == len(shards)
    assert all(isinstance(load, Load) and 1 <= load.concurrency <= concurrency for _, load in shards)
    if requests >= 6 * concurrency:
        assert all(load.requests >= 4 * concurrency for _, load in shards)
    other = {load.seed for _, load in Cell(OFF, concurrency, requests, 4, seed=4).shards()}
    assert not other & {load.seed for _, load in shards}


def test_wrong_cells_are_refused(subjects):
    cell = Cell(OFF, 1, 1, 1)
    empty = Subject(
        *[getattr(subjects["dense"], name) for name in ("model", "ffn", "experts", "top_k", "expert_split", "device")],
        (),
    )
    for subject, plan in ((subjects["dense"], []), (empty, [cell]), (subjects["dense"], [cell, cell])):
        with pytest.raises(BadInput, match="cells over"):
            serve_cells(subject, plan, progress=False)
    for wrong in (Cell(OFF, 0, 1, 1), Cell(OFF, 1, 0, 1), Cell(OFF, 1, 1, 0)):
        with pytest.raises(BadInput, match="at least 1"):
            serve_cells(subjects["dense"], [wrong], progress=False)
    with pytest.raises(BadInput, match="processes"):
        serve_cells(subjects["dense"], [cell], processes=-1, progress=False)


def test_workers(monkeypatch):
    monkeypatch.setattr(study.os, "cpu_count", lambda: 16)
    assert (workers_for("cpu", 100), workers_for("cuda", 100), workers_for("cuda", 3)) == (16, 14, 3)
    monkeypatch.setattr(study.os, "cpu_count", lambda: None)
    assert (workers_for("cpu", 100), workers_for("cuda", 100)) == (1, 1)


# --- prompts and texts


def test_many_prompts_are_different_and_begin_with_the_shipped_ones():
    most = 8 + len(ASKED) * len(SUBJECTS)
    found = many_prompts(most)
    assert len(set(found)) == most == 64 and many_prompts(3) == found[:3]
    for wrong in (0, most + 1):
        with pytest.raises(BadInput, match="prompts"):
            many_prompts(wrong)


@pytest.mark.parametrize(
    "a,b,split",
    [
        ([], [], -1),
        ([1], [1], -1),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ((1, 2), (1,), 1),
        ([4], [5], 0),
        ([], [1], 0),
    ],
)
def test_first_divergence(a, b, split):
    assert first_divergence(a, b) == split
