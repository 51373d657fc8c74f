"""The schedule explorer: row lengths, SM parts, block size and rule, and what becomes of the watched row."""

from typing import Sequence

import ipywidgets as W
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ...schedules import BATCH_WIDE, Plan, make_plan
from ..plots import explorers as plots
from .explorer import Explorer, canvas, choice, knob, line, present

RULES = (BATCH_WIDE, "root-length", "never-split", "fixed-count-4", "fixed-chunk-8", "free-4", "by-length-4-16")
MOST_ROWS = 12  # rows with a slider of their own


def timeline(plan: Plan, overhead: int, watched: int) -> pd.DataFrame:
    """A row a segment: part, start and stop on the part's clock (blocks; each begins with the overhead), watched."""
    row, begin, end = plan.segments[:, 0], plan.segments[:, 1], plan.segments[:, 2]
    part = np.repeat(np.arange(plan.programs), np.diff(plan.program_starts))
    cost = end - begin + overhead
    stop = np.cumsum(cost)
    before = np.concatenate([[0], stop])[plan.program_starts[:-1]]  # the clock at which each part's own began
    stop = stop - before[part]
    return pd.DataFrame({"part": part, "start": stop - cost, "stop": stop, "watched": row == watched})


def state(
    lengths: Sequence[int], watched: int, parts: int, block: int, overhead: int, rule: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Timeline of the batch, and the watched row's pieces (case, begin_block, end_block) in the batch and alone.

    lengths in tokens. Raises BadInput as ``make_plan`` does.
    """
    plan = make_plan(rule, list(lengths), parts, block, overhead)
    alone = make_plan(rule, [lengths[watched]], parts, block, overhead)
    pieces = [
        {"case": case, "begin_block": begin, "end_block": end}
        for case, edges in (("in the batch", plan.bounds_of(watched)), ("alone", alone.bounds_of(0)))
        for begin, end in zip(edges, edges[1:])
    ]
    return timeline(plan, overhead, watched), pd.DataFrame(pieces, columns=["case", "begin_block", "end_block"])


class ScheduleExplorer(Explorer):
    """Rows can be added, taken away and lengthened; row 0 is the one to watch at first."""

    def __init__(
        self, lengths: Sequence[int], watched: int, parts: int, block: int, overhead: int, rule: str, longest: int
    ):
        self._rows = [
            knob(f"row {row} (tokens)", int(lengths[row]) if row < len(lengths) else longest // 4, 0, longest)
            for row in range(max(MOST_ROWS, len(lengths)))
        ]
        self._overhead = overhead
        controls = {
            "rows": knob("rows in the batch", len(lengths), 1, len(self._rows)),
            "watched": knob("watched row", watched, 0, len(lengths) - 1),
            "parts": knob("SM parts (programs)", parts, 1, max(132, parts)),
            "block": choice("block size (tokens)", sorted({16, 32, 64, 128, 256, block}), block),
            "rule": choice("rule", list(dict.fromkeys([*RULES, rule])), rule),
        }
        wide = W.Layout(width="auto")
        add = W.Button(description="Add a row", layout=wide)
        drop = W.Button(description="Remove the last row", layout=wide)
        add.on_click(lambda _: setattr(controls["rows"], "value", min(controls["rows"].value + 1, len(self._rows))))
        drop.on_click(lambda _: setattr(controls["rows"], "value", max(controls["rows"].value - 1, 1)))
        controls["rows"].observe(self._fit, "value")
        controls |= {f"row {place}": one for place, one in enumerate(self._rows)}
        super().__init__(controls, self.draw, "Schedule explorer: how a batch is cut over SM parts")
        self._lengths = W.VBox([line(one) for one in self._rows[: len(lengths)]])
        first = [line(controls[name]) for name in ("rule", "parts", "block", "watched", "rows")]
        self.panel.children = [
            W.HBox([W.VBox(first), W.VBox([W.HBox([add, drop]), self._lengths])], layout=W.Layout(flex_flow="row wrap"))
        ]

    def _fit(self, change) -> None:
        self._lengths.children = [line(one) for one in self._rows[: change["new"]]]
        self.controls["watched"].max = change["new"] - 1

    def draw(self, rows: int, watched: int, parts: int, block: int, rule: str, **_) -> tuple[Figure, str]:
        lengths = [one.value for one in self._rows[:rows]]
        watched = min(watched, rows - 1)
        segments, pieces = state(lengths, watched, parts, block, self._overhead, rule)
        fig = canvas(9.4, 3.6)
        left, right = fig.subplots(1, 2, width_ratios=(3, 2))
        fig.subplots_adjust(left=0.065, right=0.985, top=0.9, bottom=0.15, wspace=0.42)
        plots.schedule_on(left, segments, parts)
        left.set(xlabel="time (blocks, overhead included)", ylabel="SM part")
        left.set_title(f"rule {rule}", y=1.0)
        plots.pieces_on(right, pieces)
        right.set(xlabel="block of the row's KV cache")
        right.set_title(f"row {watched}, {lengths[watched]:,} tokens", y=1.0)
        return fig, self._words(lengths, watched, parts, block, segments, pieces, rule)

    @staticmethod
    def _words(lengths, watched, parts, block, segments, pieces, rule) -> str:
        counts = pieces.groupby("case").size()
        here, alone = int(counts.get("in the batch", 0)), int(counts.get("alone", 0))
        same = (
            pieces[pieces.case == "alone"].drop(columns="case").to_numpy().tolist()
            == pieces[pieces.case == "in the batch"].drop(columns="case").to_numpy().tolist()
        )
        tree = (
            "the same reduction tree, so the same order of additions" if same else "another reduction tree than alone"
        )
        return (
            f"Under {rule}, row {watched} ({lengths[watched]:,} tokens, {-(-lengths[watched] // block)} blocks of "
            f"{block}) is cut into "
            f"{here} piece{'s' * (here != 1)} in this batch of {len(lengths)} and into {alone} alone: {tree}. "
            f"{segments.part.nunique()} of {parts} SM parts work, the last until block time "
            f"{int(segments.stop.max()) if len(segments) else 0}."
        )


def schedule_explorer(p, name: str = "schedule-explorer") -> str:
    """Display the explorer; returns a sentence on what its twin shows. It starts from a study's
    parameters (lengths or a distribution, SM parts, block size, rule).

    p: ``studies.split_scheduler.Parameters``. Schedules are exact integers everywhere, but the tier says emulated: no
    GPU has run them here. Raises BadInput as the schedules do.
    """
    from ...studies.split_scheduler import batch_lengths

    drawn = batch_lengths(p)[:8]
    watched = min(p.watched_row, len(drawn) - 1)
    live = ScheduleExplorer(drawn, watched, p.num_sm_parts, p.block_size, p.overhead, BATCH_WIDE, max(8192, *drawn))
    rows = [p.longest, *batch_lengths(p, 64, seed=1)[1:]]
    cases = [(f"{rule}, batch of {size}", rows[:size], rule) for rule in (BATCH_WIDE, p.rule) for size in (2, 64)]
    found = [
        (label, *state(lengths, 0, p.num_sm_parts, p.block_size, p.overhead, rule)) for label, lengths, rule in cases
    ]
    segments = pd.concat([one.assign(state=label) for label, one, _ in found], ignore_index=True)
    pieces = pd.concat([one.assign(state=label) for label, _, one in found], ignore_index=True)
    count = pieces[pieces.case == "in the batch"].groupby("state", sort=False).size()
    words = (
        f"Pieces that a row of {p.longest:,} tokens is cut into: "
        + "; ".join(f"{label}: {n}" for label, n in count.items())
        + "."
    )
    return present(
        live, plots.schedules(segments, pieces, p.num_sm_parts), name, words, "emulated", f"{len(cases)} states"
    )
