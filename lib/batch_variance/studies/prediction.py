"""How often should texts change, given only what each prompt's margins are alone and how large the logit noise is?

A token changes when noise outweighs the margin between the best two logits, so what counts is the noise of their
*difference*, measured here on a text that is forced, where positions line up. A prompt's own margins are met with the
noise of *other* prompts; its observed divergences are never looked at. Three models of the noise:

    gaussian     N(0, rms of the noise) at each position, positions independent;
    independent  a draw from the measured noise at each position, positions independent;
    path         the noise of one request along its positions, kept together as it was measured.

Each leaves something out, and `noise_structure` and `where_it_fails` measure what.
"""

import numpy as np
import pandas as pd
from scipy.stats import norm, spearmanr

from ..common import BadInput

MODELS = ("gaussian", "independent", "path")


def predict(
    margins: pd.DataFrame, noise: pd.DataFrame, model: str = "independent", spare_own: bool = True
) -> pd.DataFrame:
    """Share of requests expected to have diverged by each token.

    margins: prompt, position, margin (solo; >= 0), every prompt with positions 0 ... T - 1. noise: concurrency, run,
    request, prompt, position, noise: the change of (best logit - second logit), the candidates being those of the row
    alone. spare_own: leave out the prompt's own noise. Returns concurrency, prompt, position, predicted.
    Raises BadInput for an unknown model, and where leaving out a prompt's own noise leaves none.
    """
    if model not in MODELS:
        raise BadInput(f"noise model {model!r} is unknown: give one of {', '.join(MODELS)}.")
    wide = margins.pivot(index="prompt", columns="position", values="margin").sort_index(axis=1)
    rows = []
    for level, part in noise.groupby("concurrency"):
        paths = part.pivot(index=["run", "request", "prompt"], columns="position", values="noise").reindex(
            columns=wide.columns
        )
        owner = paths.index.get_level_values("prompt").to_numpy()
        for prompt, margin in wide.iterrows():
            others = paths[owner != prompt] if spare_own else paths
            if others.empty:
                raise BadInput(
                    f"at concurrency {level} only prompt {prompt} has measured noise: serve more prompts, or keep its "
                    f"own."
                )
            by_token = _diverged(margin.to_numpy(float), others.to_numpy(float), model)
            rows += [
                {"concurrency": level, "prompt": prompt, "position": position, "predicted": value}
                for position, value in zip(wide.columns, by_token)
            ]
    return pd.DataFrame(rows)


def _diverged(margin: np.ndarray, paths: np.ndarray, model: str) -> np.ndarray:
    """float [T]: chance to have diverged by each token. margin: [T]; paths: noise [requests, T]."""
    if model == "path":
        return np.maximum.accumulate(_flips(margin, paths), axis=1).mean(0)
    if model == "gaussian":
        rms = float(np.sqrt((paths**2).mean()))
        hazard = norm.cdf(-margin / rms) if rms > 0 else np.zeros_like(margin)
    else:
        hazard = _flips(margin, paths.reshape(-1, 1)).mean(0)
    return 1 - np.cumprod(1 - hazard)


def _flips(margin: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """float [requests, T]: whether noise overturns the margin. Noise that makes an exact tie leaves the choice to the
    tie
    rule, which takes either candidate as its number falls: a half; where there was a tie already, nothing moved."""
    return (noise < -margin) + 0.5 * ((noise == -margin) & (noise != 0))


def observe(requests: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Share of requests that had diverged by each token. requests: concurrency, prompt, first_divergence (-1: never).
    Returns concurrency, prompt, position, requests, observed."""
    position = np.arange(tokens)
    rows = []
    for (level, prompt), part in requests.groupby(["concurrency", "prompt"]):
        split = part.first_divergence.to_numpy()
        by_token = ((split[:, None] >= 0) & (split[:, None] <= position)).mean(0)
        rows += [
            {"concurrency": level, "prompt": prompt, "position": int(t), "requests": len(part), "observed": float(v)}
            for t, v in zip(position, by_token)
        ]
    return pd.DataFrame(rows)


def matched(predicted: pd.DataFrame, observed: pd.DataFrame) -> pd.DataFrame:
    """Both by concurrency, prompt and position."""
    return predicted.merge(observed, on=["concurrency", "prompt", "position"], validate="one_to_one")


def by_concurrency(both: pd.DataFrame) -> pd.DataFrame:
    """`matched`, averaged over the requests of a concurrency: concurrency, position, requests, predicted, observed."""
    weighted = both.assign(predicted=both.predicted * both.requests, observed=both.observed * both.requests)
    found = weighted.groupby(["concurrency", "position"], as_index=False)[["requests", "predicted", "observed"]].sum()
    return found.assign(predicted=found.predicted / found.requests, observed=found.observed / found.requests)


def error(both: pd.DataFrame) -> dict[str, float]:
    """How far a prediction is off, at the last token.

    mean_absolute: of (predicted - observed) share, over concurrencies; bias: the same with its sign; brier: mean over
    requests of (predicted - diverged)^2; reference: Brier score of predicting each concurrency's own observed share for
    every prompt, which is told the answer and not the prompt; skill: 1 - brier / reference, NaN where nothing varies.
    """
    last = both[both.position == both.position.max()]
    levels = by_concurrency(last)
    weight = last.requests / last.requests.sum()
    share = last.concurrency.map(levels.set_index("concurrency").observed)
    noise = last.observed * (1 - last.observed)  # mean of (diverged - observed)^2 over a prompt's requests
    brier, reference = (
        float((weight * ((guess - last.observed) ** 2 + noise)).sum()) for guess in (last.predicted, share)
    )
    return {
        "mean_absolute": float((levels.predicted - levels.observed).abs().mean()),
        "bias": float((levels.predicted - levels.observed).mean()),
        "brier": brier,
        "reference": reference,
        "skill": 1 - brier / reference if reference > 0 else float("nan"),
    }


def errors(margins: pd.DataFrame, noise: pd.DataFrame, observed: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """`error` of every model, and of a control: the independent model with each prompt's margins given to another
    prompt and shuffled along the text, which keeps how many near ties there are and forgets where."""
    rows = [{"model": name, **error(matched(predict(margins, noise, name), observed))} for name in MODELS]
    wrong = matched(predict(misplaced(margins, seed), noise), observed)
    return pd.DataFrame([*rows, {"model": "margins misplaced", **error(wrong)}])


def misplaced(margins: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """The same margins, each at the place of another: shuffled over prompts and positions together."""
    return margins.assign(margin=np.random.default_rng(seed).permutation(margins.margin.to_numpy()))


def skill_interval(
    both: pd.DataFrame, draws: int = 1000, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval of the skill over prompts; NaNs with fewer than two."""
    last = both[both.position == both.position.max()]
    prompts = last.prompt.unique()
    if len(prompts) < 2:
        return (float("nan"), float("nan"))
    random, parts = np.random.default_rng(seed), {prompt: part for prompt, part in last.groupby("prompt")}
    found = []
    for _ in range(draws):
        pick = random.choice(prompts, len(prompts))
        found.append(error(pd.concat([parts[p] for p in pick]))["skill"])
    tails = (1 - confidence) / 2
    low, high = np.nanquantile(found, [tails, 1 - tails]) if np.isfinite(found).any() else (np.nan, np.nan)
    return (float(low), float(high))


def calibration(both: pd.DataFrame, bins: int = 8) -> pd.DataFrame:
    """Predicted against observed share at the last token, prompts and concurrencies binned by the prediction.
    Returns predicted and observed (means over requests), requests and groups, a row a bin that holds any."""
    last = both[both.position == both.position.max()]
    place = np.minimum((last.predicted * bins).astype(int), bins - 1)
    rows = []
    for _, part in last.groupby(place):
        weight = part.requests / part.requests.sum()
        rows.append(
            {
                "predicted": float((weight * part.predicted).sum()),
                "observed": float((weight * part.observed).sum()),
                "requests": int(part.requests.sum()),
                "groups": len(part),
            }
        )
    return pd.DataFrame(rows)


# --- What the models leave out ---


def noise_structure(noise: pd.DataFrame) -> pd.DataFrame:
    """What would have to be so for the independent model to be right, by concurrency.

    noise: as in `predict`, and flipped (the largest logit was another's under the forced text), third (it was neither
    candidate's). Returns rms, share that is exactly zero, share of the variance that requests of one prompt have in
    common
    (the mean of a prompt and position explains it; 0 for draws of their own), correlation of |noise| between
    neighbouring
    positions of a request, rank correlation of |noise| with the position, ratio of the loudest to the quietest prompt's
    rms, changed tokens and how many of them went to a third candidate.
    """
    rows = []
    for level, part in noise.groupby("concurrency"):
        size = part.assign(size=part.noise.abs())
        wide = size.pivot(index=["run", "request", "prompt"], columns="position", values="size").to_numpy()
        rms = part.groupby("prompt").noise.agg(lambda v: float(np.sqrt((v**2).mean())))
        rows.append(
            {
                "concurrency": level,
                "positions": len(part),
                "rms": float(np.sqrt((part.noise**2).mean())),
                "exactly zero": float((part.noise == 0).mean()),
                "shared by a prompt's requests": _shared(part),
                "neighbours' correlation": _correlation(wide[:, :-1].ravel(), wide[:, 1:].ravel()),
                "rank correlation with position": float(spearmanr(size["size"], size.position).statistic)
                if size["size"].nunique() > 1 and size.position.nunique() > 1
                else float("nan"),
                "loudest prompt over quietest": float(rms.max() / rms.min()) if rms.min() > 0 else float("nan"),
                "changed tokens": int(part.flipped.sum()),
                "to a third candidate": int(part.third.sum()),
            }
        )
    return pd.DataFrame(rows)


def _shared(part: pd.DataFrame) -> float:
    """Share of the noise's variance that lies between (prompt, position) groups, by one-way analysis of variance."""
    groups = part.groupby(["prompt", "position"]).noise
    size, total = groups.size(), len(part)
    if len(size) < 2 or len(size) == total or part.noise.std() == 0:
        return float("nan")
    within = float(((groups.var(ddof=0) * size).sum()) / (total - len(size)))
    between = float((size * (groups.mean() - part.noise.mean()) ** 2).sum() / (len(size) - 1))
    typical = (total - (size**2).sum() / total) / (len(size) - 1)
    own = max(between - within, 0.0) / typical
    return own / (own + within) if own + within > 0 else float("nan")


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if a.size > 1 and a.std() > 0 and b.std() > 0 else float("nan")


def where_it_fails(both: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The prompts and concurrencies where prediction and observation at the last token lie furthest apart."""
    last = both[both.position == both.position.max()]
    last = last.assign(difference=last.predicted - last.observed)
    order = last.difference.abs().sort_values(ascending=False, kind="stable").index[:count]
    return last.loc[order, ["concurrency", "prompt", "requests", "predicted", "observed", "difference"]].reset_index(
        drop=True
    )
