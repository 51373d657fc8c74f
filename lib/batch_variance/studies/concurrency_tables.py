"""Notebook 03's tables, from what `concurrency` served: what findings and figures read, and what is recorded.

Tables in, tables out; the statistics themselves are in `spans`, `prediction`, `parity` and `power`.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from ..common import Rate
from . import parity, prediction, spans
from .concurrency import Parameters, Results, Setup
from .power import StoppingRule, worth_in_independent_requests
from .recordings import recorded_source, recorded_table, save_tables, without_columns
from .sources import named

__all__ = ["TABLES", "Tables", "recorded", "recorded_source", "save", "tables", "unstamped"]


# --- Tables -----------------------------------------------------------------------------------------------------------


def outputs(requests: pd.DataFrame, rule: StoppingRule) -> pd.DataFrame:
    """The issue's table, a row a (concurrency, run): requests, prompts with more than one output, most variants of a
    prompt, requests that differ from the prompt alone with their interval, how many independent requests these are
    worth
    for a rate over all prompts, and co-resident rows (mean over a request's steps)."""
    rows = []
    for (level, run), part in requests.groupby(["concurrency", "run"], sort=True):
        variants = part.groupby("prompt").text.nunique()
        differs = part.first_divergence >= 0
        low, high = rule.interval(int(differs.sum()), len(part))
        rows.append(
            {
                "concurrency": level,
                "run": run,
                "requests": len(part),
                "prompts": len(variants),
                "prompts with more than one output": int((variants > 1).sum()),
                "most variants": int(variants.max()),
                "differ from alone": int(differs.sum()),
                "low": low,
                "high": high,
                "worth independent": round(worth_in_independent_requests(differs, part.prompt), 1),
                "co-resident rows": round(float(part.co_resident_rows.mean()), 1),
            }
        )
    return pd.DataFrame(rows)


def pairs(requests: pd.DataFrame) -> pd.DataFrame:
    """Run A against run B request by request: requests, how many differ, with the exact interval, and the exact-match
    rate.
    """
    rows = []
    for level, part in requests[requests.run.isin(["A", "B"])].groupby("concurrency"):
        wide = part.pivot(index="request", columns="run", values="text").dropna()
        rate = Rate(int((wide.A != wide.B).sum()), len(wide))
        rows.append(
            {
                "concurrency": level,
                "requests": rate.trials,
                "differ between A and B": rate.events,
                "low": rate.interval[0],
                "high": rate.interval[1],
                "exact match": 1 - rate.value,
            }
        )
    return pd.DataFrame(rows)


def ulp_shares(values: pd.DataFrame) -> pd.DataFrame:
    """values: `forcing.Measured.values`. By kind and concurrency: share of values further than ``ulp`` row-scaled ULP
    from alone.
    """
    rows = []
    for (kind, level), part in values.groupby(["kind", "concurrency"], sort=False):
        counts = part.groupby("up_to", sort=True)["values"].sum()
        further = 1 - counts.cumsum() / counts.sum()
        rows += [
            {
                "kind": kind,
                "concurrency": level,
                "ulp": edge,
                "further": max(float(share), 0.0),
                "values": int(counts.sum()),
            }
            for edge, share in further.items()
            if np.isfinite(edge)
        ]
    return pd.DataFrame(rows)


def ulp_summary(positions: pd.DataFrame) -> pd.DataFrame:
    """By concurrency: forced positions, share whose logits moved at all, and over positions the medians of the row's
    median
    and largest row-scaled ULP and of the share of values with other bits; the largest anywhere; noise of the best two
    logits' difference (rms, in logits) and how many tokens it changed."""
    rows = []
    for level, part in positions.groupby("concurrency"):
        row = {
            "concurrency": level,
            "positions": len(part),
            "positions moved": float((part.logits_other_bits > 0).mean()),
        }
        for name in ("hidden", "logits"):
            row |= {
                f"{name}: other bits": float(part[f"{name}_other_bits"].median()),
                f"{name}: median ULP": float(part[f"{name}_median_ulp"].median()),
                f"{name}: largest ULP, median": float(part[f"{name}_largest_ulp"].median()),
                f"{name}: largest ULP": float(part[f"{name}_largest_ulp"].max()),
            }
        rows.append(
            row
            | {
                "noise of the top two (rms)": float(np.sqrt((part.noise**2).mean())),
                "tokens changed": int(part.flipped.sum()),
            }
        )
    return pd.DataFrame(rows)


def divergence_margins(places: pd.DataFrame, margins: pd.DataFrame) -> pd.DataFrame:
    """By concurrency: first divergences, distinct places, the median margin there in the batch and alone, the largest
    alone;
    the first row is all positions alone."""
    rows = [
        {
            "concurrency": "alone, all positions",
            "divergences": 0,
            "distinct places": len(margins),
            "median margin in the batch": float("nan"),
            "median margin alone": float(margins.margin.median()),
            "largest margin alone": float(margins.margin.max()),
        }
    ]
    for level, part in places.groupby("concurrency"):
        rows.append(
            {
                "concurrency": str(level),
                "divergences": len(part),
                "distinct places": len(part[["prompt", "position"]].drop_duplicates()),
                "median margin in the batch": float(part.margin.median()),
                "median margin alone": float(part.solo_margin.median()),
                "largest margin alone": float(part.solo_margin.max()),
            }
        )
    return pd.DataFrame(rows)


def margin_curves(margins: pd.DataFrame, positions: pd.DataFrame, places: pd.DataFrame) -> pd.DataFrame:
    """Empirical distributions for the figure: which, margin, share of positions up to it, count_ (how many there
    are).
    """
    largest = positions[positions.concurrency == positions.concurrency.max()]
    sets = {
        "all positions, alone": margins.margin,
        "all positions, largest concurrency": largest.margin,
        "first divergences, alone": places.solo_margin,
        "first divergences, in the batch": places.margin,
    }
    parts = []
    for name, found in sets.items():
        value = np.sort(found.to_numpy(float))
        if len(value):
            # 200 points draw the same step.
            pick = np.unique(np.linspace(0, len(value) - 1, 200).astype(int))
            parts.append(
                pd.DataFrame(
                    {"which": name, "margin": value[pick], "share": (pick + 1) / len(value), "count_": len(value)}
                )
            )
    return pd.concat(parts, ignore_index=True)


def second_span_curve(found: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Kaplan-Meier of the second span over all concurrencies: tokens, share that agree again for more than so many."""
    if found.empty:
        return pd.DataFrame(columns=["tokens", "share", "low", "high"])
    # A span of n tokens ends at token n + 1; one that the text's end cut is known to last its length.
    ends = found[~found.censored].second_span.to_numpy() + 1
    curve = spans.curve(ends, found[found.censored].second_span.to_numpy(), tokens)
    return pd.DataFrame(curve, columns=["tokens", "share", "low", "high"])


# --- Prediction and parity --------------------------------------------------------------------------------------------


def predictions(margins: pd.DataFrame, positions: pd.DataFrame, requests: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Every noise model's `prediction.matched` for runs A and B, with a column model."""
    observed = prediction.observe(requests, tokens)
    return pd.concat(
        [
            prediction.matched(prediction.predict(margins, positions, name), observed).assign(model=name)
            for name in prediction.MODELS
        ],
        ignore_index=True,
    )


def by_model(both: pd.DataFrame, summarise) -> pd.DataFrame:
    """``summarise`` of each model's rows, with the model named."""
    return pd.concat(
        [summarise(part.drop(columns="model")).assign(model=name) for name, part in both.groupby("model", sort=False)],
        ignore_index=True,
    )


PARITY_CASES = {"Y is X again": "C", "Y is the twin": "twin"}


def parity_cases(requests: pd.DataFrame, p: Parameters) -> pd.DataFrame:
    """`parity.separate` of X, the engine under study at ``parity_concurrency``, and Y: X itself in a third run, whose
    gap is 0
    by construction, and the twin, whose arithmetic differs. Columns case, over ("requests" of these prompts, or
    "prompts"
    like these), quantity, value, low, high."""
    level = requests[requests.concurrency == p.parity_concurrency]
    x = level[level.run.isin(["A", "B"])]
    parts = [
        parity.separate(x, level[level.run == run], over=over, seed=p.seed).assign(case=case, over=over)
        for case, run in PARITY_CASES.items()
        for over in ("requests", "prompts")
    ]
    return pd.concat(parts, ignore_index=True)[["case", "over", "quantity", "value", "low", "high"]]


def solo_gap(requests: pd.DataFrame) -> Rate:
    """How many prompts' texts alone differ between X and its twin: what a gap is without any batch."""
    alone = (
        requests[requests.run.isin(["A", "twin"]) & (requests.concurrency > 1)]
        .drop_duplicates(["run", "prompt"])
        .pivot(index="prompt", columns="run", values="alone")
        .dropna()
    )
    return Rate(int((alone.A != alone.twin).sum()), len(alone))


# --- All tables -------------------------------------------------------------------------------------------------------

Tables = dict[str, pd.DataFrame]


def tables(setup: Setup, results: Results) -> Tables:
    """Every table that the notebook shows, and that `record` writes: what findings and figures read, live or
    recorded.
    """
    p, requests, positions = setup.p, results.requests, results.forced.positions
    margins = setup.solo.margins()
    ab = requests[requests.run.isin(["A", "B"])]
    places = spans.at_divergence(ab, margins)
    found = spans.second_spans(ab)
    both = predictions(margins, positions, ab, p.tokens)
    independent = both[both.model == "independent"].drop(columns="model")
    batched = both[both.concurrency > 1]
    found = {
        "outputs": outputs(requests, StoppingRule(p.stop_width)),
        "pairs": pairs(requests),
        "ulp": ulp_summary(positions),
        "ulp_shares": ulp_shares(results.forced.values),
        "ratios": spans.median_ratio(positions, seed=p.seed),
        "divergences": divergence_margins(places, margins),
        "margin_curves": margin_curves(margins, positions, places),
        "survival": spans.survival(ab, p.tokens),
        "spans": spans.span_summary(ab, found, p.tokens),
        "second_span": second_span_curve(found, p.tokens),
        "levels": by_model(both, prediction.by_concurrency),
        "calibration": by_model(batched, prediction.calibration),
        "errors": prediction.errors(
            margins, positions[positions.concurrency > 1], prediction.observe(ab[ab.concurrency > 1], p.tokens), p.seed
        ),
        "noise": prediction.noise_structure(positions),
        "failures": prediction.where_it_fails(independent),
        "parity": parity_cases(requests, p),
        "facts": facts(setup, requests, margins, positions, places, independent),
    }
    return {name: named(frame, name) for name, frame in found.items()}


def facts(
    setup: Setup,
    requests: pd.DataFrame,
    margins: pd.DataFrame,
    positions: pd.DataFrame,
    places: pd.DataFrame,
    predicted: pd.DataFrame,
) -> pd.DataFrame:
    """Single numbers, name and value: the tests' results and their controls."""
    p = setup.p
    ab = requests[requests.run.isin(["A", "B"])]
    random = np.random.default_rng(p.seed)
    distinct = places[["prompt", "position"]].drop_duplicates()
    # The test's own controls: as many places drawn anywhere, and those of the smallest margins, a prompt's smallest
    # first.
    anywhere = margins.iloc[random.permutation(len(margins))[: len(distinct)]]
    order = margins.assign(rank=margins.groupby("prompt").margin.rank(method="first")).sort_values(
        ["rank", "margin"], kind="stable"
    )
    smallest = order.head(len(distinct))
    skill = prediction.skill_interval(predicted[predicted.concurrency > 1], seed=p.seed)
    gap = planted_gap(requests, p)
    found = {
        **spans.near_ties(places, margins, seed=p.seed),
        "p of random places": spans.near_ties(anywhere, margins, seed=p.seed)["p"],
        "p of smallest margins": spans.near_ties(smallest, margins, seed=p.seed)["p"],
        **{f"trend {name}": value for name, value in spans.trend(ab, seed=p.seed).items()},
        "positions moved": (positions[positions.concurrency > 1].logits_other_bits > 0).mean(),
        "requests predicted": (ab.concurrency > 1).sum(),
        "predicted alone": predicted[predicted.concurrency == 1].predicted.max(),
        "observed alone": predicted[predicted.concurrency == 1].observed.max(),
        "skill low": skill[0],
        "skill high": skill[1],
        "solo gap": solo_gap(requests).events,
        "prompts": len(setup.texts),
        "planted gap": gap.value,
        "planted gap, low": gap.low,
        "requests compared": (requests[requests.concurrency == p.parity_concurrency].run.isin(["A", "B", "C"])).sum(),
    }
    return pd.DataFrame({"name": list(found), "value": [float(value) for value in found.values()]})


def planted_gap(requests: pd.DataFrame, p: Parameters) -> pd.Series:
    """The estimate for X against its third run, all texts but every fourth prompt's replaced: a gap that must be seen."""
    level = requests[requests.concurrency == p.parity_concurrency]
    y = level[level.run == "C"]
    y = y.assign(text=y.text.where(y.prompt % 4 == 0, "replaced"))
    return (
        parity.separate(level[level.run.isin(["A", "B"])], y, over="prompts", seed=p.seed)
        .set_index("quantity")
        .loc[parity.GAP]
    )


# --- Recorded results -------------------------------------------------------------------------------------------------

RECORDED = "concurrency"
TABLES = (
    "outputs",
    "pairs",
    "ulp",
    "ulp_shares",
    "ratios",
    "divergences",
    "margin_curves",
    "survival",
    "spans",
    "second_span",
    "levels",
    "calibration",
    "errors",
    "noise",
    "failures",
    "parity",
    "facts",
)
_STAMP = ("ffn", "subject", "label", "storage_dtype", "logits_dtype", "tokens_each", "threshold")


def save(setup: Setup, found: Tables) -> list[Path]:
    """Write each table as ``<p.record>/concurrency_<ffn>_<name>.csv`` with what ran beside every row; "" writes
    none.
    """
    p = setup.p
    stamp = dict(zip(_STAMP, (p.ffn, p.model, setup.label, p.storage, p.logits, p.tokens, p.threshold)))
    return save_tables(f"{RECORDED}_{p.ffn}", found, p.record, stamp)


def recorded(ffn: str) -> Tables | None:
    """The tables recorded on a GPU for one kind of FFN, None when they are not all there."""
    found = {name: named(recorded_table(f"{RECORDED}_{ffn}", name), f"recorded-{ffn}-{name}") for name in TABLES}
    return None if any(found[name].empty for name in TABLES if name not in ("failures", "second_span")) else found


def unstamped(frame: pd.DataFrame) -> pd.DataFrame:
    """A recorded table without the columns that say what ran."""
    return without_columns(frame, *_STAMP)
