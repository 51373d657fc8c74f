"""What the explorers draw, live and in their static twins: schedules on SM parts, rows per expert, margins along a
text, and reduction trees. Each state is a tidy frame; a twin is a grid of states drawn by the same code."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure

from ..drawings import drawn

WATCHED, OTHERS, REST = "#E69F00", "#0072B2", "#9AB7CC"


def boxes(ax: Axes, left, right, bottom, height, **style) -> None:
    """Many rectangles as one collection: a patch each would make a control wait."""
    left, right, bottom, height = (np.asarray(values, float) for values in (left, right, bottom, height))
    top = bottom + height
    corners = np.stack(
        [np.stack(xy, axis=-1) for xy in ((left, bottom), (right, bottom), (right, top), (left, top))], axis=1
    )
    ax.add_collection(PolyCollection(corners, **style))


def schedule_on(ax: Axes, segments: pd.DataFrame, parts: int) -> None:
    """SM parts against time. segments: part, start, stop (blocks), watched (bool)."""
    for watched, colour in ((False, REST), (True, WATCHED)):
        part = segments[segments.watched == watched]
        boxes(ax, part.start, part.stop, part.part - 0.45, 0.9, facecolors=colour, edgecolors="white", linewidths=0.3)
    end = segments.stop.max() if len(segments) else 0
    ax.set(xlim=(0, max(end, 1) * 1.02), ylim=(parts - 0.5, -0.5))
    ax.grid(axis="y", visible=False)


def pieces_on(ax: Axes, pieces: pd.DataFrame) -> None:
    """The watched row's pieces, a bar a case, from left to right. pieces: case, begin_block, end_block."""
    cases = list(dict.fromkeys(pieces.case))
    for height, case in enumerate(cases):
        part = pieces[pieces.case == case]
        shades = np.where(np.arange(len(part)) % 2 == 0, WATCHED, "#F3CE80")
        boxes(
            ax,
            part.begin_block,
            part.end_block,
            np.full(len(part), height - 0.3),
            0.6,
            facecolors=shades,
            edgecolors="white",
            linewidths=0.5,
        )
    counts = pieces.case.value_counts().to_dict()
    ax.set_yticks(
        range(len(cases)), [f"{case}\n{counts[case]} piece{'s' if counts[case] > 1 else ''}" for case in cases]
    )
    end = pieces.end_block.max() if len(pieces) else 1  # a row without tokens has no piece
    ax.set(xlim=(0, end), ylim=(max(len(cases), 1) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)


@drawn
def schedules(segments: pd.DataFrame, pieces: pd.DataFrame, parts: int) -> Figure:
    """Two states a row: the schedule above, the watched row's pieces below. Both frames have a column ``state``."""
    states = list(dict.fromkeys(segments.state))
    rows = -(-len(states) // 2)
    fig, axes = plt.subplots(2 * rows, 2, figsize=(7.2, 4.0 * rows), squeeze=False, height_ratios=(4, 1) * rows)
    for place, state in enumerate(states):
        top, bottom = axes[2 * (place // 2) : 2 * (place // 2) + 2, place % 2]
        schedule_on(top, segments[segments.state == state], parts)
        top.set_title(state, fontsize=10)
        top.set_xlabel("time (blocks, overhead included)", fontsize=9)
        top.set_ylabel("SM part", fontsize=9)
        pieces_on(bottom, pieces[pieces.state == state].replace({"case": {"in the batch": "batch"}}))
        bottom.tick_params(axis="y", labelsize=8)
        bottom.set_xlabel("block of the watched row", fontsize=9)
    return fig


def experts_on(ax: Axes, rows: pd.DataFrame, threshold: int) -> None:
    """Rows of each expert against the threshold; those above are hatched as well as coloured. rows: expert, rows."""
    above = (rows.rows > threshold).to_numpy()
    for group, colour, hatch in ((~above, OTHERS, None), (above, WATCHED, "///")):
        part = rows[group]
        boxes(
            ax,
            part.expert - 0.4,
            part.expert + 0.4,
            np.zeros(len(part)),
            part.rows,
            facecolors=colour,
            hatch=hatch,
            edgecolors="white",
            linewidths=0.3,
        )
    ax.axhline(threshold + 0.5, color="#333333", linestyle="--", linewidth=1.2)
    ax.set(xlim=(-0.6, len(rows) - 0.4), ylim=(0, 1.12 * max(rows.rows.max(), threshold + 1)))
    ax.grid(axis="x", visible=False)


@drawn
def expert_rows(states: pd.DataFrame, threshold: int) -> Figure:
    """Small multiples of rows per expert. states: state, expert, rows."""
    names = list(dict.fromkeys(states.state))
    columns = min(3, len(names))
    fig, axes = plt.subplots(
        -(-len(names) // columns),
        columns,
        figsize=(3.1 * columns, 2.3 * -(-len(names) // columns) + 0.3),
        squeeze=False,
    )
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for ax, name in zip(axes.flat, names):
        part = states[states.state == name].reset_index(drop=True)
        experts_on(ax, part, threshold)
        over = int((part.rows > threshold).sum())
        ax.set_title(f"{name}\n{over} of {len(part)} above {threshold}", fontsize=9)
    fig.supxlabel("expert", fontsize=11)
    fig.supylabel("rows in the step", fontsize=11)
    return fig


def margins_on(ax: Axes, tokens: pd.DataFrame) -> None:
    """Margins along two texts, each text's own, the noise where it is known, and the first split.

    tokens: position, margin_alone, margin_together, same (bool), and noise or no such column.
    """
    floor = 1e-6
    ax.plot(
        tokens.position,
        tokens.margin_alone.clip(lower=floor),
        "-o",
        markersize=3,
        linewidth=1.2,
        color=OTHERS,
        label="margin, alone",
    )
    ax.plot(
        tokens.position,
        tokens.margin_together.clip(lower=floor),
        "--s",
        markersize=3,
        linewidth=1.2,
        color="#D55E00",
        label="margin, together",
    )
    if "noise" in tokens and tokens.noise.notna().any():
        ax.plot(
            tokens.position, tokens.noise.clip(lower=floor), ":", color="#333333", linewidth=1.4, label="logit noise"
        )
    split = first_split(tokens)
    if split is not None:
        ax.axvline(split, color="#333333", linewidth=1.2)
        ax.annotate(
            "first split", (split, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9
        )
    if tokens[["margin_alone", "margin_together"]].notna().any(axis=None):  # a log axis of nothing is an error
        ax.set_yscale("log")


def first_split(tokens: pd.DataFrame) -> int | None:
    """Position of the first token that differs, None where the texts agree."""
    differ = tokens.position[~tokens.same.astype(bool)]
    return int(differ.min()) if len(differ) else None


@drawn
def divergences(tokens: pd.DataFrame) -> Figure:
    """A row a state: margins along the text. tokens: state, and the columns of ``margins_on``."""
    states = list(dict.fromkeys(tokens.state))
    fig, axes = plt.subplots(len(states), 1, figsize=(7.2, 1.7 * len(states) + 0.8), squeeze=False, sharex=True)
    for ax, state in zip(axes[:, 0], states):
        margins_on(ax, tokens[tokens.state == state])
        ax.set_title(state, fontsize=9, pad=14)
        ax.set_ylabel("logits", fontsize=9)
    axes[-1, 0].set_xlabel("token of the text")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return fig


def tree_on(ax: Axes, lines: pd.DataFrame, leaves: int) -> None:
    """A tree of additions; those that only this tree makes are orange, thick and dashed. lines: x0, y0, x1, y1, own."""
    for own, colour, width, dashes in ((False, OTHERS, 1.0, "-"), (True, WATCHED, 2.0, (0, (4, 1.2)))):
        part = lines[lines.own == own]
        ends = np.stack([part[["x0", "y0"]].to_numpy(float), part[["x1", "y1"]].to_numpy(float)], axis=1)
        ax.add_collection(LineCollection(ends, colors=colour, linewidths=width, linestyles=[dashes]))
    top = lines[["y0", "y1"]].to_numpy().max() if len(lines) else 1
    ax.set(xlim=(-0.7, leaves - 0.3), ylim=(-0.03 * top, 1.05 * top))
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.grid(visible=False)


@drawn
def tree_pairs(lines: pd.DataFrame) -> Figure:
    """A row a pair of trees. lines: pair, tree, leaves, and the columns of ``tree_on``."""
    pairs = list(dict.fromkeys(lines.pair))
    fig, axes = plt.subplots(len(pairs), 2, figsize=(7.2, 2.1 * len(pairs) + 0.4), squeeze=False)
    for row, pair in zip(axes, pairs):
        part = lines[lines.pair == pair]
        for ax, tree in zip(row, dict.fromkeys(part.tree)):
            one = part[part.tree == tree]
            tree_on(ax, one, int(one.leaves.iloc[0]))
            ax.set_title(tree, fontsize=9)
    fig.supxlabel("terms, in the order that each tree takes them", fontsize=10)
    fig.supylabel("additions above it", fontsize=10)
    return fig
