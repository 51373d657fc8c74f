"""Texts token by token, alone and in a batch, with margins and noise along them: what an explorer leafs through."""

from functools import cache
from typing import Callable

import numpy as np
import pandas as pd


def token_table(requests: pd.DataFrame, say: Callable[[int], str], texts: list[str], prompts: int = 8) -> pd.DataFrame:
    """A row a (prompt, concurrency, position), for the prompts that part most often.

    requests: freely decoded, with concurrency, run, request, prompt, text and alone (token ids), first_divergence
    (-1: none), margins and runners_up along the text, alone_margins and alone_runners_up along the text alone, each
    joined by blanks. Of a prompt at a concurrency the request is shown that parts about in the middle of those that do,
    else the first. say: a token's text; texts: the prompts.

    Returns prompt, concurrency, position, alone, together, margin_alone, margin_together and noise. Each margin is the
    one that the engine met where it chose the token beside it, so past the split the two are margins of two contexts.
    noise: how far the batch moved the difference of the two best candidates' logits; NaN where the contexts differ, and
    where the batch has another pair of candidates, since then their difference alone is not known.
    """
    say = cache(say)
    free = requests[requests.run.isin(["A", "B"]) & (requests.concurrency > 1)]
    often = (free.first_divergence >= 0).groupby(free.prompt).sum().sort_values(ascending=False, kind="stable")
    frames = []
    for number in often.index[:prompts]:
        for level, part in free[free.prompt == number].groupby("concurrency"):
            split = part[part.first_divergence >= 0].sort_values("first_divergence", kind="stable")
            row = split.iloc[len(split) // 2] if len(split) else part.iloc[0]
            frames.append(_along(row, say).assign(prompt=texts[number], concurrency=level))
    columns = ["prompt", "concurrency", "position", "alone", "together", "margin_alone", "margin_together", "noise"]
    return pd.concat(frames, ignore_index=True)[columns]


def _along(row: pd.Series, say: Callable[[int], str]) -> pd.DataFrame:
    """One request beside its prompt alone, from the two runs' own records."""
    ids, others = ([_numbers(row[name]) for name in pair] for pair in (("alone", "text"), _SECOND))
    margins = [_numbers(row[name], float) for name in ("alone_margins", "margins")]
    length = max(map(len, ids))
    alone, together = ([say(token) for token in text] + [""] * (length - len(text)) for text in ids)
    known = [values + [np.nan] * (length - len(values)) for values in margins]
    shared = length if row.first_divergence < 0 else int(row.first_divergence) + 1  # the contexts are equal so far
    noise = np.full(length, np.nan)
    for place in range(min(shared, *map(len, ids))):
        (a, b), (c, d) = ((text[place], other[place]) for text, other in zip(ids, others))
        if {a, b} == {c, d}:  # the same two candidates, perhaps in the other order
            noise[place] = abs((1 if a == c else -1) * known[1][place] - known[0][place])
    return pd.DataFrame(
        {
            "position": np.arange(length),
            "alone": alone,
            "together": together,
            "margin_alone": known[0],
            "margin_together": known[1],
            "noise": noise,
        }
    )


_SECOND = ("alone_runners_up", "runners_up")


def _numbers(text: str, kind: type = int) -> list:
    return [kind(one) for one in text.split()]
