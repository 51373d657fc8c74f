"""Two engines disagree on greedy texts: how much of that would batch noise alone give, and how much is a parity gap?

Model: under its load, engine X gives prompt i a text drawn from a distribution P_i, engine Y from Q_i, each request on
its own. Two draws of X agree with probability sum P_i^2, of Y with sum Q_i^2, of X and Y with sum P_i Q_i, and by
Cauchy
and Schwarz

    sum P_i Q_i  <=  sqrt(sum P_i^2 x sum Q_i^2),

with equality exactly when P_i = Q_i. So the root is the agreement that noise allows two engines without a gap, and

    agreement of X and Y = (agreement that noise allows) x (1 - gap),

the gap being 0 for engines that one could not tell apart under load and 1 where no text of one is a text of the other.
Where Y's noise is not known (one request a prompt), it is taken to be X's, and then the gap is Abbott's correction
(1925)
of X-Y mismatch for X-X mismatch. All three agreements are averaged over prompts before the gap is taken, so a prompt
counts by how much noise leaves to see of it. Texts are compared up to the length that was generated: a gap can only
grow
with it. Intervals are bootstrapped, over requests for these prompts, or over prompts and requests for all one might
ask.
The former take requests as independent; where those of one run share steps, and with them their noise, only the latter,
which resample a prompt whole, allow for that.
"""

from typing import Literal

import numpy as np
import pandas as pd

from ..common import BadInput, Rate

MISMATCH = "X and Y disagree"
NOISE = "batch noise alone would give"
GAP = "parity gap"
SHARE = "share of the disagreement that batch noise explains"


def separate(
    x: pd.DataFrame,
    y: pd.DataFrame,
    over: Literal["requests", "prompts"] = "requests",
    draws: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> pd.DataFrame:
    """Take batch noise and parity apart.

    x: columns run ("A" or "B"), prompt, text, a row a request of engine X; y: prompt, text, of engine Y. Prompts served
    by all three runs count, each equally. over: what the interval is about, further requests of these prompts
    ("requests") or of prompts like these ("prompts").
    Returns quantity, value, low, high for MISMATCH, NOISE, GAP and SHARE. value is clipped to 0 ... 1 as its interval
    is;
    SHARE is NaN where X and Y never disagree. Raises BadInput when no prompt was served by all three runs.
    """
    counts = _counts(x[x.run == "A"], x[x.run == "B"], y)
    random = np.random.default_rng(seed)
    # One request in n + 1 says any text that the prompt got from anyone: few requests that agree do not prove that
    # all do.
    pooled = sum(c / c.sum(-1, keepdims=True) for c in counts) / len(counts)
    drawn = _agreements(*(_resampled(c, pooled, draws, random) for c in counts))
    both, noise = _agreements(*counts)
    # A root is concave: by the delta method its estimate is low by variance / (8 x value^1.5). Without Y's own noise
    # it is exact.
    plain = _agreements(*(_resampled(c, c / c.sum(-1, keepdims=True), draws, random) for c in counts))[1]
    low_by = np.where(counts[2].sum(-1) > 1, plain.var(0) / (8 * np.maximum(noise, 1e-12) ** 1.5), 0.0)
    allowed = np.sqrt(noise)
    allowed = allowed + np.minimum(low_by, allowed)
    found = _quantities(both, allowed)
    sample = _quantities(*_picked(drawn[0], np.sqrt(drawn[1]), over, random))
    # Requests drawn again from n vary less than new ones would, by (n - 1) / n.
    repeated = [size for c in counts for size in c.sum(-1) if size > 1]
    widen = (min(repeated) / (min(repeated) - 1)) ** 0.5 if repeated else 1.0
    tails = (1 - confidence) / 2
    rows = []
    for name, value, values in zip((MISMATCH, NOISE, GAP, SHARE), found, sample):
        # They also repeat themselves, and so agree more: only the spread is taken from them.
        spread = (
            np.nanquantile(values - np.nanmean(values), [tails, 1 - tails])
            if np.isfinite(value)
            else np.full(2, np.nan)
        )
        ends = (value, *(value + widen * spread))
        rows.append(
            {"quantity": name, **{key: float(np.clip(v, 0, 1)) for key, v in zip(("value", "low", "high"), ends)}}
        )
    return pd.DataFrame(rows)


def side_by_side(x: pd.DataFrame, y: pd.DataFrame) -> dict[str, Rate]:
    """Request by request, as a benchmark without this estimator compares: X's run A against its run B, and against Y.
    Columns as in `separate`, and request, by which the rows are matched."""
    a, b = (x[x.run == run].set_index("request").text for run in "AB")
    texts = pd.concat({"A": a, "B": b, "Y": y.set_index("request").text}, axis=1).dropna()
    return {
        name: Rate(int((texts.A != texts[other]).sum()), len(texts))
        for name, other in (("A and B of X", "B"), ("A of X and Y", "Y"))
    }


def _counts(*samples: pd.DataFrame) -> list[np.ndarray]:
    """How often each sample gave each text: int [prompts, texts a sample], the texts numbered within their prompt."""
    shared = sorted(set.intersection(*(set(sample.prompt) for sample in samples)))
    if not shared:
        raise BadInput("no prompt was served in all of X's runs A and B and by Y: serve the same prompts.")
    whole = pd.concat(samples, keys=range(len(samples)), names=["sample", None]).reset_index("sample")
    whole = whole[whole.prompt.isin(shared)]
    number = whole.groupby("prompt").text.transform(lambda texts: pd.factorize(texts)[0]).astype(int)
    place = whole.prompt.map({prompt: i for i, prompt in enumerate(shared)})
    found = np.zeros((len(samples), len(shared), number.max() + 1), dtype=np.int64)
    np.add.at(found, (whole["sample"].to_numpy(), place.to_numpy(), number.to_numpy()), 1)
    return list(found)


def _agreements(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chance that X and Y agree, and that X does with itself times that Y does: float [..., prompts] from counts
    [..., prompts, texts]."""
    x = a + b
    size = lambda c: c.sum(-1)  # noqa: E731
    of_x = (a * b).sum(-1) / (size(a) * size(b))
    pairs = size(y) * (size(y) - 1)
    of_y = np.where(pairs > 0, ((y * y).sum(-1) - size(y)) / np.maximum(pairs, 1), of_x)
    return (x * y).sum(-1) / (size(x) * size(y)), of_x * of_y


def _quantities(agree: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """The four quantities, unclipped: float [4, ...] from agreements [..., prompts]."""
    agree, allowed = agree.mean(-1), allowed.mean(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = np.where(allowed > 0, 1 - agree / allowed, np.nan)
        share = np.where(agree < 1, (1 - allowed) / (1 - agree), np.nan)
    return np.stack([1 - agree, 1 - allowed, gap, share])


def _resampled(counts: np.ndarray, pooled: np.ndarray, draws: int, random: np.random.Generator) -> np.ndarray:
    """int [draws, prompts, texts]: each prompt's n requests drawn anew from its own, one in n + 1 from ``pooled``."""
    size = counts.sum(-1)
    return random.multinomial(size, (counts + pooled) / (size[:, None] + 1), size=(draws, len(size)))


def _picked(
    agree: np.ndarray, allowed: np.ndarray, over: str, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Both [draws, prompts]: as they are, or with each draw's prompts drawn anew."""
    if over not in ("requests", "prompts"):
        raise BadInput(f"over = {over!r} is unknown: give requests or prompts.")
    if over == "requests":
        return agree, allowed
    pick = random.integers(0, agree.shape[1], size=agree.shape)
    return np.take_along_axis(agree, pick, 1), np.take_along_axis(allowed, pick, 1)
