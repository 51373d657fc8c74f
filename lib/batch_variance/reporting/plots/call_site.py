"""The figures of notebook 06: faults found by axis, verdicts by site, ULP distances, and bit classes by batch size."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ..drawings import drawn

_AXES = ("rerun", "contents", "composition", "solo", "position", "padding", "tail")
_SIGN = {"invariant": 0, "inconclusive": 1, "variant": 2}
_MARK = {"invariant": "=", "inconclusive": "?", "variant": "≠"}
_COLOURS = ListedColormap(["#D6E6F2", "#EDEDED", "#E69F00"])


@drawn
def zoo_matrix(zoo: pd.DataFrame) -> Figure:
    """zoo: `studies.call_site.zoo`. Verdict by kernel and axis, the most frequent one, with how many instances gave
    it.
    """
    top = zoo.sort_values("instances", ascending=False, kind="stable").drop_duplicates(["kernel", "axis"])
    kernels = list(dict.fromkeys(zoo["kernel"]))
    return _verdict_grid(top.assign(row=top["kernel"], words=top["instances"].astype(str)), kernels, _AXES, 0.42)


@drawn
def verdict_matrix(verdicts: pd.DataFrame) -> Figure:
    """verdicts: `studies.call_site.session_verdicts`. Verdict by site and axis, with rows that differ of rows
    checked.
    """
    words = verdicts["rows_differ"].astype(str) + "/" + verdicts["rows_checked"].astype(str)
    axes = [axis for axis in _AXES if axis in set(verdicts["axis"])]
    return _verdict_grid(
        verdicts.assign(row=verdicts["site"], words=words), list(dict.fromkeys(verdicts["site"])), axes, 0.55
    )


def _verdict_grid(table: pd.DataFrame, rows: list, columns: list, height: float) -> Figure:
    fig, ax = plt.subplots(figsize=(7.2, height * len(rows) + 1.1))
    grid = np.full((len(rows), len(columns)), np.nan)
    for cell in table.itertuples():
        y, x = rows.index(cell.row), list(columns).index(cell.axis)
        grid[y, x] = _SIGN[cell.verdict]
        ax.text(x, y, f"{_MARK[cell.verdict]} {cell.words}", ha="center", va="center", fontsize=9)
    ax.imshow(grid, cmap=_COLOURS, vmin=0, vmax=2, aspect="auto")
    ax.set(xticks=range(len(columns)), xticklabels=columns, yticks=range(len(rows)), yticklabels=rows)
    ax.xaxis.tick_top()
    ax.grid(False)
    ax.tick_params(length=0)
    ax.set_xlabel("= invariant     ? inconclusive     ≠ variant")
    for side in ax.spines.values():
        side.set_visible(False)
    return fig


@drawn
def ulp_distribution(distribution: pd.DataFrame) -> Figure:
    """distribution: `studies.call_site.ulp_distribution`. Elements by ULP distance (power-of-two buckets), a line an
    axis.
    """
    fig, ax = plt.subplots(figsize=(7.2, 3.2))
    styles = ("-", "--", ":", "-.", "-", "--")
    for style, (axis, part) in zip(styles, distribution.groupby("axis", sort=False)):
        part = part.sort_values("ulp_from")
        ax.plot(part["ulp_from"].clip(lower=0.5), part["elements"], style, marker="o", markersize=4, label=axis)
    if distribution.empty:
        ax.annotate("no element differs on any axis", (0.5, 0.5), xycoords="axes fraction", ha="center")
    else:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7)
        ax.legend(title="axis", loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set(xlabel="ULP distance (lower end of the bucket)", ylabel="elements that differ")
    return fig


@drawn
def size_map(table: pd.DataFrame) -> Figure:
    """table: `studies.call_site.size_map`. Operation by batch size, coloured and numbered by bit class; class 0 is
    the row alone.
    """
    fig, ax = plt.subplots(figsize=(7.2, 0.34 * max(len(table), 1) + 1.3))
    if table.empty:
        ax.annotate(
            "no operation changes its bits with the batch size", (0.5, 0.5), xycoords="axes fraction", ha="center"
        )
        ax.set_axis_off()
        return fig
    classes = int(np.nanmax(table.to_numpy())) + 1
    ax.imshow(
        table.to_numpy(),
        cmap=plt.get_cmap("cividis", max(classes, 2)),
        vmin=-0.5,
        vmax=max(classes, 2) - 0.5,
        aspect="auto",
    )
    for y, row in enumerate(table.to_numpy()):
        for x, value in enumerate(row):
            if not np.isnan(value):
                ax.text(
                    x,
                    y,
                    f"{int(value)}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if value < classes / 2 else "black",
                )
    ax.set(
        xticks=range(table.shape[1]),
        xticklabels=table.columns,
        yticks=range(len(table)),
        yticklabels=table.index,
        xlabel="rows in the batch (M)",
    )
    ax.tick_params(axis="y", labelsize=8, length=0)
    ax.grid(False)
    return fig


@drawn
def introducing(operations: pd.DataFrame) -> Figure:
    """operations: the audit's kinds of operation. Calls that introduce a difference, or pass one on, by kind; most
    first.
    """
    part = (
        operations[operations["solo"] > 0]
        .sort_values(["introduces", "propagates"], ascending=False)
        .head(14)
        .iloc[::-1]
    )
    fig, ax = plt.subplots(figsize=(7.2, 0.32 * max(len(part), 2) + 1.0))
    names = (
        part["phase"]
        + " · "
        + part["module"].str.replace("model.layers.*.", "", regex=False)
        + " · "
        + part["op"].str.removeprefix("_")
    )
    ax.barh(names, part["introduces"], color="C1", label="introduces")
    ax.barh(
        names,
        part["propagates"],
        left=part["introduces"],
        color="C5",
        hatch="//",
        edgecolor="white",
        label="only propagates",
    )
    ax.set(xlabel="calls of the operation")
    ax.tick_params(axis="y", labelsize=8)
    ax.legend(loc="lower right")
    return fig


@drawn
def threads(table: pd.DataFrame) -> Figure:
    """table: `studies.call_site.attention_by_threads`. Different results among equal rows, by cache length and thread
    count.
    """
    fig, ax = plt.subplots(figsize=(7.2, 2.6))
    counts = sorted(table["threads"].unique())
    for k, count in enumerate(counts):
        part = table[table["threads"] == count]
        ax.bar(
            np.arange(len(part)) + (k - (len(counts) - 1) / 2) * 0.35,
            part["classes"],
            0.32,
            label=f"{count} thread{'s' if count > 1 else ''}",
            hatch="//" * k,
        )
    lengths = table.loc[table["threads"] == counts[0], "length"]
    ax.set(xticks=range(len(lengths)), xticklabels=lengths, xlabel="keys attended to", ylabel="different results")
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.legend()
    return fig
