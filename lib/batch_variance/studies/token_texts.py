"""Texts token by token, alone and in a batch, with margins and noise along them: what an explorer leafs through."""

from functools import cache
from typing import Callable

import numpy as np
import pandas as pd


def token_table(
    requests: pd.DataFrame,
    positions: pd.DataFrame,
    say: Callable[[int], str],
    texts: list[str],
    prompts: int = 8,
) -> pd.DataFrame:
    """A row a (prompt, concurrency, position), for the prompts that part most often.

    requests: freely decoded, with concurrency, run, request, prompt, text and alone (token ids joined by blanks) and
    first_divergence (-1: none). Of a prompt at a concurrency the request is shown that parts about in the middle of
    those that do, else the first. positions: forced to the text alone, with concurrency, request, prompt, position,
    solo_margin, margin, best_logit and second_logit. say: a token's text; texts: the prompts.

    Returns prompt, concurrency, position, alone, together, margin_alone, margin_together and noise (how far the batch
    moved the difference of the two best logits). The three are along the text alone, where both have the same context.
    """
    say = cache(say)
    free = requests[requests.run.isin(["A", "B"]) & (requests.concurrency > 1)]
    often = (free.first_divergence >= 0).groupby(free.prompt).sum().sort_values(ascending=False, kind="stable")
    forced = positions.sort_values(["concurrency", "prompt", "request"]).drop_duplicates(
        ["concurrency", "prompt", "position"]
    )
    forced = forced.assign(noise=(forced.best_logit - forced.second_logit - forced.solo_margin).abs())
    forced = forced.set_index(["concurrency", "prompt", "position"])[["solo_margin", "margin", "noise"]]
    frames = []
    for number in often.index[:prompts]:
        for level, part in free[free.prompt == number].groupby("concurrency"):
            split = part[part.first_divergence >= 0].sort_values("first_divergence", kind="stable")
            row = split.iloc[len(split) // 2] if len(split) else part.iloc[0]
            both = [[say(int(token)) for token in text.split()] for text in (row.alone, row.text)]
            length = max(map(len, both))
            alone, together = (text + [""] * (length - len(text)) for text in both)
            index = pd.MultiIndex.from_product([[level], [number], np.arange(length)])
            frames.append(
                forced.reindex(index)
                .reset_index(drop=True)
                .assign(
                    prompt=texts[number], concurrency=level, position=np.arange(length), alone=alone, together=together
                )
            )
    names = {"solo_margin": "margin_alone", "margin": "margin_together"}
    columns = ["prompt", "concurrency", "position", "alone", "together", "margin_alone", "margin_together", "noise"]
    return pd.concat(frames, ignore_index=True).rename(columns=names)[columns]
