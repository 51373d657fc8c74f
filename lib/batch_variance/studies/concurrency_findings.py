"""What notebook 03's tables say: verdicts with their controls, and sentences with the numbers in them.

Every function reads the tables of `studies.concurrency_tables.tables`, live or recorded alike.
"""

import math

import pandas as pd

from ..common import Rate
from .concurrency import Pair, Parameters, Setup
from .concurrency_tables import Tables
from .parity import GAP, MISMATCH, NOISE, SHARE
from .power import StoppingRule, smallest_rate_seen
from .sources import PARAMETERS, cite, given, named

SHRINKS = 0.1  # a median margin moved by less than this share is called unmoved
_NEIGHBOURS, _SHARED = "neighbours' correlation", "shared by a prompt's requests"
SMALLEST = 5  # distinct divergences below which nothing is said about where they are


def describe(setup: Setup) -> str:
    """Which model runs on what, in a sentence or two."""
    p, lengths = setup.p, sorted(map(len, setup.subject.prompts))
    where = "real Triton kernels on this GPU" if setup.tier == "live-gpu" else "GPU arithmetic modelled on this CPU"
    many = cite(f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens", prompt_lengths(setup))
    return (
        f"Model: `{p.model}`, {setup.label}. Logits are compared in {p.logits}. {many}, {given(p, 'tokens')} tokens generated each. Evidence tier: {setup.tier} ({where})."
    )


def prompt_lengths(setup: Setup) -> pd.DataFrame:
    """prompt (its number) and its tokens."""
    lengths = list(map(len, setup.subject.prompts))
    return named(pd.DataFrame({"prompt": range(len(lengths)), "tokens": lengths}), "prompts")


def _said(tables: Tables, name: str, form: str) -> str:
    """A fact as text, cited."""
    return cite(format(_fact(tables, name), form), tables["facts"], name=name)


def _fact(tables: Tables, name: str) -> float:
    return float(tables["facts"].set_index("name").value.loc[name])


def _true(tables: Tables, name: str) -> bool:
    return bool(_fact(tables, name))


def _batched(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame.concurrency > 1]


def _changed(tables: Tables) -> Rate:
    part = _batched(tables["outputs"])
    part = part[part.run.isin(["A", "B"])]
    return Rate(int(part["differ from alone"].sum()), int(part.requests.sum()))


def _twin(tables: Tables) -> Rate:
    part = _batched(tables["outputs"])
    part = part[part.run == "twin"]
    return Rate(int(part["differ from alone"].sum()), int(part.requests.sum()))


def _alone_twice(tables: Tables) -> Rate:
    part = tables["pairs"]
    part = part[part.concurrency == 1]
    return Rate(int(part["differ between A and B"].sum()), int(part.requests.sum()))


def power_sentence(p: Parameters) -> str:
    """What this run's number of requests can see, and whether it may stop early."""
    return (
        f"{given(p, 'requests', ',')} requests show a rate of "
        f"{cite(format(smallest_rate_seen(p.requests), '.2%'), PARAMETERS, name='requests')} or more at least once with "
        f"probability 0.95, "
        f"if they are independent. "
        + StoppingRule(p.stop_width).words.replace(f"{p.stop_width:g} wide", f"{given(p, 'stop_width', 'g')} wide")
    )


# --- Texts ---


def outputs_sentence(tables: Tables) -> str:
    part = _batched(tables["outputs"])
    part = (
        part[part.run.isin(["A", "B"])]
        .groupby("concurrency")[["differ from alone", "requests", "co-resident rows"]]
        .agg({"differ from alone": "sum", "requests": "sum", "co-resident rows": "mean"})
    )
    at = lambda text, **key: cite(text, tables["outputs"], **key)  # noqa: E731
    said = [
        at(f"{row['differ from alone'] / row.requests:.1%} at {level}", concurrency=level)
        + f" ({at(format(row['co-resident rows'], '.0f'), concurrency=level)} co-resident rows)"
        for level, row in part.iterrows()
    ]
    return (
        f"Requests whose text differs from the prompt alone: {', '.join(said)}; in all {at(_changed(tables))}. "
        f"The twin, every mechanism off: {at(_twin(tables), run='twin')}."
    )


def pairs_sentence(tables: Tables) -> str:
    part = _batched(tables["pairs"])
    said = [
        cite(f"{row.exact_match:.1%} at {row.concurrency}", tables["pairs"], concurrency=row.concurrency)
        for row in part.rename(columns={"exact match": "exact_match"}).itertuples()
    ]
    return (
        f"Two runs of the same engine, which differ in arrival jitter only, give the same text for {', '.join(said)}. "
        f"gllm issue 98 reports 75% at 8 and 42% at 32."
    )


def trend_sentence(tables: Tables) -> str:
    p = _fact(tables, "trend p")
    if math.isnan(p):
        return (
            "Whether the rate rises with concurrency cannot be said: nothing differed, or one concurrency above 1 was "
            "served."
        )
    rises = "rises" if p < 0.05 else "is not shown to rise"
    return (
        f"The share that differs {rises} with concurrency: {_said(tables, 'trend lowest', '.1%')} at the lowest "
        f"above 1, {_said(tables, 'trend highest', '.1%')} at the highest (permutation within prompts, one-sided p = "
        f"{_said(tables, 'trend p', '.2g')}). "
        "A mechanism that acts as soon as two requests share a step need not act more often with more of them."
    )


def text_verdicts(tables: Tables, prefix: str = "03.") -> list[dict]:
    changed, twin, alone = _changed(tables), _twin(tables), _alone_twice(tables)
    rows = tables["outputs"].groupby("concurrency")["co-resident rows"].mean()
    shared = bool(rows[rows.index > 1].min() > rows.loc[1])
    return [
        {
            "id": f"{prefix}texts-depend",
            "claim": "With the mechanisms on, some request's text depends on its batch",
            "holds": changed.events > 0,
            "value": changed.events,
            "expected": "> 0",
            "n": changed.trials,
            "interval": changed.interval,
            "negative_control": alone.events == 0 and twin.events == 0,
            "positive_control": _fact(tables, "positions moved") > 0,
            "occurred": shared,
        },
        {
            "id": f"{prefix}twin-invariant",
            "claim": "With every mechanism off, no request's text depends on its batch",
            "holds": twin.events == 0,
            "value": twin.events,
            "expected": 0,
            "n": twin.trials,
            "interval": twin.interval,
            "negative_control": alone.events == 0,
            "positive_control": changed.events > 0,
            "occurred": shared,
        },
    ]


# --- Bits ---


def ulp_sentence(tables: Tables) -> str:
    part = _batched(tables["ulp"])
    first, last = part.iloc[0], part.iloc[-1]
    same = tables["ulp"][tables["ulp"].concurrency == 1].iloc[0]
    at = lambda row, name, form: cite(format(row[name], form), tables["ulp"], concurrency=row.concurrency)  # noqa: E731
    return (
        f"On the same text, {at(last, 'hidden: other bits', '.0%')} of the final hidden state's values and "
        f"{at(last, 'logits: other bits', '.0%')} of the logits have other bits at concurrency "
        f"{at(last, 'concurrency', '.0f')} (median position); {at(first, 'hidden: other bits', '.0%')} and "
        f"{at(first, 'logits: other bits', '.0%')} at {at(first, 'concurrency', '.0f')}. A position's largest logit "
        f"difference is {at(last, 'logits: largest ULP, median', '.2g')} row-scaled ULP in the median and "
        f"{at(last, 'logits: largest ULP', '.2g')} at most. Forced alone, {at(same, 'positions moved', '.0%')} of "
        f"{at(same, 'positions', ',.0f')} positions moved."
    )


# --- Margins ---


def margins_sentence(tables: Tables) -> str:
    ratios = _batched(tables["ratios"])
    far = ratios.loc[(ratios.ratio - 1).abs().idxmax()]
    most = ratios.loc[ratios["margins that moved"].idxmax()]
    at = lambda text, row: cite(text, tables["ratios"], concurrency=row.concurrency)  # noqa: E731
    said = (
        f"Of the same positions, {at(format(most['margins that moved'], '.0%'), most)} of the margins move at the most, "
        f"but their median does not shrink: over all concurrencies it is furthest off at "
        f"{at(f'{far.concurrency:.0f}', far)}, {at(f'{far.ratio:.3f}', far)} times that alone "
        f"({at(f'{far.low:.3f} to {far.high:.3f}', far)})."
    )
    if not _fact(tables, "places"):
        return said + " No text diverged, so there is no margin at a divergence to look at."
    return said + (
        f" Texts part where the prompt *alone* is near a tie: over {_said(tables, 'places', '.0f')} distinct places the "
        f"median margin alone is {_said(tables, 'median_there', '.3g')}, "
        f"everywhere {_said(tables, 'median_everywhere', '.3g')}; their mean rank within their prompt is "
        f"{_said(tables, 'mean_rank', '.2f')} (0 smallest, {_said(tables, 'expected', '.2f')} by chance, p = "
        f"{_said(tables, 'p', '.2g')}). " + _collapse(tables)
    )


def _collapse(tables: Tables) -> str:
    if _fact(tables, "places") < SMALLEST:
        return "So few places leave open what decides where texts part."
    if _fact(tables, "p") >= 0.01:
        return "That is no more than chance gives: margins alone do not decide here where texts part."
    return (
        "So the collapse that the report describes is one of selection: batches do not make margins small, they decide "
        "where margins are small already."
    )


def margin_verdicts(tables: Tables, prefix: str = "03.") -> list[dict]:
    ratios, alone = _batched(tables["ratios"]), tables["ratios"][tables["ratios"].concurrency == 1].iloc[0]
    far = ratios.loc[(ratios.ratio - 1).abs().idxmax()]
    moved = bool((ratios["margins that moved"] > 0).any())
    places = int(_fact(tables, "places"))
    there = _fact(tables, "median_there") / _fact(tables, "median_everywhere") if places else math.nan
    return [
        {
            "id": f"{prefix}margins-unmoved",
            "claim": (
                f"Concurrency does not shrink margins: the median over the same positions stays within {SHRINKS:.0%}"
            ),
            "holds": bool((ratios.ratio - 1).abs().max() <= SHRINKS),
            "value": round(float(far.ratio), 4),
            "expected": f"{1 - SHRINKS} to {1 + SHRINKS}",
            "n": int(ratios.positions.sum()),
            "interval": (far.low, far.high),
            "negative_control": bool(alone.ratio == 1 and alone["margins that moved"] == 0),
            "positive_control": there < 1 - SHRINKS,
            "occurred": moved,
        },
        {
            "id": f"{prefix}near-ties",
            "claim": "Texts part where the prompt alone is near a tie",
            "holds": _fact(tables, "p") < 0.01,
            "value": _fact(tables, "mean_rank"),
            "expected": "below chance, p < 0.01",
            "n": f"{places} places",
            "negative_control": _fact(tables, "p of random places") >= 0.01,
            "positive_control": _fact(tables, "p of smallest margins") < 0.01,
            "occurred": places >= SMALLEST,
        },
    ]


# --- Spans ---


def spans_sentence(tables: Tables) -> str:
    part = _batched(tables["spans"])
    diverged, zero, censored = (int(part[name].sum()) for name in ("diverged", "second span 0", "censored"))
    if not diverged:
        return "No text diverged within the tokens generated."
    last = part.iloc[-1]
    at = lambda text: cite(text, tables["spans"], concurrency=last.concurrency)  # noqa: E731
    level = at(f"{last.concurrency:.0f}")
    half = f"at concurrency {level} fewer than half of the requests diverge within the text"
    if not math.isnan(last["median first span"]):
        half = (
            f"half of the requests at concurrency {level} have diverged after "
            f"{at(format(last['median first span'], '.0f'))} tokens"
        )
    ended = diverged - censored
    again = (
        f"{cite(f'{zero} of {ended}', tables['spans'])} second spans that end within the text are 0 tokens long"
        if ended
        else "no second span ends within the text"
    )
    agree = cite(f"{(part['agree after it'] * part.diverged).sum() / diverged:.0%}", tables["spans"])
    again = again if ended else again[0].upper() + again[1:]
    return (
        f"{half[0].upper()}{half[1:]}. Do texts meet again? {again}; after a divergence "
        f"{agree} of the tokens agree, at the same index."
    )


def pair_sentence(pair: Pair | None) -> str:
    if pair is None:
        return "No request of this run parts from its prompt's text alone, so there is no pair to show."
    gap = pair.candidates.groupby("served", sort=False).logit.agg(lambda v: float(v.iloc[0] - v.iloc[1]))
    rows = pair.candidates[pair.candidates.served == "alone"].token.tolist()
    near, both = pair.around(), pair.candidates
    at = lambda where: cite(f"{gap[where]:.3g}", both, served=where)  # noqa: E731
    return (
        f"At token {cite(pair.split, near, index=pair.split)} the text alone says {rows[0]!r}, and {rows[1]!r} comes "
        f"second by {at('alone')}; among {cite(pair.concurrency, PARAMETERS, name='parity_concurrency')} requests the "
        f"difference of the same two logits is {at('in the batch')}. From there on the texts share "
        f"{cite(f'{pair.agree_after:.0%}', pair.tokens)} of their tokens."
    )


# --- Prediction ---


def prediction_sentence(tables: Tables) -> str:
    errors = tables["errors"].set_index("model")
    at = lambda text, name: cite(text, tables["errors"], model=name)  # noqa: E731
    said = "; ".join(
        f"{name}: off by {at(f'{row.mean_absolute:.1%}', name)} in the mean (bias {at(f'{row.bias:+.1%}', name)}), Brier "
        f"score {at(f'{row.brier:.3f}', name)}"
        for name, row in errors.iterrows()
    )
    best = errors.loc["independent"]
    if math.isnan(best.skill):
        return f"{said}. Nothing diverged, so there was nothing to predict."
    return (
        f"{said}. Each concurrency's own observed share, told to every prompt alike, scores "
        f"{at(f'{best.reference:.3f}', 'independent')}: against that, which knows the answer and not the prompt, the "
        f"independent model's skill is {at(f'{best.skill:.2f}', 'independent')} "
        f"({_said(tables, 'skill low', '.2f')} to {_said(tables, 'skill high', '.2f')}, bootstrap over prompts)."
    )


def calibration_sentence(tables: Tables) -> str:
    """How far the bins of the independent model lie from the diagonal."""
    bins = tables["calibration"]
    part = bins[bins.model == "independent"]
    off = float(((part.predicted - part.observed).abs() * part.requests).sum() / part.requests.sum())
    top = part.iloc[-1]
    at = lambda text: cite(text, bins, model="independent", predicted=top.predicted)  # noqa: E731
    return (
        f"Calibration of the independent model: a bin's prediction is {cite(f'{off:.1%}', bins, model='independent')} off "
        f"its observation, averaged over requests; where it predicts most, "
        f"{at(f'{top.predicted:.0%}')}, {at(f'{top.observed:.0%} of {top.requests:,}')} requests diverged."
    )


def failure_sentence(tables: Tables) -> str:
    """What of the independent model's assumptions does not hold, at the largest concurrency with noise."""
    noise, worst = _batched(tables["noise"]), tables["failures"]
    part = noise[noise.rms > 0]
    if part.empty or worst.empty:
        return "There was no noise, so there is nothing to predict."
    last, first = part.iloc[-1], worst.iloc[0]
    at = lambda name, form: cite(format(last[name], form), tables["noise"], concurrency=last.concurrency)  # noqa: E731
    case = lambda name, form: cite(  # noqa: E731
        format(first[name], form), worst, prompt=first.prompt, concurrency=first.concurrency
    )
    return (
        f"Where it fails: the model draws noise anew for each request and position. At concurrency "
        f"{at('concurrency', '.0f')}, requests of the same prompt have {at(_SHARED, '.0%')} of the noise's variance in "
        f"common, so a prompt's requests diverge together or not at all; |noise| correlates {at(_NEIGHBOURS, '.2f')} "
        f"with that of the next position and {at('rank correlation with position', '.2f')} with the "
        f"position itself; the loudest prompt's is {at('loudest prompt over quietest', '.1f')} times the quietest's; "
        f"{at('exactly zero', '.0%')} of it is exactly zero. "
        f"{at('to a third candidate', '.0f')} of {at('changed tokens', '.0f')} changed tokens went to a third "
        f"candidate, which no margin of two knows of. The worst case is prompt {case('prompt', '.0f')} at concurrency "
        f"{case('concurrency', '.0f')}: predicted {case('predicted', '.0%')}, observed {case('observed', '.0%')}."
    )


def prediction_verdict(tables: Tables, prefix: str = "03.") -> dict:
    errors = tables["errors"].set_index("model")
    best = errors.loc["independent"]
    return {
        "id": f"{prefix}prediction",
        "claim": (
            "Solo margins and the noise of other prompts predict the share of diverged requests to within 10 points, "
            "and which prompts better than misplaced margins do"
        ),
        "holds": bool(best.mean_absolute <= 0.1 and best.brier < errors.loc["margins misplaced", "brier"]),
        "value": round(float(best.mean_absolute), 4),
        "expected": "<= 0.1",
        "n": int(_fact(tables, "requests predicted")),
        "negative_control": _fact(tables, "predicted alone") == 0 and _fact(tables, "observed alone") == 0,
        "positive_control": bool(errors.loc["margins misplaced", "brier"] > 0),
        "occurred": _fact(tables, "places") >= SMALLEST,
    }


# --- Parity ---


def _parity(tables: Tables, case: str, quantity: str, over: str = "prompts") -> pd.Series:
    found = tables["parity"]
    return found[(found.case == case) & (found.quantity == quantity) & (found.over == over)].iloc[0]


def parity_sentence(tables: Tables) -> str:
    said = []
    for case in dict.fromkeys(tables["parity"].case):
        mismatch, noise, gap = (_parity(tables, case, name, "requests") for name in (MISMATCH, NOISE, GAP))
        share, wide = (_parity(tables, case, name) for name in (SHARE, GAP))
        at = lambda text, row: cite(  # noqa: B023, E731
            text, tables["parity"], case=case, quantity=row.quantity, over=row.over
        )
        explained = at(f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})", share)
        part = (
            f"of which batch noise explains {explained}"
            if share.value == share.value
            else "so there is nothing to explain"
        )
        said.append(
            f"{case}: {at(f'{mismatch.value:.1%}', mismatch)} of texts disagree, {part}; noise alone would give "
            f"{at(f'{noise.value:.1%}', noise)}; the gap left is {at(f'{gap.value:.1%}', gap)} "
            f"({at(f'{wide.low:.1%} to {wide.high:.1%}', wide)} for prompts like these, "
            f"{at(f'{gap.low:.1%} to {gap.high:.1%}', gap)} for further requests of these, were they independent)"
        )
    return (
        f"{'. '.join(said)}. Alone, {_said(tables, 'solo gap', '.0f')} of {_said(tables, 'prompts', '.0f')} prompts' texts "
        f"differ between the engine and its twin."
    )


def parity_verdict(tables: Tables, prefix: str = "03.") -> dict:
    gap, noise = _parity(tables, "Y is X again", GAP), _parity(tables, "Y is X again", NOISE)
    return {
        "id": f"{prefix}parity-null",
        "claim": "An engine compared with itself under load shows no parity gap beyond its batch noise",
        "holds": gap.low <= 0.01,
        "value": round(float(gap.value), 4),
        "expected": "interval reaches 0.01 or less",
        "n": int(_fact(tables, "requests compared")),
        "interval": (gap.low, gap.high),
        "negative_control": _alone_twice(tables).events == 0,
        "positive_control": _fact(tables, "planted gap, low") > 0.01,
        "occurred": noise.value > 0,
    }


def compared(tables: Tables) -> float:
    """Requests that the parity comparison of the engine with itself rests on."""
    return _fact(tables, "requests compared")


# --- Recorded on a GPU, and all of it ---


def verdicts(tables: Tables, prefix: str = "03.") -> list[dict]:
    """Every verdict of the notebook."""
    return [
        *text_verdicts(tables, prefix),
        *margin_verdicts(tables, prefix),
        prediction_verdict(tables, prefix),
        parity_verdict(tables, prefix),
    ]


def recorded_sentence(found: dict[str, Tables]) -> str:
    """Which GPU runs are shown, or that none is."""
    if not found:
        return "No GPU run of this study is recorded: run it with `--device cuda -p record=data/recorded` to add one."
    return (
        "Recorded: "
        + "; ".join(
            f"{kind} ({tables['outputs'].label.iloc[0]}, {tables['outputs'].tokens_each.iloc[0]} tokens)"
            for kind, tables in found.items()
        )
        + "."
    )


SENTENCES = (
    outputs_sentence,
    pairs_sentence,
    trend_sentence,
    ulp_sentence,
    margins_sentence,
    spans_sentence,
    prediction_sentence,
    calibration_sentence,
    failure_sentence,
    parity_sentence,
)


def recorded_paragraph(tables: Tables) -> str:
    """All that a recorded run says, in sentences."""
    return "\n\n".join(say(tables) for say in SENTENCES)


def conclusion(setup: Setup, tables: Tables, recorded: dict[str, Tables]) -> str:
    """The answers, from this run's numbers and the recorded ones."""
    lines = []
    for tier, label, found in [(setup.tier, setup.label, tables)] + [
        ("recorded-gpu", t["outputs"].label.iloc[0], t) for t in recorded.values()
    ]:
        errors, noise = found["errors"].set_index("model"), _batched(found["noise"])
        null = _parity(found, "Y is X again", NOISE)
        off = cite(f"{errors.loc['independent', 'mean_absolute']:.1%}", found["errors"], model="independent")
        most = noise.loc[noise[_SHARED].idxmax()] if noise[_SHARED].notna().any() else noise.iloc[0]
        shared = cite(f"{most[_SHARED]:.0%}", found["noise"], concurrency=most.concurrency)
        itself = cite(f"{null.value:.1%}", found["parity"], case=null.case, quantity=null.quantity, over=null.over)
        lines.append(
            f"- **{label}** ({tier}): {cite(_changed(found), found['outputs'])} requests change text above concurrency 1, "
            f"{cite(_twin(found), found['outputs'], run='twin')} with "
            f"every mechanism off. {_collapse(found)} "
            f"Margins and the others' noise predict the share diverged to "
            f"{off}; requests of one prompt share up to {shared} of their noise, which no model "
            f"of independent draws knows. The engine disagrees with itself on {itself} of texts: a benchmark "
            f"that compares two single runs would take that for a parity gap."
        )
    return "\n".join(lines)
