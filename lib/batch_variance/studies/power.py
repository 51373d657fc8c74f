"""How many requests a claim about a rate needs, how many the ones at hand are worth, and when serving may stop early.

Nothing here knows what is counted: a rate is a share of requests that differ, whoever they are compared with.
"""

from dataclasses import dataclass
from math import ceil, isfinite, log, log1p

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import betaln, xlogy
from scipy.stats import fisher_exact, norm

from ..common import BadInput, exact_interval


def _probability(name: str, value: float) -> float:
    if not (isfinite(value) and 0 < value < 1):
        raise BadInput(f"{name} = {value} is no probability to plan with: give a number above 0 and below 1.")
    return value


def requests_to_see(rate: float, power: float = 0.95) -> int:
    """Fewest independent requests of which at least one differs with probability ``power`` when each does at ``rate``:
    the smallest n with 1 - (1 - rate)^n >= power. Raises BadInput unless both lie between 0 and 1."""
    return ceil(log1p(-_probability("power", power)) / log1p(-_probability("rate", rate)) - 1e-12)


def smallest_rate_seen(requests: int, power: float = 0.95) -> float:
    """Lowest rate that ``requests`` show at least once with probability ``power``; 1 for none."""
    return 1 - (1 - _probability("power", power)) ** (1 / requests) if requests > 0 else 1.0


def requests_to_tell_apart(rate: float, other: float, power: float = 0.95, alpha: float = 0.05) -> int:
    """Requests *each* of two arms needs for Fisher's exact test, two-sided at ``alpha``, to tell the rates apart.

    The normal approximation with Fleiss's continuity correction (Fleiss, Tytun and Ury, 1980), which follows Fisher's
    test, or overstates what it needs where a rate is near 0. Raises BadInput for rates outside 0 ... 1 or alike.
    """
    for name, value in (("rate", rate), ("other", other)):
        if not 0 <= value <= 1:
            raise BadInput(f"{name} = {value} is no rate: give a number from 0 to 1.")
    gap = abs(rate - other)
    if not gap:
        raise BadInput(f"both rates are {rate}: no number of requests tells them apart.")
    middle = (rate + other) / 2
    spread = (
        norm.isf(_probability("alpha", alpha) / 2) * (2 * middle * (1 - middle)) ** 0.5
        + norm.ppf(_probability("power", power)) * (rate * (1 - rate) + other * (1 - other)) ** 0.5
    )
    plain = (spread / gap) ** 2
    return ceil(plain / 4 * (1 + (1 + 4 / (plain * gap)) ** 0.5) ** 2)


def chance_of_more(events: int, trials: int, others: int, other_trials: int) -> float:
    """Two-sided p of Fisher's exact test between ``events`` of ``trials`` and ``others`` of ``other_trials``."""
    return float(fisher_exact([[events, trials - events], [others, other_trials - others]]).pvalue)


# --- Requests that share a prompt ---


def worth_in_independent_requests(differs: pd.Series, prompt: pd.Series) -> float:
    """How many independent requests these are worth for the rate over *all* prompts one might ask, not only these.

    differs: bool; prompt: the cluster of each. Requests of one prompt tend to agree, so n of them count as
    n / (1 + (m - 1) ICC), m the mean size of a cluster and ICC the ANOVA estimate of the intra-class correlation
    (Ridout,
    Demetrio and Firth, 1999), taken as 0 where negative and as 1 where all requests are alike or one prompt is all
    there is.
    """
    groups = differs.astype(float).groupby(prompt)
    sizes, means = groups.size().to_numpy(float), groups.mean().to_numpy()
    count, clusters = sizes.sum(), len(sizes)
    if clusters < 2 or count == clusters:
        return float(count if count == clusters else 1)
    total = (sizes * means).sum() / count
    between = (sizes * (means - total) ** 2).sum() / (clusters - 1)
    within = (sizes * means * (1 - means)).sum() / (count - clusters)
    typical = (count - (sizes**2).sum() / count) / (clusters - 1)
    spread = between + (typical - 1) * within
    correlation = max((between - within) / spread, 0.0) if spread > 0 else 1.0
    return float(count / (1 + (count / clusters - 1) * correlation))


# --- Stopping early ---


def anytime_interval(events: int, trials: int, alpha: float = 0.05) -> tuple[float, float]:
    """An interval of a rate that may be looked at after every request: over all looks together it misses the rate with
    probability at most ``alpha``.

    The rates at which a beta-binomial mixture (uniform prior) is less than 1 / alpha times as likely as the rate
    itself:
    a likelihood ratio that is a martingale, so Ville's inequality holds at any stopping time (Robbins, 1970; Howard et
    al., 2021). Requests may have rates of their own, as prompts do: where looks fall on whole cycles of the prompts,
    the
    mean rate is covered still (the ratio's expectation over a cycle is a product of linear functions, at most the power
    of their mean). Requests must be independent given their prompts.
    """
    if not 0 <= events <= trials:
        raise BadInput(f"{events} of {trials} is no count: events lie between 0 and the trials.")
    if trials == 0:
        return (0.0, 1.0)
    bound = log(1 / _probability("alpha", alpha))
    mixture = betaln(1 + events, 1 + trials - events)

    def evidence(rate: float) -> float:
        return mixture - xlogy(events, rate) - xlogy(trials - events, 1 - rate) - bound

    found, tiny = events / trials, 1e-12
    low = 0.0 if events == 0 else brentq(evidence, tiny / trials, found) if evidence(tiny / trials) > 0 else 0.0
    high = (
        1.0
        if events == trials
        else brentq(evidence, found, 1 - tiny / trials)
        if evidence(1 - tiny / trials) > 0
        else 1.0
    )
    return (float(low), float(high))


@dataclass(frozen=True)
class StoppingRule:
    """Stop serving a cell early, at the end of a block of requests, only once the anytime interval of its rate is no
    wider than ``width``; 0 never stops early. Because the interval holds at any stopping time, it is what a stopped
    cell
    reports. Raises BadInput for a width outside 0 ... 1."""

    width: float
    alpha: float = 0.05

    def __post_init__(self):
        if not 0 <= self.width < 1:
            raise BadInput(f"stop_width = {self.width} cannot be used: give 0 to never stop early, or a width below 1.")
        _probability("alpha", self.alpha)

    def stops(self, events: int, trials: int) -> bool:
        """Whether so many events in so many requests are enough."""
        low, high = anytime_interval(events, trials, self.alpha)
        return self.width > 0 and high - low <= self.width

    def interval(self, events: int, trials: int) -> tuple[float, float]:
        """What to report: the exact interval where the number of requests was fixed ahead, else the anytime one."""
        return (
            anytime_interval(events, trials, self.alpha)
            if self.width
            else exact_interval(events, trials, 1 - self.alpha)
        )

    @property
    def words(self) -> str:
        if not self.width:
            return "No cell stops early: the number of requests was fixed before the first was served."
        return (
            f"A cell stops early only at the end of a block of whole prompt cycles, once the {1 - self.alpha:.0%} "
            f"anytime interval of "
            f"its rate is at most {self.width:g} wide; stopped or not, that interval is what it reports."
        )


def plan(
    requests: int, rates: tuple[float, ...] = (0.001, 0.005, 0.01, 0.05, 0.1), power: float = 0.95
) -> pd.DataFrame:
    """A row a rate: requests needed to see it once, to tell it from 0, and each arm's requests to tell it from twice
    itself, all with probability ``power``; and the chance that ``requests`` show it at least once."""
    return pd.DataFrame(
        [
            {
                "rate": rate,
                "to see it once": requests_to_see(rate, power),
                "to tell it from 0, each arm": requests_to_tell_apart(rate, 0, power),
                "to tell it from twice itself, each arm": requests_to_tell_apart(rate, 2 * rate, power),
                f"chance that {requests:,} show it": float(-np.expm1(requests * np.log1p(-rate))),
            }
            for rate in rates
        ]
    )
