"""Where texts part from the same prompt's text alone, how long they stay with it, and what the margins were there.

Tables in, tables out. A request's first span is the tokens before its first divergence. Its second span is the tokens
right after the first that differs which agree again, at the same index, until the next that differs: 0 where two in a
row
differ. Either is censored where the text ends first.
"""

import warnings

import numpy as np
import pandas as pd
from scipy.stats import CensoredData, ecdf


def survival(requests: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Kaplan-Meier: share of requests still with the text alone after so many tokens, by concurrency.

    requests: concurrency, first_divergence (-1: none within ``tokens``). Returns concurrency, tokens (0 ...
    ``tokens``), share,
    low, high (pointwise 95%, log-log; as if requests were independent).
    """
    rows = []
    for level, part in requests.groupby("concurrency"):
        split = part.first_divergence.to_numpy()
        found = curve(split[split >= 0] + 1, np.full((split < 0).sum(), tokens), tokens)
        rows += [{"concurrency": level, "tokens": t, "share": s, "low": low, "high": high} for t, s, low, high in found]
    return pd.DataFrame(rows)


def curve(ended: np.ndarray, censored: np.ndarray, last: int) -> list[tuple[int, float, float, float]]:
    """Kaplan-Meier survival as (t, share, low, high) for t = 0 ... last. ended, censored: when."""
    time = range(last + 1)
    if not len(ended):
        return [(t, 1.0, 1.0, 1.0) for t in time]
    found = ecdf(CensoredData(uncensored=ended, right=censored)).sf
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # where nothing is left the log-log bounds are undefined: replaced below
        bounds = found.confidence_interval(method="log-log")
    place = np.searchsorted(found.quantiles, time, side="right")
    step = lambda f: np.array([1.0, *f.probabilities])[place]  # noqa: E731
    share, low, high = step(found), step(bounds.low), step(bounds.high)
    return list(zip(time, share, np.where(np.isnan(low), share, low), np.where(np.isnan(high), share, high)))


def second_spans(requests: pd.DataFrame) -> pd.DataFrame:
    """A row a diverged request: first_span, second_span, censored (the text ended before it differed again), and the
    share
    of the tokens after the first divergence that agree.

    requests: concurrency, run, request, prompt, text and alone (token ids, joined by blanks), first_divergence.
    """
    rows = []
    for r in requests[requests.first_divergence >= 0].itertuples(index=False):
        here, alone = np.array(r.text.split()), np.array(r.alone.split())
        shared = min(len(here), len(alone))
        after = here[r.first_divergence + 1 : shared] == alone[r.first_divergence + 1 : shared]
        again = np.flatnonzero(~after)
        rows.append(
            {
                "concurrency": r.concurrency,
                "run": r.run,
                "request": r.request,
                "prompt": r.prompt,
                "first_span": r.first_divergence,
                "second_span": int(again[0]) if again.size else len(after),
                "censored": not again.size,
                "agree_after": float(after.mean()) if len(after) else np.nan,
            }
        )
    columns = ["concurrency", "run", "request", "prompt", "first_span", "second_span", "censored", "agree_after"]
    # An empty frame would lose the types, and ~censored with them.
    return pd.DataFrame(rows, columns=columns).astype({"censored": bool, "second_span": int, "agree_after": float})


def span_summary(requests: pd.DataFrame, spans: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """By concurrency: requests, diverged, median first span (blank where fewer than half diverged), second spans that
    are
    0, median second span among those that ended, censored ones."""
    rows = []
    for level, part in requests.groupby("concurrency"):
        own = spans[spans.concurrency == level]
        reach = survival(part, tokens)
        ended = own[~own.censored]
        rows.append(
            {
                "concurrency": level,
                "requests": len(part),
                "diverged": len(own),
                "median first span": float((reach.share > 0.5).sum() - 1) if (reach.share <= 0.5).any() else np.nan,
                "second span 0": int((ended.second_span == 0).sum()),
                "median second span": float(ended.second_span.median()),
                "censored": int(own.censored.sum()),
                "agree after it": float(own.agree_after.mean()),
            }
        )
    return pd.DataFrame(rows)


# --- Margins ---


def median_ratio(positions: pd.DataFrame, draws: int = 500, seed: int = 0) -> pd.DataFrame:
    """Does the batch shrink margins? By concurrency, the median margin in the batch over the median margin alone of the
    *same* positions (forced text), with a 95% bootstrap interval over prompts.

    positions: concurrency, prompt, margin, solo_margin.
    """
    random = np.random.default_rng(seed)
    rows = []
    for level, part in positions.groupby("concurrency"):
        groups = [(g.margin.to_numpy(), g.solo_margin.to_numpy()) for _, g in part.groupby("prompt")]
        found = []
        for _ in range(draws):
            pick = random.integers(0, len(groups), len(groups))
            found.append(_ratio(*(np.concatenate([groups[i][side] for i in pick]) for side in (0, 1))))
        low, high = np.nanquantile(found, [0.025, 0.975])
        rows.append(
            {
                "concurrency": level,
                "positions": len(part),
                "median margin alone": float(part.solo_margin.median()),
                "median margin in the batch": float(part.margin.median()),
                "ratio": _ratio(part.margin, part.solo_margin),
                "low": float(low),
                "high": float(high),
                "margins that moved": float((part.margin != part.solo_margin).mean()),
            }
        )
    return pd.DataFrame(rows)


def _ratio(margin, solo) -> float:
    base = float(np.median(solo))
    return float(np.median(margin)) / base if base > 0 else float("nan")


def at_divergence(requests: pd.DataFrame, margins: pd.DataFrame) -> pd.DataFrame:
    """A row a diverged request: the margin at its first divergence, in the batch and of the same position alone.

    requests: concurrency, run, request, prompt, first_divergence, margins (numbers joined by blanks); margins: prompt,
    position, margin (alone).
    """
    alone = margins.set_index(["prompt", "position"]).margin
    rows = [
        {
            "concurrency": r.concurrency,
            "run": r.run,
            "request": r.request,
            "prompt": r.prompt,
            "position": r.first_divergence,
            "margin": float(r.margins.split()[r.first_divergence]),
            "solo_margin": float(alone.loc[r.prompt, r.first_divergence]),
        }
        for r in requests[requests.first_divergence >= 0].itertuples(index=False)
    ]
    return pd.DataFrame(rows, columns=["concurrency", "run", "request", "prompt", "position", "margin", "solo_margin"])


def near_ties(places: pd.DataFrame, margins: pd.DataFrame, draws: int = 10_000, seed: int = 0) -> dict:
    """Do texts part where the prompt alone is near a tie? A permutation test over the distinct places (prompt,
    position) of
    first divergences, so that many requests parting at one place count once.

    The statistic is the mean rank of the place's solo margin among its prompt's positions, 0 for the smallest and 1 for
    the largest; under the null places are any positions of the prompt, as many and as different as there are.
    Returns places, mean_rank, expected (under the null), p (one-sided, never 0) and the medians of the solo margins at
    these places and overall.
    """
    distinct = places[["prompt", "position"]].drop_duplicates()
    ranks = {
        prompt: g.sort_values("position").margin.rank(method="average").sub(1).div(max(len(g) - 1, 1)).to_numpy()
        for prompt, g in margins.groupby("prompt")
    }
    alone = margins.set_index(["prompt", "position"]).margin
    if distinct.empty:
        return {
            "places": 0,
            "mean_rank": np.nan,
            "expected": np.nan,
            "p": np.nan,
            "median_there": np.nan,
            "median_everywhere": float(alone.median()),
        }
    random, total = np.random.default_rng(seed), np.zeros(draws)
    for prompt, count in distinct.prompt.value_counts().items():
        drawn = random.random((draws, len(ranks[prompt]))).argsort(1)[:, :count]
        total += ranks[prompt][drawn].sum(1)
    found = float(np.mean([ranks[r.prompt][r.position] for r in distinct.itertuples()]))
    null = total / len(distinct)
    return {
        "places": len(distinct),
        "mean_rank": found,
        "expected": float(null.mean()),
        "p": float((1 + (null <= found + 1e-12).sum()) / (draws + 1)),
        "median_there": float(np.median([alone.loc[r.prompt, r.position] for r in distinct.itertuples()])),
        "median_everywhere": float(alone.median()),
    }


def trend(requests: pd.DataFrame, draws: int = 2000, seed: int = 0) -> dict:
    """Does the share that differs from alone rise with concurrency, among concurrencies above 1?

    Permutation test, one-sided: the correlation of (differs) with log2(concurrency), concurrencies shuffled among the
    requests of each prompt. requests: concurrency, prompt, first_divergence. Returns correlation, p, lowest and highest
    concurrency's share; NaNs with fewer than two concurrencies or where nothing differs.
    """
    part = requests[requests.concurrency > 1]
    shares = (part.first_divergence >= 0).groupby(part.concurrency).mean()
    level, differs = np.log2(part.concurrency.to_numpy(float)), (part.first_divergence >= 0).to_numpy(float)
    ends = (
        {"lowest": float(shares.iloc[0]), "highest": float(shares.iloc[-1])}
        if len(shares)
        else {"lowest": np.nan, "highest": np.nan}
    )
    if len(shares) < 2 or differs.std() == 0:
        return {"correlation": np.nan, "p": np.nan, **ends}
    random, groups = (
        np.random.default_rng(seed),
        [np.flatnonzero(part.prompt == prompt) for prompt in part.prompt.unique()],
    )
    centred = differs - differs.mean()
    found, null = float(level @ centred), []
    for _ in range(draws):
        shuffled = level.copy()
        for group in groups:
            shuffled[group] = random.permutation(level[group])
        null.append(shuffled @ centred)
    size = np.sqrt(((level - level.mean()) ** 2).sum() * (centred**2).sum())
    return {"correlation": found / size, "p": float((1 + (np.array(null) >= found - 1e-9).sum()) / (draws + 1)), **ends}
