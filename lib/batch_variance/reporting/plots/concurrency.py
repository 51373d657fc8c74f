"""The figures of notebook 03: texts, bits, margins and first divergences by concurrency, prediction, and parity.

Every function takes small tidy frames, so that a figure's data can be kept beside it.
"""

import html

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..drawings import drawn


def _colours(levels) -> dict:
    """A colour a concurrency, dark to light; the lightest tones are left out."""
    levels = list(levels)
    return dict(zip(levels, plt.get_cmap("cividis")(np.linspace(0.0, 0.85, max(len(levels), 2)))))


def _by_doubling(ax, levels) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(levels), [str(level) for level in levels])
    ax.minorticks_off()
    ax.set_xlabel("concurrency")


def _note(ax, text: str) -> None:
    ax.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color="#555555")


@drawn
def outputs(table: pd.DataFrame, pairs: pd.DataFrame, label: str = "") -> Figure:
    """table: `studies.concurrency_tables.outputs`; pairs: `studies.concurrency_tables.pairs`. Changed texts, and rows
    that shared a
    step.
    """
    fig, (texts, rows) = plt.subplots(1, 2, figsize=(7.2, 3.2), width_ratios=(2, 1))
    for run, shift, marker, colour in (("A", 0.97, "o", "C0"), ("B", 1.03, "s", "C1")):
        part = table[table.run == run]
        share = part["differ from alone"] / part.requests
        texts.errorbar(
            part.concurrency * shift,
            share,
            yerr=[share - part.low, part.high - share],
            fmt=marker,
            color=colour,
            capsize=2,
            markersize=5,
            label=f"run {run} against alone",
        )
    share = pairs["differ between A and B"] / pairs.requests
    texts.errorbar(
        pairs.concurrency,
        share,
        yerr=[share - pairs.low, pairs.high - share],
        fmt="D-",
        color="C2",
        capsize=2,
        markersize=4,
        linewidth=1,
        label="run A against run B",
    )
    texts.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    texts.set(ylabel="requests whose text differs", ylim=(-0.02, None), title="Texts")
    mean = table.groupby("concurrency")["co-resident rows"].mean()
    rows.plot(mean.index, mean, "o-", color="C3")
    rows.plot(mean.index, mean.index, color="#777777", linewidth=1, linestyle="--", label="concurrency")
    rows.set_yscale("log", base=2)
    rows.yaxis.set_major_formatter("{x:g}")
    rows.set(title="Co-resident rows", ylabel="rows a step, mean")
    for ax in (texts, rows):
        _by_doubling(ax, table.concurrency.unique())
    fig.legend(
        *(a + b for a, b in zip(texts.get_legend_handles_labels(), rows.get_legend_handles_labels())),
        loc="outside upper center",
        ncols=4,
        fontsize=9,
        title=label,
        title_fontsize=10,
    )
    return fig


@drawn
def ulp_distribution(values: pd.DataFrame, label: str = "") -> Figure:
    """values: `studies.concurrency_tables.ulp_shares`. Share of values further than x row-scaled ULP from the same
    position
    alone.
    """
    kinds = list(dict.fromkeys(values.kind))
    fig, axes = plt.subplots(1, len(kinds), figsize=(7.2, 3.2), sharey=True, squeeze=False)
    colours = _colours(sorted(values.concurrency.unique()))
    for ax, kind in zip(axes[0], kinds):
        for level, part in values[values.kind == kind].groupby("concurrency"):
            seen = part[part.further > 0]
            if len(seen):
                ax.plot(seen.ulp.where(seen.ulp > 0, 2.0**-9), seen.further, color=colours[level], label=f"{level}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set(title=kind, xlabel="row-scaled ULP")
        if not ax.lines:
            _note(ax, "no value differs")
    axes[0, 0].set_ylabel("share of values further apart")
    handles, names = max((ax.get_legend_handles_labels() for ax in axes[0]), key=lambda found: len(found[0]))
    if handles:
        fig.legend(handles, names, title="concurrency", loc="outside right center", fontsize=9)
    fig.suptitle(label, fontsize=10)
    return fig


@drawn
def margins(curves: pd.DataFrame, ratios: pd.DataFrame, label: str = "") -> Figure:
    """curves: `studies.concurrency_tables.margin_curves`; ratios: `studies.spans.median_ratio`. Margins of all
    positions
    alone and
    in batches, and alone at first divergences; the median's ratio by concurrency."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2), width_ratios=(3, 2))
    styles = {
        "all positions, alone": ("#222222", "-", 2.6),
        "all positions, largest concurrency": ("C5", "--", 1.8),
        "first divergences, alone": ("C1", "-", 1.8),
        "first divergences, in the batch": ("C3", ":", 2.2),
    }
    for name, (colour, line, width) in styles.items():
        part = curves[curves.which == name]
        if len(part):
            left.step(
                part.margin,
                part.share,
                where="post",
                color=colour,
                linestyle=line,
                linewidth=width,
                label=f"{name} ({part.count_.iloc[0]:,})",
            )
    left.set_xscale("symlog", linthresh=0.01)
    left.set(
        xlabel="margin (top-1 minus top-2 logit)", ylabel="share of positions up to it", ylim=(0, 1.02), title="Margins"
    )
    right.errorbar(
        ratios.concurrency,
        ratios.ratio,
        yerr=[(ratios.ratio - ratios.low).clip(lower=0), (ratios.high - ratios.ratio).clip(lower=0)],
        fmt="o",
        color="C0",
        capsize=2,
    )
    right.axhline(1, color="#777777", linewidth=1, linestyle="--")
    low, high = right.get_ylim()
    right.set_ylim(min(low, 0.9), max(high, 1.1))
    right.set(ylabel="in the batch over alone", title="Median, same places")
    _by_doubling(right, ratios.concurrency)
    fig.legend(
        *left.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2,
        fontsize=9,
        title=label,
        title_fontsize=10,
    )
    return fig


@drawn
def survival(curves: pd.DataFrame, spans: pd.DataFrame, label: str = "") -> Figure:
    """curves: `studies.spans.survival`; spans: `studies.concurrency_tables.second_span_curve`. Texts still with the
    text
    alone, and
    how long they agree again."""
    fig, (first, second) = plt.subplots(1, 2, figsize=(7.2, 3.2), width_ratios=(3, 2))
    colours = _colours(sorted(curves.concurrency.unique()))
    for level, part in curves.groupby("concurrency"):
        first.step(part.tokens, part.share, where="post", color=colours[level], label=f"{level}")
        first.fill_between(part.tokens, part.low, part.high, step="post", color=colours[level], alpha=0.12, linewidth=0)
    first.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    first.set(xlabel="tokens generated", ylabel="requests not yet diverged", title="First divergence")
    first.set_ylim(min(first.get_ylim()[0], 0.9), 1.01)
    first.legend(title="concurrency", fontsize=8, title_fontsize=9, loc="lower left", ncols=2)
    if len(spans):
        second.step(spans.tokens, spans.share, where="post", color="C1")
        second.fill_between(spans.tokens, spans.low, spans.high, step="post", color="C1", alpha=0.15, linewidth=0)
    else:
        _note(second, "no text diverged")
    second.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    second.set(
        xlabel="tokens after the first that differs",
        ylabel="texts that still agree",
        ylim=(0, 1.02),
        title="Second span",
    )
    fig.suptitle(label, fontsize=10)
    return fig


@drawn
def candidates(split: pd.DataFrame, label: str = "") -> Figure:
    """split: `studies.concurrency.Pair.candidates`. Both candidates' logits where one text parts, alone and in
    the batch.
    """
    fig, ax = plt.subplots(figsize=(7.2, 2.2))
    places = {name: y for y, name in enumerate(dict.fromkeys(split.served))}
    for (token, part), colour, marker in zip(split.groupby("token", sort=False), ("C0", "C1"), "os"):
        y = part.served.map(places) + (0.08 if marker == "o" else -0.08)
        ax.plot(part.logit, y, marker, color=colour, markersize=9, label=repr(token))
    for name, part in split.groupby("served", sort=False):
        ax.plot(part.logit, [places[name]] * len(part), color="#999999", linewidth=1, zorder=1)
        best = part.loc[part.chosen, "token"]
        ax.annotate(
            f"says {best.iloc[0]!r}" if len(best) else "says a third token",
            (1.01, places[name]),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
        )
    ax.set(yticks=list(places.values()), yticklabels=list(places), ylim=(len(places) - 0.5, -0.5), xlabel="logit")
    fig.legend(loc="outside upper center", ncols=2, fontsize=9, title=label, title_fontsize=10)
    return fig


@drawn
def predicted_and_observed(levels: pd.DataFrame, label: str = "") -> Figure:
    """levels: `studies.prediction.by_concurrency` with a column model. Share diverged by token: predicted and
    observed.
    """
    shown = [level for level in sorted(levels.concurrency.unique()) if level > 1]
    columns = min(len(shown), 3) or 1
    rows = -(-len(shown) // columns) or 1
    fig, axes = plt.subplots(rows, columns, figsize=(7.2, 1.9 * rows + 0.7), sharex=True, sharey=True, squeeze=False)
    names = list(dict.fromkeys(levels.model))
    for ax, level in zip(axes.flat, shown):
        for name, colour, line in zip(names, ("C5", "C0", "C1"), (":", "--", "-.")):
            part = levels[(levels.concurrency == level) & (levels.model == name)]
            ax.plot(part.position + 1, part.predicted, color=colour, linestyle=line, label=f"predicted, {name}")
        ax.step(part.position + 1, part.observed, where="post", color="#222222", label="observed")
        ax.set_title(f"concurrency {level}", fontsize=10)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for ax in axes.flat[len(shown) :]:
        ax.set_visible(False)
    fig.supxlabel("tokens generated", fontsize=11)
    fig.supylabel("requests diverged", fontsize=11)
    handles, texts = axes.flat[0].get_legend_handles_labels()
    if handles:
        fig.legend(handles, texts, loc="outside upper center", ncols=2, fontsize=9, title=label, title_fontsize=10)
    return fig


@drawn
def calibration(bins: pd.DataFrame, label: str = "") -> Figure:
    """bins: `studies.prediction.calibration` with a column model. Predicted against observed share, prompts binned."""
    names = list(dict.fromkeys(bins.model))
    fig, axes = plt.subplots(1, len(names), figsize=(7.2, 2.9), sharex=True, sharey=True, squeeze=False)
    top = max(0.05, float(bins[["predicted", "observed"]].to_numpy().max()) * 1.1)
    for ax, name in zip(axes[0], names):
        part = bins[bins.model == name]
        ax.plot([0, top], [0, top], color="#777777", linewidth=1, linestyle="--")
        ax.scatter(
            part.predicted, part.observed, s=12 + 120 * part.requests / bins.requests.max(), color="C0", alpha=0.7
        )
        ax.set_title(name, fontsize=10)
        ax.set_aspect("equal")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0, 0].set_ylabel("observed")
    fig.supxlabel(
        "predicted share of requests diverged by the last token; one point a bin of prompts and concurrencies",
        fontsize=10,
    )
    fig.suptitle(label, fontsize=10)
    return fig


@drawn
def parity(found: pd.DataFrame, label: str = "") -> Figure:
    """found: `studies.concurrency_tables.parity_cases`. Disagreement of two engines, what noise alone gives, and the
    gap
    that is left.
    """
    cases, quantities = list(dict.fromkeys(found.case)), list(dict.fromkeys(found.quantity))
    fig, axes = plt.subplots(1, len(cases), figsize=(7.2, 0.32 * len(quantities) + 1.3), sharey=True, squeeze=False)
    y = np.arange(len(quantities))[::-1]
    for ax, case in zip(axes[0], cases):
        part = found[found.case == case].set_index("quantity").reindex(quantities)
        error = [(part.value - part.low).clip(lower=0), (part.high - part.value).clip(lower=0)]
        ax.errorbar(part.value, y, xerr=error, fmt="o", color="C0", capsize=3)
        ax.set(xlim=(-0.03, 1.03), yticks=y)
        ax.set_yticklabels(quantities, fontsize=9)
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_title(case, fontsize=9)
    fig.suptitle(label, fontsize=10)
    return fig


def texts_html(tokens: pd.DataFrame, prompt: str, split: int) -> str:
    """Both texts token by token as HTML, tokens that differ marked by colour and underline. tokens:
    `studies.concurrency.Pair.tokens`.
    """

    def line(column: str, margin: str) -> str:
        pieces = []
        for index, row in enumerate(tokens.to_dict("records")):
            style = "" if row["same"] else "background:#F6D5C3;color:#1B1F1D;text-decoration:underline;"
            style += "outline:2px solid #D55E00;" if index == split else ""
            known = f", margin {row[margin]:.3g}" if column == "alone" or index <= split else ""
            pieces.append(f'<span style="{style}" title="token {index}{known}">{html.escape(str(row[column]))}</span>')
        return f'<p style="margin:0.2em 0;white-space:pre-wrap"><strong>{column}:</strong> {"".join(pieces)}</p>'

    return (
        f'<div role="group" aria-label="one prompt\'s text alone and in the batch"><p style="margin:0.2em '
        f'0"><em>{html.escape(prompt)}</em></p>'
        + line("alone", "margin alone")
        + line("in the batch", "margin in the batch")
        + "</div>"
    )
