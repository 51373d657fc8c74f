"""The figures of notebook 01: texts on the reader's CPU, rows per matmul, variants by policy, what the difference is made of."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..drawings import drawn

_POLICY_ORDER = ("default", "round-activations", "round-activations-exact-weights", "force-gemm", "force-gemv")


@drawn
def native_conditions(summary: pd.DataFrame) -> Figure:
    """summary: `studies.row_threshold.native_summary`. Texts that changed between alone and together, with intervals."""
    fig, (texts, bits) = plt.subplots(1, 2, figsize=(7.2, 2.6), sharey=True)
    labels = [f"{row.dtype}\noneDNN {row.oneDNN}" for row in summary.itertuples()]
    place = np.arange(len(summary))[::-1]
    share = summary["texts changed"] / summary.texts
    texts.barh(place, share, color="C0", height=0.55)
    texts.errorbar(share, place, xerr=[share - summary.low, summary.high - share], fmt="none", ecolor="#333333", capsize=3)
    for y, (changed, count) in zip(place, zip(summary["texts changed"], summary.texts)):
        texts.annotate(f"{changed} of {count}", (0.98, y + 0.33), ha="right", va="bottom", fontsize=9)
    texts.set(xlim=(0, 1), xlabel="share of texts that changed", yticks=place, yticklabels=labels, title="Text")
    moved = summary["margins moved"] / summary["tokens compared"].clip(lower=1)
    bits.barh(place, moved, color="C1", height=0.55)
    bits.set(xlim=(0, 1), xlabel="share of tokens whose margin moved", title="Bits")
    for ax in (texts, bits):
        ax.set_ylim(-0.6, len(summary) - 0.2)
    return fig


def rows_per_ffn(matmuls: pd.DataFrame, threshold: int, label: str = "", policy: str = "default") -> Figure:
    """label names the model. matmuls: `Results.matmuls`. How many rows the FFNs of a policy ran on, by concurrency and origin of the rows."""
    part = matmuls[matmuls.policy == policy]
    return _rows_by_origin(part.groupby(["concurrency", "rows", "decode_rows"], as_index=False).ffns.sum(), threshold, label)


@drawn
def _rows_by_origin(part: pd.DataFrame, threshold: int, label: str) -> Figure:
    """part: FFNs run by concurrency, rows and decode rows among them."""
    levels = sorted(part.concurrency.unique())
    fig, axes = plt.subplots(len(levels), 1, figsize=(7.2, 1.5 * len(levels) + 0.9), sharex=True, squeeze=False)
    edges = np.arange(0, max(part.rows.max(), threshold) + 9, 4) + 0.5
    for ax, level in zip(axes[:, 0], levels):
        cell = part[part.concurrency == level]
        kinds = {
            "decode rows only": cell.decode_rows == cell.rows, "prefill rows only": cell.decode_rows == 0,
            "decode and prefill rows together": (cell.decode_rows > 0) & (cell.decode_rows < cell.rows),
        }
        ax.hist([cell.rows[m] for m in kinds.values()], bins=edges, weights=[cell.ffns[m] for m in kinds.values()],
                label=list(kinds), color=["C0", "C1", "C2"], histtype="step", linewidth=1.8)
        ax.axvline(threshold + 0.5, color="#333333", linestyle="--", linewidth=1.2)
        ax.set_yscale("log")
        ax.set_ylabel("FFNs run")
        ax.set_title(f"concurrency {level}", fontsize=10)
    axes[0, 0].annotate(f"GEMV up to {threshold} rows", (threshold, 0.86), xycoords=("data", "axes fraction"), ha="right", fontsize=9)
    axes[0, 0].annotate("GEMM above", (threshold + 1.5, 0.86), xycoords=("data", "axes fraction"), ha="left", fontsize=9)
    axes[-1, 0].set_xlabel("rows of the matmul")
    handles, labels = axes[-1, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=3)
    axes[0, 0].set_title(f"{label}\nconcurrency {levels[0]}" if label else f"concurrency {levels[0]}", fontsize=10)
    return fig


@drawn
def variants_by_policy(table: pd.DataFrame, label: str = "") -> Figure:
    """label names the model. table: `studies.row_threshold.variants`. Share of requests whose text differs from the same prompt alone."""
    levels = sorted(table.concurrency.unique())
    names = [name for name in _POLICY_ORDER if name in set(table.policy)]
    fig, axes = plt.subplots(1, len(levels), figsize=(7.2, 0.42 * len(names) + 1.5), sharey=True, sharex=True, squeeze=False)
    for ax, level in zip(axes[0], levels):
        for run, shift, marker, colour in (("A", 0.12, "o", "C0"), ("B", -0.12, "s", "C1")):
            cell = table[(table.concurrency == level) & (table.run == run)].set_index("policy").reindex(names)
            share = cell["differ from alone"] / cell.requests
            y = np.arange(len(names))[::-1] + shift
            error = [(share - cell.low).clip(lower=0), (cell.high - share).clip(lower=0)]
            ax.errorbar(share, y, xerr=error, fmt=marker, color=colour, capsize=2, label=f"run {run}", markersize=5)
        count = int(table[(table.concurrency == level) & (table.run == "A")].requests.iloc[0])
        ax.set_title(f"concurrency {level}\n{count} requests a run", fontsize=10)
        ax.set_xlim(-0.04, 1.04)
        ax.set_yticks(np.arange(len(names))[::-1], names)
    fig.supxlabel("share of requests whose text differs from the prompt served alone", fontsize=11)
    axes[0, 0].legend(loc="lower right")
    fig.suptitle(label, fontsize=10)
    return fig


@drawn
def decomposition(frame: pd.DataFrame, label: str = "") -> Figure:
    """label names the model. frame: `studies.row_threshold.decompose`. Each difference alone on, alone off: distance to the GEMV's output."""
    steps = list(dict.fromkeys(frame.step))
    fig, ax = plt.subplots(figsize=(7.2, 0.36 * len(steps) + 1.1))
    place = np.arange(len(steps))[::-1]
    floor = 1e-9
    for y, step in zip(place, steps):
        values = frame[frame.step == step].relative_difference
        shown = values.clip(lower=floor)
        colour = "C0" if step.startswith("only") else "C1" if step.startswith("all but") else "C6"
        ax.plot(shown, np.full(len(shown), y), "o", color=colour, alpha=0.45, markersize=4)
        ax.plot([shown.median()], [y], "|", color="#222222", markersize=15, markeredgewidth=2)
        ax.annotate("0" if values.max() == 0 else f"{values.median():.1e}", (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    ax.set_xscale("log")
    ax.set(yticks=place, yticklabels=steps, xlabel="size of the difference to the GEMV's output, relative to the output; one point a layer",
           xlim=(floor / 2, 1e-2))
    fig.suptitle(label, fontsize=10)
    return fig
