"""The figures of notebook 00: how often something depends on its batch, and what it costs that nothing does."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..drawings import drawn

_LOOK = {"default": ("#D55E00", "o"), "invariant": ("#0072B2", "s")}


@drawn
def rates(table: pd.DataFrame) -> Figure:
    """table: `studies.index.rates`. Share that differs from the same alone, with exact intervals."""
    fig, ax = plt.subplots(figsize=(7.2, 0.42 * max(len(table), 2) + 1.1))
    place = np.arange(len(table))[::-1]
    share = table.events / table.trials
    for dispatch, (colour, marker) in _LOOK.items():
        mine = (table.dispatch == dispatch).to_numpy()
        error = [(share - table.low)[mine], (table.high - share)[mine]]
        ax.errorbar(
            share[mine],
            place[mine],
            xerr=error,
            fmt=marker,
            color=colour,
            capsize=3,
            clip_on=False,
            label=f"{dispatch} dispatch",
        )
    for y, row in zip(place, table.itertuples()):
        ax.annotate(
            f"{row.events:,} of {row.trials:,}", (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8
        )
    ax.set_yticks(place, table.subject, fontsize=9)
    # Shares of a few in a hundred and of nearly all stand on one axis: its root keeps both apart from zero.
    ax.set_xscale("function", functions=(lambda x: np.sqrt(np.clip(x, 0, None)), np.square))
    ax.set_xticks([0, 0.01, 0.05, 0.2, 0.5, 1], ["0", "1%", "5%", "20%", "50%", "100%"])
    ax.set(xlim=(0, 1), ylim=(-0.7, max(len(table), 1) - 0.3))
    ax.set_xlabel("share that differs from the same alone (95% interval; square-root axis)")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


@drawn
def costs(table: pd.DataFrame) -> Figure:
    """table: `studies.index.costs`. Time over the default's: geometric mean, and the range over configurations."""
    fig, ax = plt.subplots(figsize=(7.2, 0.5 * max(len(table), 2) + 0.9))
    place = np.arange(len(table))[::-1]
    ax.hlines(place, table.least, table.most, color="#9AB7CC", linewidth=5)
    ax.plot(table.cost, place, "o", color="#0072B2")
    for y, row in zip(place, table.itertuples()):
        ax.annotate(
            f"{row.cost:.2f}", (row.cost, y), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9
        )
    ax.axvline(1, color="#333333", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_yticks(place, [f"{row.benchmark}, {row.kernel}\n{row.policy}" for row in table.itertuples()], fontsize=9)
    ax.set(
        ylim=(-0.6, max(len(table), 1) - 0.4),
        xlabel="time over the default's (dot: geometric mean; bar: all configurations)",
    )
    return fig
