"""Counts, rates with exact intervals, and the names of the evidence tiers."""

from dataclasses import dataclass

from scipy.stats import binomtest

TIERS = ("live-gpu", "recorded-gpu", "cpu-native", "emulated")


def exact_interval(events: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a rate. With no trials nothing is known: (0, 1)."""
    if trials == 0:
        return (0.0, 1.0)
    found = binomtest(int(events), int(trials)).proportion_ci(confidence_level=confidence, method="exact")
    return (float(found.low), float(found.high))


@dataclass(frozen=True)
class Rate:
    """``events`` of ``trials``, with the interval that so many trials allow."""

    events: int
    trials: int

    @property
    def value(self) -> float:
        return self.events / self.trials if self.trials else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        return exact_interval(self.events, self.trials)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.events} of {self.trials} ({low:.1%} to {high:.1%})"
