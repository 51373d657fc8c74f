"""Which combinations of mechanisms to serve, and what each mechanism is worth from the counts that came back.

A set of mechanisms is a coalition; its worth is the share of requests whose text changes when exactly these are on. A
mechanism's share of the budget is its Shapley value (Shapley, 1953), exact over the full factorial, from sampled orders
(Castro, Gomez and Tejada, 2009), or the mean of its first-in and last-out effects. Intervals resample prompts, since
the requests of one prompt are not independent.
"""

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
import pandas as pd

from ..common import BadInput

DESIGNS = ("ends", "orders", "factorial")
RESAMPLES = 2000

Coalition = tuple[str, ...]


@dataclass(frozen=True)
class Design:
    """kind: "ends" serves none, each alone, all but each, and all; "orders" adds every prefix of ``orders`` random
    orders, each followed by its reverse; "factorial" serves all 2^n. Raises BadInput for no mechanisms, one named
    twice, an unknown kind, or no orders where they are needed."""

    mechanisms: tuple[str, ...]
    kind: str = "ends"
    orders: int = 0
    seed: int = 0

    def __post_init__(self):
        if not self.mechanisms or len(set(self.mechanisms)) < len(self.mechanisms):
            raise BadInput(f"mechanisms = {list(self.mechanisms)}: give at least one, and none twice.")
        if self.kind not in DESIGNS:
            raise BadInput(f"design {self.kind!r} is unknown: give one of {', '.join(DESIGNS)}.")
        if self.kind == "orders" and self.orders < 1:
            raise BadInput(f"orders = {self.orders}: the design 'orders' needs at least 1.")

    def random_orders(self) -> list[Coalition]:
        """The sampled orders, each followed by its reverse, which halves the variance of what pairs interact."""
        random = np.random.default_rng(self.seed)
        drawn = [
            tuple(np.array(self.mechanisms)[random.permutation(len(self.mechanisms))].tolist())
            for _ in range(self.orders)
        ]
        return [order for one in drawn for order in (one, one[::-1])]

    def coalitions(self) -> list[Coalition]:
        """Every combination to serve, mechanisms in their own order; none first, all last."""
        every = self.mechanisms
        if self.kind == "factorial":
            return [part for size in range(len(every) + 1) for part in combinations(every, size)]
        wanted = {(), every} | {(name,) for name in every} | {self.but(every, name) for name in every}
        if self.kind == "orders":
            wanted |= {self.ordered(order[:size]) for order in self.random_orders() for size in range(len(every))}
        return sorted(wanted, key=lambda part: (len(part), [every.index(name) for name in part]))

    def ordered(self, names) -> Coalition:
        return tuple(name for name in self.mechanisms if name in set(names))

    def but(self, coalition: Coalition, name: str) -> Coalition:
        return tuple(other for other in coalition if other != name)

    def with_one(self, coalition: Coalition, name: str) -> Coalition:
        return self.ordered((*coalition, name))

    @property
    def estimator(self) -> str:
        return {
            "ends": "mean of the effect of switching it on alone and of switching it off alone",
            "orders": f"Shapley value from {2 * self.orders} orders of switching them on",
            "factorial": f"Shapley value over all {2 ** len(self.mechanisms)} combinations",
        }[self.kind]


def shapley(design: Design, worth: dict[Coalition, np.ndarray]) -> dict[str, np.ndarray]:
    """Each mechanism's share by the design's estimator. worth: of each coalition, numbers or equally shaped arrays."""
    every, found = design.mechanisms, {}
    for name in every:
        if design.kind == "ends":
            found[name] = (worth[(name,)] - worth[()] + worth[every] - worth[design.but(every, name)]) / 2
        elif design.kind == "orders":
            steps = []
            for order in design.random_orders():
                before = design.ordered(order[: order.index(name)])
                steps.append(worth[design.with_one(before, name)] - worth[before])
            found[name] = sum(steps) / len(steps)
        else:
            rest = design.but(every, name)
            found[name] = sum(
                (worth[design.with_one(part, name)] - worth[part]) / (len(every) * comb(len(rest), size))
                for size in range(len(rest) + 1)
                for part in combinations(rest, size)
            )
    return found


def coalition_of(text: str) -> Coalition:
    """From a table's column ``mechanisms``."""
    return () if text == "none" else tuple(text.split("+"))


def resampled_worth(by_prompt: pd.DataFrame, seed: int = 0, resamples: int = RESAMPLES) -> dict[Coalition, np.ndarray]:
    """Share of changed requests of each coalition: entry 0 as counted, then over ``resamples`` draws of the prompts.

    by_prompt: columns mechanisms, prompt, requests, changed, other columns being summed over. The draws are the same
    for every coalition, so that differences keep their pairing.
    """
    counts = by_prompt.groupby(["mechanisms", "prompt"])[["changed", "requests"]].sum().unstack("prompt", fill_value=0)
    prompts = counts.changed.shape[1]
    weights = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, size=resamples)
    weights = np.vstack([np.ones(prompts), weights])
    changed, requests = weights @ counts.changed.to_numpy().T, weights @ counts.requests.to_numpy().T
    # A draw may hold none of the prompts that a small cell served: it then says nothing, as 0 of 0.
    share = np.divide(changed, requests, out=np.zeros_like(changed, dtype=float), where=requests > 0)
    return {coalition_of(text): share[:, i] for i, text in enumerate(counts.index)}


def _interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws[1:], [0.025, 0.975])
    return float(low), float(high)


def budget(by_prompt: pd.DataFrame, design: Design, seed: int = 0) -> pd.DataFrame:
    """A row a mechanism, largest share first: share of all requests whose change it is charged with, the effects of
    switching it on alone (from none) and off alone (from all), with 95% bootstrap intervals, in shares of requests."""
    worth = resampled_worth(by_prompt, seed)
    shares, rows = shapley(design, worth), []
    for name in design.mechanisms:
        on = worth[(name,)] - worth[()]
        off = worth[design.mechanisms] - worth[design.but(design.mechanisms, name)]
        row = {"mechanism": name}
        for label, draws in (("share", shares[name]), ("on alone", on), ("off alone", off)):
            low, high = _interval(draws)
            row |= {label: float(draws[0]), f"{label} low": low, f"{label} high": high}
        rows.append(row)
    return pd.DataFrame(rows).sort_values("share", ascending=False, kind="stable", ignore_index=True)


def interactions(by_prompt: pd.DataFrame, design: Design, seed: int = 0) -> pd.DataFrame:
    """What all on changes against sums: of each alone on, of each alone off, of the shares, and what independent
    changes would give, 1 minus the product of (1 minus each alone). Rows with value, its interval, and all on minus
    it."""
    worth = resampled_worth(by_prompt, seed)
    every = design.mechanisms
    alone = [worth[(name,)] - worth[()] for name in every]
    rows = []
    for label, draws in (
        ("all on", worth[every]),
        ("sum of each on alone", sum(alone)),
        ("independent changes of each on alone", 1 - np.prod([1 - part for part in alone], axis=0)),
        ("sum of each off alone", sum(worth[every] - worth[design.but(every, name)] for name in every)),
        ("sum of the budget's shares", sum(shapley(design, worth).values())),
    ):
        rest = worth[every] - draws
        rows.append(
            {
                "quantity": label,
                "value": float(draws[0]),
                "low": _interval(draws)[0],
                "high": _interval(draws)[1],
                "all on minus it": float(rest[0]),
                "difference low": _interval(rest)[0],
                "difference high": _interval(rest)[1],
            }
        )
    return pd.DataFrame(rows)


def clear_pairs(by_prompt: pd.DataFrame, design: Design, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs (larger, smaller) of mechanisms whose difference of shares has a bootstrap interval that leaves out 0."""
    shares = shapley(design, resampled_worth(by_prompt, seed))
    found = []
    for a, b in combinations(design.mechanisms, 2):
        low, high = _interval(shares[a] - shares[b])
        if low > 0:
            found.append((a, b))
        elif high < 0:
            found.append((b, a))
    return found


def reversed_pairs(pairs: list[tuple[str, str]], shares: dict[str, float]) -> list[tuple[str, str]]:
    """Those of ``pairs`` (larger, smaller) that stand the other way round in ``shares``."""
    return [(a, b) for a, b in pairs if shares[a] < shares[b]]
