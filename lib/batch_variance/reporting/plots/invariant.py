"""The figures of notebook 05: bits over row counts by class, trees as brackets, errors, and recorded costs."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ..drawings import drawn

_CLASS_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F", "#F0E442"]


@drawn
def class_map(frame: pd.DataFrame, title: str = "") -> Figure:
    """frame: `studies.invariant.bit_classes`. A line a candidate, a cell a row count; one colour a class within a
    line, the first blue."""
    names = list(dict.fromkeys(frame.candidate))
    sizes = sorted(frame.m.unique())
    cells = np.full((len(names), len(sizes)), np.nan)
    for place, name in enumerate(names):
        mine = frame[frame.candidate == name].set_index("m").bit_class
        seen = {value: number for number, value in enumerate(dict.fromkeys(mine.sort_index()))}
        for column, m in enumerate(sizes):
            if m in mine.index:
                cells[place, column] = seen[mine[m]] % len(_CLASS_COLOURS)
    fig, ax = plt.subplots(figsize=(7.2, 0.9 + 0.42 * len(names)))
    ax.imshow(
        np.ma.masked_invalid(cells),
        aspect="auto",
        cmap=ListedColormap(_CLASS_COLOURS),
        vmin=-0.5,
        vmax=len(_CLASS_COLOURS) - 0.5,
    )
    for place in range(len(names)):
        for column in range(len(sizes)):
            if not np.isnan(cells[place, column]):
                ax.text(
                    column, place, int(cells[place, column]) + 1, ha="center", va="center", color="white", fontsize=7
                )
    shown = range(0, len(sizes), max(1, len(sizes) // 16))
    ax.set(
        yticks=range(len(names)),
        yticklabels=names,
        xticks=list(shown),
        xticklabels=[sizes[i] for i in shown],
        xlabel="rows (number in a cell: the class, in order of appearance)",
        title=title,
    )
    ax.tick_params(axis="x", labelrotation=60, labelsize=8)
    ax.grid(False)
    return fig


@drawn
def trees(edges: pd.DataFrame) -> Figure:
    """edges: `studies.invariant.tree_edges`. Additions as brackets over the terms, each at the step at which it can
    happen."""
    panels = list(edges.groupby("panel", sort=False))
    fig, axes = plt.subplots(len(panels), 1, figsize=(7.2, 1.9 * len(panels)), squeeze=False, sharex=True)
    for ax, (name, part) in zip(axes[:, 0], panels):
        for edge in part.itertuples():
            ax.plot(
                [edge.x, edge.child_x, edge.child_x], [edge.step, edge.step, edge.child_step], color="C0", linewidth=0.9
            )
        ax.set(title=name, ylabel="additions so far")
        ax.title.set_fontsize(10)
        ax.grid(False)
    axes[-1, 0].set_xlabel("terms, in the order in which each tree takes them")
    return fig


@drawn
def errors(frame: pd.DataFrame) -> Figure:
    """frame: `studies.invariant.errors`. Relative error against float64 by dtype and kernel."""
    fig, ax = plt.subplots(figsize=(6.4, 2.6))
    kernels, dtypes = list(dict.fromkeys(frame.kernel)), list(dict.fromkeys(frame.dtype))
    for number, kernel in enumerate(kernels):
        mine = frame[frame.kernel == kernel].set_index("dtype").error[dtypes]
        place = np.arange(len(dtypes)) + (number - (len(kernels) - 1) / 2) * 0.25
        ax.barh(place, mine, height=0.22, label=kernel if kernel != "coarse" else "one rounding more (control)")
    ax.set(yticks=range(len(dtypes)), yticklabels=dtypes, xscale="log", xlabel="relative error against float64")
    ax.legend(fontsize=8)
    return fig


@drawn
def ratios(frame: pd.DataFrame, default: str, goal: float | None = None) -> Figure:
    """frame: `studies.invariant.recorded_ratios`. Time over the default's against rows, a line a shape; goal: a ratio
    that no point should exceed."""
    fig, ax = plt.subplots(figsize=(7.2, 3.2))
    colors = len(plt.rcParams["axes.prop_cycle"])
    for number, ((shape, part), marker) in enumerate(zip(frame.groupby("shape", sort=False), "osD^vP*X")):
        part = part.sort_values("m")
        ax.plot(part.m, part.ratio, "-" if number < colors else ":", marker=marker, markersize=5, label=shape)
    ax.axhline(1, color="#7F7F7F", linewidth=1)
    if goal is not None:
        ax.axhline(goal, color="#7F7F7F", linewidth=1, linestyle="--", label=f"goal for every point: {goal:g}")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set(xlabel="rows", ylabel=f"time over {default}'s")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return fig


@drawn
def times_and_limit(frame: pd.DataFrame, default: str) -> Figure:
    """frame: `studies.invariant_costs.against_limit`. Microseconds against rows, a panel a shape: default, invariant,
    and the device's limit."""
    panels = list(frame.groupby("shape", sort=False))
    lines = -(-len(panels) // 2)
    fig, axes = plt.subplots(lines, 2, figsize=(7.2, 2.3 * lines), squeeze=False, sharex=True)
    for ax, (shape, part) in zip(axes.flat, panels):
        part = part.sort_values("m")
        ax.plot(part.m, part.limit, color="#7F7F7F", linewidth=1, linestyle="--", label="limit")
        ax.plot(part.m, part.default, "-o", color="#E69F00", markersize=4, label=default)
        ax.plot(part.m, part.invariant, "-s", color="#0072B2", markersize=4, label="invariant")
        ax.set(title=f"weight {shape}")
        ax.title.set_fontsize(10)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: "")
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("rows")
    for ax in axes[:, 0]:
        ax.set_ylabel("microseconds")
    axes[0, 0].legend(fontsize=8)
    return fig


@drawn
def peak_shares(frame: pd.DataFrame) -> Figure:
    """frame: `studies.profile.shares`. Percent of the peak, a panel a unit, a line a point: the default's bar above
    the invariant kernel's."""
    points, units = list(dict.fromkeys(frame.point)), list(dict.fromkeys(frame.unit))
    fig, axes = plt.subplots(1, len(units), figsize=(9, 0.9 + 0.42 * len(points)), sharey=True, squeeze=False)
    places = np.arange(len(points))
    for ax, unit in zip(axes[0], units):
        mine = frame[frame.unit == unit].set_index("point").loc[points]
        ax.barh(places - 0.19, 100 * mine.default, height=0.36, color="#E69F00", label="default")
        ax.barh(places + 0.19, 100 * mine.invariant, height=0.36, color="#0072B2", label="invariant")
        labels = [point.replace(", ", "\n", 1) for point in points]
        ax.set(xlim=(0, 100), xlabel="% of peak", yticks=places, yticklabels=labels)
        ax.set_title(unit, fontsize=10)
    axes[0, 0].invert_yaxis()
    axes[0, 0].tick_params(axis="y", labelsize=8)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    return fig
