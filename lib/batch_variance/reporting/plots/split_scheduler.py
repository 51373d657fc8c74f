"""Figures of notebook 02: schedules as bars on SM parts, split counts, reduction trees, ULP histograms, costs."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..drawings import drawn

_NAMES = {"flashmla": "FlashMLA (batch-wide)"}


def _name(schedule: str) -> str:
    return _NAMES.get(schedule, f"own length: {schedule}")


@drawn
def gantt(frames: dict[str, pd.DataFrame], watched_row: int) -> Figure:
    """SM parts against time for each schedule (frames of ``studies.split_scheduler.gantt``), the watched row orange."""
    fig, axes = plt.subplots(1, len(frames), figsize=(4.6 * len(frames), 4.4), sharex=True, sharey=True, squeeze=False)
    for ax, (schedule, frame) in zip(axes[0], frames.items()):
        rows = max(int(frame.row.max()), 1)
        colours = ["#E69F00" if row == watched_row else plt.cm.Blues(0.35 + 0.55 * row / rows) for row in frame.row]
        ax.barh(
            frame.part,
            frame.stop - frame.start,
            left=frame.start,
            height=0.9,
            color=colours,
            edgecolor="white",
            linewidth=0.3,
        )
        ax.set(title=_name(schedule), xlabel="time (blocks, overhead included)")
    axes[0][0].set_ylabel("SM part")
    axes[0][-1].legend(
        handles=[Patch(color="#E69F00", label="watched row"), Patch(color=plt.cm.Blues(0.6), label="other rows")],
        loc="lower right",
    )
    axes[0][0].invert_yaxis()
    return fig


@drawn
def split_counts(frame: pd.DataFrame, against: str, label: str) -> Figure:
    """Split count of one row against batch size or a neighbour's length, a line a schedule."""
    fig, ax = plt.subplots()
    for (schedule, part), style in zip(frame.groupby("schedule", sort=False), ("-o", "--s")):
        ax.plot(part[against], part.splits, style, markersize=4, label=_name(schedule))
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    ax.set(xlabel=label, ylabel="splits of the watched row")
    ax.legend()
    return fig


@drawn
def trees(frame: pd.DataFrame) -> Figure:
    """The watched row's pieces, left to right, one bar a case: what is summed first, before the pieces are folded in
    order."""
    cases = list(frame.groupby(["schedule", "where"], sort=False))
    fig, ax = plt.subplots(figsize=(7.2, 0.7 * len(cases) + 1.2))
    for height, ((schedule, where), part) in enumerate(cases):
        shades = [plt.cm.cividis(0.25 + 0.6 * (i % 2)) for i in part.piece]
        ax.barh(
            height,
            part.end_block - part.begin_block,
            left=part.begin_block,
            height=0.6,
            color=shades,
            edgecolor="white",
        )
    ax.set_yticks(
        range(len(cases)), [f"{_name(s)}\n{w}: {len(part)} piece{'s' * (len(part) > 1)}" for (s, w), part in cases]
    )
    ax.invert_yaxis()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("block of the row's KV cache")
    ax.grid(axis="y", visible=False)
    return fig


@drawn
def ulp_histogram(frame: pd.DataFrame, upper: str = "ulp_to") -> Figure:
    """Share of values by ULP distance, solo against batch; the frame has one row a bin (and a schedule, where there
    are several)."""
    fig, ax = plt.subplots()
    groups = list(frame.groupby("schedule", sort=False)) if "schedule" in frame else [("flashmla", frame)]
    width = 0.8 / len(groups)
    for number, (schedule, part) in enumerate(groups):
        if upper == "ulp_to":
            labels = [_bin(low, high) for low, high in zip(part.ulp_from, part.ulp_to)]
        else:
            labels = [value if value == "0" else f"≤ {value}" for value in part[upper]]
        place = np.arange(len(part)) + (number - (len(groups) - 1) / 2) * width
        ax.bar(place, part["values"] / part["values"].sum(), width, label=_name(schedule))
        ax.set_xticks(range(len(part)), [label.replace("≤ more", "> 1024") for label in labels])
    ax.set_yscale("log")
    ax.set(xlabel="ULP distance of a bfloat16 value, row alone against row in the batch", ylabel="share of values")
    ax.legend()
    return fig


def _bin(low: float, high: float) -> str:
    if high == np.inf:
        return f"≥ {low:g}"
    return f"{low:g}" if high - low == 1 else f"{low:g} to {high - 1:g}"


@drawn
def errors(frame: pd.DataFrame) -> Figure:
    """Error against float64 of each row that differs: alone on one axis, in the batch on the other."""
    fig, ax = plt.subplots(figsize=(4.8, 4.4))
    moved = frame[frame.solo_differs]
    ax.scatter(moved.error_solo, moved.error_batch, s=18)
    both = pd.concat([moved.error_solo, moved.error_batch])
    ax.plot([both.min(), both.max()], [both.min(), both.max()], color="#7F7F7F", linewidth=1, label="equal error")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(lambda value, _: f"{value:.3%}")
    ax.set(xlabel="relative error, row alone", ylabel="relative error, row in the batch")
    ax.legend()
    return fig


@drawn
def costs(frame: pd.DataFrame, policies: list[str]) -> Figure:
    """Geometric mean over shapes of time over the default's, against batch size, a line a policy."""
    fig, ax = plt.subplots()
    for policy, marker in zip(policies, "osD^vP*X"):
        part = frame[frame.policy == policy]
        means = np.exp(np.log(part.ratio).groupby(part.m).mean())
        ax.plot(means.index, means, f"-{marker}", markersize=5, label=policy.removeprefix("invariant-"))
    ax.axhline(1, color="#7F7F7F", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set(xlabel="rows in the batch", ylabel="time over the default schedule's")
    ax.legend(ncols=2)
    return fig
