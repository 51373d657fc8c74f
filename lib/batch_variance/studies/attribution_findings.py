"""What notebook 04's tables say: verdicts with their controls, sentences with the numbers in them, and the retraction
retold."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import pandas as pd
from scipy.stats import binom, hypergeom, kendalltau

from ..common import Rate
from ..engine import MECHANISMS
from .attribution import (
    Setup,
    alone_table,
    amplifier_table,
    cell_table,
    coalition_table,
    load_table,
    planted_table,
)
from .attribution_design import Design, budget, clear_pairs, interactions, resampled_worth, reversed_pairs, shapley
from .attribution_measuring import Measured, design_of, recorded
from .power import chance_of_more, requests_to_tell_apart
from .recordings import recorded_source
from .sources import cite, given, named

RETRACTED = (1, 2, 200)  # with an invariant kernel, without, requests of each


def describe(setup: Setup) -> str:
    """Which model runs on what, and how much will be served."""
    p, cells = setup.p, setup.plan.cells()
    lengths = sorted(map(len, setup.subject.prompts))
    many = cite(f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens", prompt_lengths(setup))
    planned = cell_plan(setup)
    where = "real Triton kernels on this GPU" if setup.tier == "live-gpu" else "GPU arithmetic modelled on this CPU"
    return (
        f"Model: `{p.model}`, {setup.label}; {p.storage} storage, {p.logits} logits, activations {p.activations}."
        f" {many}, {given(p, 'tokens')} tokens each. {cite(f'{len(cells)} cells', planned)},"
        f" {cite(f'{sum(cell.requests for cell in cells):,}', planned)} requests. Budget: {setup.plan.design.estimator}. Evidence tier:"
        f" {setup.tier} ({where})."
    )


def prompt_lengths(setup: Setup) -> pd.DataFrame:
    """prompt (its number) and its tokens."""
    lengths = list(map(len, setup.subject.prompts))
    return named(pd.DataFrame({"prompt": range(len(lengths)), "tokens": lengths}), "prompts")


def cell_plan(setup: Setup) -> pd.DataFrame:
    """What will be served, a row a cell: its settings, concurrency, seed and requests."""
    rows = [cell.columns() | {"requests": cell.requests} for cell in setup.plan.cells()]
    return named(pd.DataFrame(rows), "cells")


def served_sentence(setup: Setup, measured: Measured) -> str:
    """How much was served; the steps are those of `Measured.steps`."""
    steps = named(measured.steps, "steps")
    return (
        f"Served: {cite(len(setup.plan.cells()), cell_plan(setup))} cells in {cite(f'{int(steps.steps.sum()):,}', steps)} "
        f"engine steps, the prompts alone included."
    )


def _named(name: str) -> str:
    return name.replace("_", " ")


def _worth(measured: Measured, coalition: str) -> Rate:
    part = measured.part("budget")
    part = part[part.mechanisms == coalition]
    return Rate(int(part.changed.sum()), int(part.requests.sum()))


def _all_on(design: Design) -> str:
    return "+".join(design.mechanisms)


# --- Bits and texts ---


def alone_sentence(alone: pd.DataFrame) -> str:
    """Which mechanisms move bits and no text, next to those that change texts."""
    silent = alone[(alone["margins moved"] > 0) & (alone.changed == 0)]
    loud = alone[alone.changed > 0]
    at = lambda text, name: cite(text, alone, mechanism=name)  # noqa: E731
    changes = [
        f"{_named(row.mechanism)} changes {at(f'{row.changed} of {row.requests:,}', row.mechanism)} texts"
        for row in loud.itertuples()
    ]
    said = [f"Each alone on, {', '.join(changes) or 'none changes a text'}."]
    for row in silent.to_dict("records"):
        name = row["mechanism"]
        said.append(
            f"{_named(name)} moves the margin of {at(format(row['margins moved'], '.0%'), name)} of the tokens, by up to"
            f" {at(format(row['largest move'], '.2g'), name)}, and changes no text in"
            f" {at(format(row['requests'], ','), name)} requests (at most {at(format(row['high'], '.2%'), name)} would be"
            f" missed)."
        )
    idle = [_named(name) for name in alone[~alone.occurred].mechanism]
    return " ".join(said) + (f" The trigger of {', '.join(idle)} did not occur." if idle else "")


def bits_verdict(measured: Measured, alone: pd.DataFrame, design: Design, tier: str, prefix: str = "04.") -> dict:
    moved = int((alone["margins moved"] > 0).sum())
    off, on = (_moved(measured, coalition) for coalition in ("none", _all_on(design)))
    return {
        "id": f"{prefix}each-moves-bits",
        "claim": "Each mechanism alone on moves some margin's bits; all off move none",
        "holds": moved == len(alone) and off == 0,
        "value": f"{moved} of {len(alone)} mechanisms",
        "expected": "all",
        "n": int(alone.requests.sum()),
        "tier": tier,
        "negative_control": off == 0,
        "positive_control": on > 0,
        "occurred": bool(alone.occurred.all()),
    }


def _moved(measured: Measured, coalition: str) -> int:
    part = measured.part("budget")
    return int(part[part.mechanisms == coalition].margins_moved.sum())


# --- Load ---


def load_sentence(loads: pd.DataFrame) -> str:
    on, off = (loads[loads.on == name].sort_values("concurrency") for name in ("all", "none"))
    said = []
    if len(off):
        rate = Rate(int(off.changed.sum()), int(off.requests.sum()))
        levels = ", ".join(cite(level, loads, on="none", concurrency=level) for level in off.concurrency)
        said.append(f"With all off {cite(rate, loads, on='none')} requests changed, at concurrency {levels}.")
    if len(on):
        rates = "; ".join(
            cite(f"{row.rate:.1%} at {row.concurrency}", loads, on="all", concurrency=row.concurrency)
            for row in on.itertuples()
        )
        rising = bool((on.rate.diff().dropna() > 0).all())
        how = (
            "it does not rise at every step: texts that change once cannot change twice, so the share saturates,"
            " and which path a row alone takes (a small batch can share its choices) matters as much as how many"
            " rows there are"
        )
        if rising or not on.changed.any():
            how = "it rises at each step" if rising else "too few requests to see it rise"
        said.append(f"With all on the share that changed was {rates}; {how}.")
    return " ".join(said)


def load_verdicts(measured: Measured, design: Design, tier: str, prefix: str = "04.") -> list[dict]:
    loads = load_table(measured)
    off, on = loads[loads.on == "none"], loads[loads.on == "all"].sort_values("concurrency")
    cells = pd.concat([measured.part("load"), measured.part("budget")])
    cells = cells[cells.mechanisms == "none"].drop_duplicates(["concurrency", "seed", "prompt"])
    rate = Rate(int(cells.changed.sum()), int(cells.requests.sum()))
    alone = on[on.concurrency == 1]
    negative = None if alone.empty else bool(alone.changed.sum() == 0)
    most = (
        None
        if len(off) < 2
        else bool(
            off.sort_values("concurrency")["co-resident rows"].iloc[-1]
            > off.sort_values("concurrency")["co-resident rows"].iloc[0]
        )
    )
    positive = _worth(measured, _all_on(design)).events > 0
    found = [
        {
            "id": f"{prefix}all-off",
            "claim": "With every mechanism off, no request's text or margins depend on its batch, at any concurrency",
            "holds": rate.events == 0 and int(cells.margins_moved.sum()) == 0,
            "value": rate.events,
            "expected": 0,
            "n": rate.trials,
            "tier": tier,
            "interval": rate.interval,
            "negative_control": negative,
            "positive_control": positive,
            "occurred": most,
        }
    ]
    if len(on) > 1:
        low, high = on.iloc[0], on.iloc[-1]
        found.append(
            {
                "id": f"{prefix}all-on-rises",
                "claim": "With all on, more texts change at the highest concurrency than at the lowest",
                "holds": bool(high.rate > low.rate),
                "value": f"{low.rate:.3f} to {high.rate:.3f}",
                "expected": "a rise",
                "n": int(on.requests.sum()),
                "tier": tier,
                "negative_control": bool(off.changed.sum() == 0),
                "positive_control": positive,
                "occurred": bool(high["co-resident rows"] > low["co-resident rows"]),
            }
        )
    return found


# --- The budget ---


def budget_sentence(measured: Measured, design: Design, shares: pd.DataFrame) -> str:
    """The budget in words: the largest, what the rest is worth, and the interaction."""
    all_on = _worth(measured, _all_on(design))
    parts = interactions(measured.part("budget"), design).set_index("quantity")
    first, rest = shares.iloc[0], shares.iloc[1:]
    clear = [_named(row["mechanism"]) for _, row in rest.iterrows() if row["share low"] > 0]
    alone = parts.loc["sum of each on alone"]
    independent = parts.loc["independent changes of each on alone"]
    side = "more" if alone["all on minus it"] > 0 else "less"
    largest = lambda text: cite(text, shares, mechanism=first.mechanism)  # noqa: E731
    part = lambda text, name: cite(text, f"{measured.name}interactions", quantity=name)  # noqa: E731
    rest_of = alone["all on minus it"], alone["difference low"], alone["difference high"]
    each, at_once = "sum of each on alone", "independent changes of each on alone"
    return (
        f"All on, {cite(all_on, coalition_table(measured), mechanisms=_all_on(design))} requests change. "
        f"{_named(first.mechanism)} is charged with {largest(format(first['share'], '.1%'))} of requests "
        f"({largest(format(first['share low'], '.1%'))} to {largest(format(first['share high'], '.1%'))})"
        + (
            f"; an interval above 0 also have {', '.join(clear)}"
            if clear
            else "; no other mechanism's interval is above 0"
        )
        + f". Each on alone adds up to {part(format(alone['value'], '.1%'), each)}; all on change"
        f" {part(format(abs(rest_of[0]), '.1%'), each)} {side} (interval of the difference"
        f" {part(f'{rest_of[1]:.1%} to {rest_of[2]:.1%}', each)}), where independent changes would give"
        f" {part(format(independent['value'], '.1%'), at_once)}. Intervals resample the"
        f" {cite(measured.part('budget').prompt.nunique(), coalition_table(measured))} prompts."
    )


def by_seed(measured: Measured, design: Design) -> pd.DataFrame:
    """A row a (seed, mechanism): its share of the budget from that seed's requests alone."""
    part = measured.part("budget")
    frames = [budget(part[part.seed == seed], design).assign(seed=seed) for seed in sorted(part.seed.unique())]
    found = pd.concat(frames, ignore_index=True)[["seed", "mechanism", "share", "share low", "share high"]]
    return named(found, f"{measured.name}by-seed")


def _shares(seeds: pd.DataFrame) -> dict[int, dict[str, float]]:
    return {seed: dict(zip(part.mechanism, part.share)) for seed, part in seeds.groupby("seed")}


def order_sentence(measured: Measured, design: Design, seeds: pd.DataFrame) -> str:
    shares = list(_shares(seeds).values())
    pairs = clear_pairs(measured.part("budget"), design)
    turned = sorted({pair for share in shares for pair in reversed_pairs(pairs, share)})
    tau = min(
        kendalltau([a[name] for name in design.mechanisms], [b[name] for name in design.mechanisms]).statistic
        for i, a in enumerate(shares)
        for b in shares[i + 1 :]
    )
    said = (
        "none stands the other way round"
        if not turned
        else ", ".join(f"{_named(a)} and {_named(b)}" for a, b in turned) + " stand the other way round"
    )
    agree = "cannot be computed, all shares being equal" if np.isnan(tau) else f"is {cite(f'{tau:.2f}', seeds)}"
    count = f"{len(pairs)} of {len(design.mechanisms) * (len(design.mechanisms) - 1) // 2}"
    return (
        f"{cite(count, f'{measured.name}budget')} pairs of mechanisms are told"
        f" apart by the pooled requests; of these, in any one seed, {said}. The smallest rank correlation between two"
        f" seeds (Kendall's tau-b over all mechanisms) {agree}."
    )


def order_verdict(measured: Measured, design: Design, seeds: pd.DataFrame, tier: str, prefix: str = "04.") -> dict:
    """Its positive control turns one seed's shares round and asks whether that would have been noticed."""
    part, shares = measured.part("budget"), _shares(seeds)
    pairs = clear_pairs(part, design)
    turned = {pair for share in shares.values() for pair in reversed_pairs(pairs, share)}
    opposite = {name: -value for name, value in next(iter(shares.values())).items()}
    again = shapley(
        design, {key: draws[:1] for key, draws in resampled_worth(part[part.seed == part.seed.min()]).items()}
    )
    same = {name: float(value[0]) for name, value in again.items()} == next(iter(shares.values()))
    company = part[part.mechanisms == "none"].groupby("seed").co_resident_rows.mean()
    return {
        "id": f"{prefix}order-stable",
        "claim": "The budget's order does not change with the arrival seed, for mechanisms that are told apart",
        "holds": not turned,
        "value": f"{len(turned)} of {len(pairs)} pairs turned round",
        "expected": "0",
        "n": int(part.requests.sum()),
        "tier": tier,
        "negative_control": same,
        "positive_control": bool(reversed_pairs(pairs, opposite)),
        "occurred": bool(company.nunique() == len(company) > 1),
    }


# --- Planted ---


def planted_sentence(planted: pd.DataFrame, alone: pd.DataFrame) -> str:
    """The scale: how many texts known sizes change, and between which of them each mechanism lies."""
    size = lambda text, value: cite(text, planted, planted=value)  # noqa: E731
    scale = ", ".join(size(f"{row.planted:g} changes {row.rate:.1%}", row.planted) for row in planted.itertuples())
    sizes, rates = planted.planted.tolist(), planted.rate.tolist()
    said = []
    for row in alone.itertuples():
        rate = row.changed / row.requests
        above = [size for size, known in zip(sizes, rates) if known > rate]
        below = [size for size, known in zip(sizes, rates) if known <= rate]
        # Where nothing changed, sizes that change nothing either say nothing.
        where = (
            f"less than {size(f'{min(above):g}', min(above))}"
            if not below or (not row.changed and above)
            else f"at least {size(f'{max(below):g}', max(below))}"
            if not above
            else f"{size(f'{max(below):g}', max(below))} to {size(f'{min(above):g}', min(above))}"
        )
        said.append(f"{_named(row.mechanism)} {where}")
    return f"Logit noise of standard deviation {scale} of the texts. On that scale: {'; '.join(said)}."


def planted_verdict(measured: Measured, planted: pd.DataFrame, tier: str, prefix: str = "04.") -> dict:
    noise = measured.choices[(measured.choices.mechanism == "planted") & (measured.choices.concurrency > 0)]
    steps = planted.rate.diff().dropna()
    return {
        "id": f"{prefix}planted-ranked",
        "claim": "Planted perturbations of known size are ranked by their size",
        "holds": bool((steps >= 0).all() and planted.rate.iloc[-1] > planted.rate.iloc[0]),
        "value": " < ".join(f"{row.changed}" for row in planted.itertuples()),
        "expected": "rising with the size",
        "n": int(planted.requests.sum()),
        "tier": tier,
        "negative_control": _worth(measured, "none").events == 0,
        "positive_control": bool(planted.changed.iloc[-1] > 0),
        "occurred": bool(set(noise.planted) == set(planted.planted)),
    }


# --- Amplifiers ---


def amplifier_sentence(amplified: pd.DataFrame, carrier: str) -> str:
    """How the same mechanism fares under each dtype, with the ties."""
    if amplified.empty:
        return "No amplifier was asked for."
    at = lambda text, name, on: cite(text, amplified, amplifier=name, mechanisms=on)  # noqa: E731
    said = []
    for row in amplified[amplified.mechanisms == carrier].itertuples():
        said.append(f"{row.amplifier}: {at(f'{row.changed} of {row.requests:,}', row.amplifier, row.mechanisms)}")
    ties = amplified[amplified.mechanisms == "none"].set_index("amplifier")["exact ties alone"]
    tied = ", ".join(f"{at(count, name, 'none')} ({name})" for name, count in ties.items() if count) or "none under any"
    lines = [
        f"{_named(carrier)} alone changes, {'; '.join(said)}. Exact ties among the tokens of the prompts alone: {tied}."
    ]
    rule, kept = "the same, highest id wins a tie", "storage and logits in bfloat16"
    if {rule, kept} <= set(amplified.amplifier):
        rows = amplified[amplified.mechanisms.str.contains("+", regex=False)].set_index("amplifier")
        low, high = rows.loc[kept], rows.loc[rule]
        lines.append(
            f"With all on, the lowest id winning a tie changes"
            f" {at(f'{low.changed} of {low.requests:,}', kept, low.mechanisms)}, the highest"
            f" {at(f'{high.changed} of {high.requests:,}', rule, high.mechanisms)}."
        )
    return " ".join(lines)


# --- 1 of 200 against 2 of 200 ---


@lru_cache(maxsize=4)
def fisher_table(requests: int) -> np.ndarray:
    """Two-sided p of Fisher's exact test for a of ``requests`` against b of ``requests``: [a, b], each 0 ...
    requests."""
    found = np.ones((requests + 1, requests + 1))
    for total in range(2 * requests + 1):
        a = np.arange(max(0, total - requests), min(requests, total) + 1)
        chance = hypergeom.pmf(a, 2 * requests, total, requests)
        # As scipy does, outcomes as likely as the observed one but for rounding count with it.
        found[a, total - a] = [min(1.0, chance[chance <= one * (1 + 1e-7)].sum()) for one in chance]
    return found


def experiment(rate: float, other: float, requests: int) -> dict[str, float]:
    """What a comparison of ``requests`` with each rate would show: the chance of p < 0.05 (Fisher), of fewer events in
    the first, of as many, of more."""
    counts = np.arange(requests + 1)
    joint = np.outer(binom.pmf(counts, requests, rate), binom.pmf(counts, requests, other))
    return {
        "told apart": float(joint[fisher_table(requests) < 0.05].sum()),
        "fewer": float(np.triu(joint, 1).sum()),
        "equal": float(np.trace(joint)),
        "more": float(np.tril(joint, -1).sum()),
    }


def retold(measured: Measured, design: Design, requests: int = RETRACTED[2]) -> pd.DataFrame:
    """The retraction's experiment with our mechanisms: make one invariant, keep the others, serve ``requests`` each
    time.

    Rates are those measured; chances are what ``requests`` on each side would have shown at these rates."""
    before, rows = _worth(measured, _all_on(design)), []
    for name in design.mechanisms:
        after = _worth(measured, "+".join(design.but(design.mechanisms, name)) or "none")
        seen = experiment(after.value, before.value, requests)
        gap = after.value != before.value
        rows.append(
            {
                "made invariant": name,
                "changed before": before.value,
                "changed after": after.value,
                "p here": chance_of_more(after.events, after.trials, before.events, before.trials),
                "requests here": after.trials,
                f"chance that {requests} show it": seen["told apart"],
                f"chance that {requests} show no fewer": seen["equal"] + seen["more"],
                "requests needed, each side": requests_to_tell_apart(after.value, before.value, 0.8) if gap else None,
            }
        )
    return named(pd.DataFrame(rows), f"{measured.name}retold")


def retraction_table() -> pd.DataFrame:
    """The retracted comparison, a row: texts that varied after and before the repair, of how many, Fisher's p, and what
    these rates would have shown."""
    after, before, n = RETRACTED
    seen = experiment(after / n, before / n, n)
    row = {
        "after": after,
        "before": before,
        "requests": n,
        "p": chance_of_more(after, n, before, n),
        "chance to tell them apart": seen["told apart"],
        "chance to show no fewer": seen["equal"] + seen["more"],
        "requests for 80%": requests_to_tell_apart(after / n, before / n, 0.8),
    }
    return named(pd.DataFrame([row]), "retraction")


def retraction_sentence(told: pd.DataFrame) -> str:
    after, before, n = RETRACTED
    known = retraction_table()
    (row,) = known.to_dict("records")
    at = lambda name, form: cite(format(row[name], form), known)  # noqa: E731
    hopeless = told[told[f"chance that {n} show it"] < 0.5]
    return (
        f"FlashMLA issue 212's author made the kernel invariant and found {cite(f'{after} of {n}', known)} texts varying instead of"
        f" {cite(f'{before} of {n}', known)} (p = {at('p', '.2f')}). Had the rates really been"
        f" {cite(f'{after / n:.1%} and {before / n:.1%}', known)}, {at('requests', 'd')} requests of each would have told them"
        f" apart with a chance of {at('chance to tell them apart', '.1%')}, and shown no fewer after the repair with one of"
        f" {at('chance to show no fewer', '.0%')}; {at('requests for 80%', ',')} requests of each are needed for 80%. So"
        f" the count supports no causal claim, nor its opposite. Here, with the rates that we measured,"
        f" {at('requests', 'd')} requests"
        f" would have missed the repair of {cite(f'{len(hopeless)} of {len(told)}', told)} mechanisms more often than not"
        f" ({', '.join(map(_named, hopeless['made invariant'])) or 'none'})."
    )


def retraction_verdict(told: pd.DataFrame, alone: pd.DataFrame, prefix: str = "04.") -> dict:
    after, before, n = RETRACTED
    p = chance_of_more(after, n, before, n)
    return {
        "id": f"{prefix}one-against-two",
        "claim": f"{after} of {n} against {before} of {n} does not tell a repair from chance",
        "holds": p > 0.05,
        "value": p,
        "expected": "p > 0.05",
        "n": 2 * n,
        "tier": "recorded-gpu",
        "negative_control": chance_of_more(before, n, before, n) == 1,
        "positive_control": chance_of_more(after, n, 10 * before, n) < 0.05,
        "occurred": bool((alone["margins moved"] > 0).any()),
    }


# --- Recorded ---


@dataclass(frozen=True)
class RecordedRun:
    """A run whose counts are committed, analysed as a live one."""

    ffn: str
    measured: Measured
    design: Design

    @property
    def label(self) -> str:
        return self.measured.prompts.label.iloc[0]

    @property
    def carrier(self) -> str:
        return self.measured.prompts.carrier.iloc[0]

    @property
    def requests(self) -> int:
        return self.served(self.measured.part("budget"))

    @staticmethod
    def served(frame: pd.DataFrame) -> int:
        return int(frame.requests.sum())

    @cached_property
    def loads(self) -> pd.DataFrame:
        return load_table(self.measured)

    @cached_property
    def alone(self) -> pd.DataFrame:
        return alone_table(self.measured, self.design)

    @cached_property
    def shares(self) -> pd.DataFrame:
        return named(budget(self.measured.part("budget"), self.design), f"{self.measured.name}budget")

    @cached_property
    def interactions(self) -> pd.DataFrame:
        return named(interactions(self.measured.part("budget"), self.design), f"{self.measured.name}interactions")

    @cached_property
    def planted(self) -> pd.DataFrame:
        return planted_table(self.measured)

    @cached_property
    def amplified(self) -> pd.DataFrame:
        return amplifier_table(self.measured)

    def verdicts(self) -> list[dict]:
        """As for a live run, under ids of their own."""
        prefix, tier = f"04.h200-{self.ffn}-", "recorded-gpu"
        found = load_verdicts(self.measured, self.design, tier, prefix)
        found.append(bits_verdict(self.measured, self.alone, self.design, tier, prefix))
        found.append(order_verdict(self.measured, self.design, by_seed(self.measured, self.design), tier, prefix))
        return found + ([planted_verdict(self.measured, self.planted, tier, prefix)] if len(self.planted) else [])


def recorded_runs() -> list[RecordedRun]:
    """Every recorded GPU run with a budget and a load."""
    found = []
    for ffn in ("moe", "dense"):
        measured = recorded(ffn)
        design = None if measured is None else design_of(measured.part("budget"))
        if design and len(measured.part("load")):
            found.append(RecordedRun(ffn, replace(measured, name=f"recorded-{ffn}-"), design))
    return found


def recorded_sentence(runs: list[RecordedRun]) -> str:
    if not runs:
        return "No GPU run of this study is recorded: run it with `--device cuda -p record=data/recorded` to add one."
    many = [cite(f"{run.requests:,}", coalition_table(run.measured)) for run in runs]
    said = (f"{recorded_source(run.measured.prompts)} {n} requests in the budget." for run, n in zip(runs, many))
    return " ".join(said)


SELECTIONS = {"dense": "dense", "moe-all": "experts, all taken", "moe": "experts, some chosen"}


def selection_table() -> pd.DataFrame:
    """Each mechanism alone on in the recorded GPU runs of a dense FFN, of experts that are all taken, and of experts
    that a router chooses among; empty unless all three are recorded.

    ffn, label; mechanisms, requests, changed, low, high, margins moved (share of tokens), largest move (logits).
    """
    runs = {words: recorded(kind) for kind, words in SELECTIONS.items()}
    if any(measured is None for measured in runs.values()):
        return pd.DataFrame()
    found = []
    for words, measured in runs.items():
        part = measured.part("budget")
        cells = cell_table(part, "mechanisms")
        cells = cells[cells.mechanisms.isin(("none", *MECHANISMS))]
        found.append(cells.assign(ffn=words, label=part.label.iloc[0]))
    columns = ["ffn", "mechanisms", "requests", "changed", "low", "high", "margins moved", "largest move", "label"]
    return named(pd.concat(found, ignore_index=True)[columns], "selection")


def _small(table: pd.DataFrame) -> pd.DataFrame:
    """The mechanisms that every FFN has and that change no text under a dense one."""
    counted = table[table.mechanisms != "none"].pivot(index="mechanisms", columns="ffn", values="changed").dropna()
    return table[table.mechanisms.isin(counted.index[counted["dense"] == 0])]


def selection_sentence(table: pd.DataFrame) -> str:
    if table.empty:
        return "Whether the choice of experts carries small noise is not recorded."
    small = _small(table)
    said = []
    for words, part in small.groupby("ffn", sort=False):
        rate = Rate(int(part.changed.sum()), int(part.requests.sum()))
        largest = part.loc[part["largest move"].idxmax()]
        move = cite(f"{largest['largest move']:.2g}", table, ffn=words, mechanisms=largest.mechanisms)
        said.append(f"with {words} {cite(rate, table, ffn=words)} texts changed, and no margin moved by more than {move}")
    names = ", ".join(_named(name) for name in dict.fromkeys(small.mechanisms))
    held = " A last bit that swaps an expert is no longer a last bit." if selection_verdict(table)["holds"] else ""
    return f"Each alone on, {names}: {'; '.join(said)}.{held}"


def selection_verdict(table: pd.DataFrame) -> dict:
    """Does the noise still change texts when the same kernels run the same experts and none is left out?"""
    small = _small(table)
    rates = {
        kind: Rate(int(part.changed.sum()), int(part.requests.sum()))
        for kind, words in SELECTIONS.items()
        for part in [small[small.ffn == words]]
    }
    off, threshold = (table[table.mechanisms == name] for name in ("none", "row_threshold"))
    return {
        "id": "04.h200-choice-of-experts",
        "claim": "Mechanisms that change no text under a dense FFN change some where a router chooses experts, and fewer"
        " where the same experts are all taken",
        "holds": rates["moe"].interval[0] > rates["moe-all"].interval[1],
        "value": f"{rates['moe']} against {rates['moe-all']}",
        "expected": "fewer with all taken",
        "n": int(small.requests.sum()),
        "tier": "recorded-gpu",
        "negative_control": not off.changed.any() and not off["margins moved"].any(),
        "positive_control": bool((threshold.changed > 0).all()),
        "occurred": bool((small["margins moved"] > 0).all()),
    }


def recorded_off() -> list[tuple[str, str, pd.DataFrame]]:
    """(tier, source, table) of runs in which every mechanism was off, by concurrency: on a GPU, and modelled on a
    CPU."""
    found = []
    for ffn in ("moe", "dense"):
        for tier in ("live-gpu", "emulated"):
            measured = recorded(ffn, tier)
            if measured is not None and len(measured.part("load")):
                row = measured.part("load").iloc[0]
                where = f"on {row.gpu}" if tier == "live-gpu" else "modelled on a CPU"
                loads = load_table(measured)
                found.append(
                    (
                        "recorded-gpu" if tier == "live-gpu" else tier,
                        f"{row.label}, {where}, {row.date}, commit {row.commit}",
                        named(loads[loads.on == "none"], f"off-{ffn}-{tier}"),
                    )
                )
    return found


def off_sentence(table: pd.DataFrame) -> str:
    rate = Rate(int(table.changed.sum()), int(table.requests.sum()))
    worst = Rate(0, int(table.requests.min())).interval[1]
    fewest = lambda text: cite(text, table, requests=table.requests.min())  # noqa: E731
    return (
        f"All off: {cite(rate, table)} requests changed, at least {fewest(f'{int(table.requests.min()):,}')} at each of"
        f" concurrency {', '.join(cite(level, table, concurrency=level) for level in table.concurrency)}, and the margins"
        f" of {cite(format(table['margins moved'].max(), '.0%'), table)} of the tokens moved; at one concurrency a rate of"
        f" up to {fewest(f'{worst:.2%}')} would be missed."
    )


def conclusion(measured: Measured, design: Design, alone: pd.DataFrame, shares: pd.DataFrame) -> str:
    """What a reader should take along, from these tables."""
    silent = [row["mechanism"] for _, row in alone.iterrows() if row["margins moved"] > 0 and row["changed"] == 0]
    order = ", ".join(
        f"{_named(row.mechanism)} ({cite(f'{row.share:.1%}', shares, mechanism=row.mechanism)})"
        for row in shares.itertuples()
    )
    table = coalition_table(measured)
    off, on = _worth(measured, "none"), _worth(measured, _all_on(design))
    return "\n".join(
        [
            f"- **All off: {cite(off, table, mechanisms='none')} changed. All on:"
            f" {cite(on, table, mechanisms=_all_on(design))}.** Whatever varies under some of the mechanisms is theirs.",
            f"- **Budget**, in shares of requests: {order}.",
            "- **A kernel that varies is not yet the cause.**"
            f" {', '.join(map(_named, silent)) if silent else 'No mechanism'} moved bits and changed no text here."
            + "".join(
                f" With {_named(name)} made invariant and the others on, {_repaired(measured, design, name)} change."
                for name in silent
            ),
        ]
    )


def _repaired(measured: Measured, design: Design, name: str) -> str:
    rest = "+".join(design.but(design.mechanisms, name)) or "none"
    return cite(_worth(measured, rest), coalition_table(measured), mechanisms=rest)
