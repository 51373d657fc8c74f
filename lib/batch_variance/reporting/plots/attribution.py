"""The figures of notebook 04: bits beside texts, the budget, its order by seed, load, planted sizes, amplifiers, the
retraction."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..drawings import drawn


def _words(names) -> list[str]:
    return [name.replace("_", " ") for name in names]


def _span(ax, place, value, low, high, **look) -> None:
    """Points with intervals along x; an interval never starts beyond its point."""
    error = [np.clip(value - low, 0, None), np.clip(high - value, 0, None)]
    ax.errorbar(value, place, xerr=error, capsize=2.5, **look)


def _percent(ax, axis: str = "x") -> None:
    getattr(ax, f"{axis}axis").set_major_formatter(PercentFormatter(1, decimals=None))


@drawn
def bits_and_texts(alone: pd.DataFrame, label: str = "") -> Figure:
    """alone: `studies.attribution.alone_table`. Each mechanism alone: tokens whose margin moved, and texts changed."""
    fig, (bits, texts) = plt.subplots(1, 2, figsize=(7.2, 0.42 * len(alone) + 1.3), sharey=True)
    place = np.arange(len(alone))[::-1]
    bits.barh(place, alone["margins moved"], color="C1", height=0.6)
    bits.set(
        xlim=(0, 1.02),
        xlabel="tokens whose margin moved",
        yticks=place,
        yticklabels=_words(alone.mechanism),
        title="Bits",
    )
    _span(texts, place, alone.changed / alone.requests, alone.low, alone.high, fmt="o", color="C0")
    for y, row in zip(place, alone.itertuples()):
        texts.annotate(
            f"{row.changed:,}",
            (row.changed / row.requests, y),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    texts.set(xlabel="requests whose text changed", title="Text")
    texts.set_xlim(left=min(0.0, texts.get_xlim()[0]))
    for ax in (bits, texts):
        _percent(ax)
    fig.suptitle(label, fontsize=10)
    return fig


@drawn
def selection(table: pd.DataFrame) -> Figure:
    """table: `studies.attribution_findings.selection_table`. Texts that each mechanism alone changes, and the largest
    move of a margin, by how an FFN's experts are chosen."""
    names = [name for name in dict.fromkeys(table.mechanisms) if name != "none"]
    fig, (texts, moves) = plt.subplots(1, 2, figsize=(7.2, 0.5 * len(names) + 1.5), sharey=True)
    for number, (words, part) in enumerate(table.groupby("ffn", sort=False)):
        part = part[part.mechanisms.isin(names)]
        place = np.array([len(names) - names.index(name) for name in part.mechanisms]) + 0.2 * (1 - number)
        style = dict(fmt="o^s"[number], color=f"C{number}", label=words)
        _span(texts, place, part.changed / part.requests, part.low, part.high, **style)
        moves.plot(part["largest move"], place, "o^s"[number], color=f"C{number}")
    texts.set(
        xlabel="requests whose text changed",
        yticks=range(len(names), 0, -1),
        yticklabels=_words(names),
        title="Text",
    )
    moves.set(xlabel="largest move of a margin (logits)", xscale="log", title="Bits")
    _percent(texts)
    fig.legend(loc="outside upper center", ncols=3)
    return fig


@drawn
def budget(shares: pd.DataFrame, label: str = "") -> Figure:
    """shares: `attribution_design.budget`. A mechanism's share of the changed requests, and its effect switched on or
    off alone."""
    fig, ax = plt.subplots(figsize=(7.2, 0.55 * len(shares) + 1.2))
    place = np.arange(len(shares))[::-1].astype(float)
    kinds = (
        ("on alone", 0.24, "^", "C1", "switched on alone"),
        ("share", 0.0, "o", "C0", "share of the budget"),
        ("off alone", -0.24, "v", "C2", "switched off alone"),
    )
    for column, shift, marker, colour, name in kinds:
        _span(
            ax,
            place + shift,
            shares[column],
            shares[f"{column} low"],
            shares[f"{column} high"],
            fmt=marker,
            color=colour,
            label=name,
            markersize=6 if column == "share" else 5,
        )
    ax.axvline(0, color="#333333", linewidth=0.8)
    ax.set(
        yticks=place,
        yticklabels=_words(shares.mechanism),
        xlabel="share of all requests, with 95% bootstrap intervals over prompts",
    )
    _percent(ax)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    if label:
        ax.set_title(label, fontsize=10)
    return fig


@drawn
def by_seed(seeds: pd.DataFrame, label: str = "") -> Figure:
    """seeds: `attribution_findings.by_seed`. Each mechanism's share from each seed's requests alone."""
    names = seeds.groupby("mechanism").share.mean().sort_values(ascending=False).index.tolist()
    levels = sorted(seeds.seed.unique())
    fig, ax = plt.subplots(figsize=(7.2, 0.5 * len(names) + 1.2))
    place = np.arange(len(names))[::-1]
    for i, (seed, marker) in enumerate(zip(levels, "osD^v<>P" * (1 + len(levels) // 8))):
        part = seeds[seeds.seed == seed].set_index("mechanism").loc[names]
        shift = 0.3 * (0.5 - (i + 0.5) / len(levels))
        _span(
            ax,
            place + shift,
            part.share,
            part["share low"],
            part["share high"],
            fmt=marker,
            color=f"C{i}",
            label=f"seed {seed}",
            markersize=5,
        )
    ax.axvline(0, color="#333333", linewidth=0.8)
    ax.set(yticks=place, yticklabels=_words(names), xlabel="share of all requests")
    _percent(ax)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(levels)))
    if label:
        ax.set_title(label, fontsize=10)
    return fig


@drawn
def load(loads: pd.DataFrame, label: str = "") -> Figure:
    """loads: `studies.attribution.load_table`. Share of changed texts against concurrency, none and all on."""
    fig, ax = plt.subplots(figsize=(7.2, 3.2))
    for name, colour, marker in (("all", "C0", "o"), ("none", "C2", "s")):
        part = loads[loads.on == name].sort_values("concurrency")
        if len(part):
            error = [(part.rate - part.low).clip(lower=0), (part.high - part.rate).clip(lower=0)]
            ax.errorbar(
                part.concurrency, part.rate, yerr=error, fmt=f"{marker}-", color=colour, capsize=2.5, label=f"{name} on"
            )
    levels = sorted(loads.concurrency.unique())
    ax.set_xscale("log", base=2)
    ax.set(
        xticks=levels,
        xticklabels=levels,
        xlabel="requests in flight",
        ylabel="requests whose text changed",
        ylim=(-0.03, 1.03),
    )
    ax.minorticks_off()
    _percent(ax, "y")
    ax.legend()
    if label:
        ax.set_title(label, fontsize=10)
    return fig


@drawn
def planted(table: pd.DataFrame, alone: pd.DataFrame, label: str = "") -> Figure:
    """table: `studies.attribution.planted_table`. Known sizes against the texts they change, the mechanisms as lines
    across."""
    fig, ax = plt.subplots(figsize=(7.2, 3.4))
    error = [(table.rate - table.low).clip(lower=0), (table.high - table.rate).clip(lower=0)]
    ax.errorbar(table.planted, table.rate, yerr=error, fmt="o-", color="C0", capsize=2.5)
    rates = (
        alone.assign(rate=alone.changed / alone.requests)
        .groupby("rate", sort=True)
        .mechanism.apply(lambda names: ", ".join(_words(names)))
    )
    last = -np.inf
    for rate, names in rates.items():
        ax.axhline(rate, color="#777777", linewidth=0.8, linestyle=":")
        last = max(rate, last + 0.06)  # labels of close rates move up
        ax.annotate(
            names, (1.01, last), xycoords=("axes fraction", "data"), va="center", fontsize=8, annotation_clip=False
        )
    ax.set_xscale("log")
    ax.set(
        xlabel="standard deviation of the planted logit noise",
        ylabel="requests whose text changed",
        ylim=(-0.03, max(1.03, last + 0.05)),
    )
    _percent(ax, "y")
    if label:
        ax.set_title(label, fontsize=10)
    return fig


@drawn
def amplifiers(table: pd.DataFrame, label: str = "") -> Figure:
    """table: `studies.attribution.amplifier_table`. The same mechanisms under other dtypes."""
    names = list(dict.fromkeys(table.amplifier))
    fig, ax = plt.subplots(figsize=(7.2, 0.5 * len(names) + 1.4))
    place = dict(zip(names, np.arange(len(names))[::-1]))
    kinds = {"none": ("none on", "s", "C2", -0.2), "all": ("all on", "o", "C0", 0.2)}
    carriers = [name for name in dict.fromkeys(table.mechanisms) if name != "none" and "+" not in name]
    kinds |= {name: (f"{_words([name])[0]} alone", "^", "C1", 0.0) for name in carriers}
    for name, (words, marker, colour, shift) in kinds.items():
        part = (
            table[table.mechanisms.str.contains("+", regex=False)] if name == "all" else table[table.mechanisms == name]
        )
        y = np.array([place[a] for a in part.amplifier]) + shift
        _span(ax, y, part.rate, part.low, part.high, fmt=marker, color=colour, label=words, markersize=5)
    ax.set(yticks=list(place.values()), yticklabels=names, xlabel="requests whose text changed", xlim=(-0.03, 1.03))
    _percent(ax)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    if label:
        ax.set_title(label, fontsize=10)
    return fig


@drawn
def retold(table: pd.DataFrame, requests: int, label: str = "") -> Figure:
    """table: `attribution_findings.retold`. How often ``requests`` on each side would have shown what one repair
    does."""
    fig, ax = plt.subplots(figsize=(7.2, 0.45 * len(table) + 1.4))
    place = np.arange(len(table))[::-1]
    shown, none = table[f"chance that {requests} show it"], table[f"chance that {requests} show no fewer"]
    ax.barh(place + 0.18, shown, height=0.32, color="C0", label=f"p < 0.05 with {requests} requests on each side")
    ax.barh(place - 0.18, none, height=0.32, color="C1", label="no fewer changed texts after the repair")
    ax.set(
        yticks=place,
        yticklabels=_words(table["made invariant"]),
        xlim=(0, 1),
        xlabel="chance, at the rates measured here",
    )
    _percent(ax)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=1)
    if label:
        ax.set_title(label, fontsize=10)
    return fig
