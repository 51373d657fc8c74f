"""Planned numbers of requests against brute force, and the stopping rule's error rate by simulation."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy.stats import fisher_exact

from batch_variance.common import BadInput
from batch_variance.studies import power

exact = cache(power.exact_interval)
anytime = cache(power.anytime_interval)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.07, 0.3, 0.5, 0.95, 0.99])
def test_requests_to_see_is_the_smallest_number_that_does(rate):
    count = power.requests_to_see(rate)
    assert 1 - (1 - rate) ** count >= 0.95 > 1 - (1 - rate) ** (count - 1)
    assert power.smallest_rate_seen(count) <= rate


def test_the_rule_of_three_and_nothing_served():
    assert power.requests_to_see(0.01) == 299  # log(0.05) / log(0.99) = 298.07
    assert power.requests_to_see(0.95) == 1
    assert power.smallest_rate_seen(0) == 1.0


@pytest.mark.parametrize("rates", [(0.02, 0.06), (0.0, 0.05), (0.3, 0.5)])
def test_fisher_s_test_has_the_planned_power(rates):
    count = power.requests_to_tell_apart(*rates, power=0.9)
    random = np.random.default_rng(0)
    draws = [random.binomial(count, rate, 400) for rate in rates]
    table = {}
    for pair in zip(*draws):
        if pair not in table:
            table[pair] = fisher_exact([[pair[0], count - pair[0]], [pair[1], count - pair[1]]]).pvalue < 0.05
    found = np.mean([table[pair] for pair in zip(*draws)])
    assert 0.86 <= found  # 400 trials: a standard error of 0.015
    assert found <= 0.96 or 0 in rates  # the correction overdoes it next to 0
    assert power.requests_to_tell_apart(*rates) > count


def test_one_of_200_against_two_of_200_says_nothing():
    """The counts on which FlashMLA issue 212's causal claim was retracted; p by hand: all tables with 3 events in
    400.
    """
    # P(0, 3) = P(3, 0) = C(200,3) / C(400,3); P(1, 2) = P(2, 1) makes up the rest, and every table is as unlikely or
    # more.
    assert power.chance_of_more(1, 200, 2, 200) == pytest.approx(1.0)
    assert power.requests_to_tell_apart(1 / 200, 2 / 200) > 5000


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: power.requests_to_see(0), "rate = 0 is no probability"),
        (lambda: power.requests_to_see(1), "rate = 1 is no probability"),
        (lambda: power.requests_to_see(float("nan")), "rate = nan"),
        (lambda: power.requests_to_see(0.1, power=1), "power = 1"),
        (lambda: power.requests_to_tell_apart(0.1, 0.1), "no number of requests tells them apart"),
        (lambda: power.requests_to_tell_apart(0.1, 1.2), "other = 1.2 is no rate"),
        (lambda: power.anytime_interval(3, 2), "3 of 2 is no count"),
        (lambda: power.StoppingRule(1.0), "stop_width = 1.0 cannot be used"),
        (lambda: power.StoppingRule(-0.1), "stop_width = -0.1 cannot be used"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(call, words):
    with pytest.raises(BadInput) as caught:
        call()
    assert words in str(caught.value) and str(caught.value).endswith(".")


# --- Clusters ---


def _clustered(same: bool, prompts=20, each=25, seed=0):
    random = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(prompts), each)
    differs = random.random(prompts)[prompt] < 0.3 if same else random.random(prompts * each) < 0.3
    return pd.Series(differs), pd.Series(prompt)


def test_requests_that_copy_their_prompt_are_worth_one_each():
    assert power.worth_in_independent_requests(*_clustered(same=True)) == pytest.approx(20)


def test_independent_requests_are_worth_themselves():
    assert power.worth_in_independent_requests(*_clustered(same=False)) > 350


def test_clusters_at_the_edges():
    yes = pd.Series([True, False, True])
    assert power.worth_in_independent_requests(yes, pd.Series([0, 1, 2])) == 3  # one request a prompt
    assert power.worth_in_independent_requests(yes, pd.Series([0, 0, 0])) == 1  # one prompt is all there is
    assert (
        power.worth_in_independent_requests(pd.Series([False] * 6), pd.Series([0, 0, 1, 1, 2, 2])) == 3
    )  # nothing differs


# --- Stopping ---


def test_the_anytime_interval_holds_the_rate_and_is_wider_than_the_exact_one():
    for events, trials in ((0, 2), (0, 50), (3, 50), (50, 50), (400, 1000)):
        low, high = power.anytime_interval(events, trials)
        inner = power.exact_interval(events, trials)
        assert low <= inner[0] <= events / trials <= inner[1] <= high
    assert power.anytime_interval(0, 0) == (0.0, 1.0)
    low, high = power.anytime_interval(0, 100)
    assert low == 0.0 and high == pytest.approx(1 - (0.05 / 101) ** (1 / 100))  # B(1, 101) = 1 / 101, solved by hand


def _stopped(rates: np.ndarray, width: float, most: int, seed: int):
    """Serve with ``rates`` of a cycle of prompts until the rule stops: (events, trials)."""
    rule, random, events, trials = power.StoppingRule(width), np.random.default_rng(seed), 0, 0
    while trials < most:
        events += int((random.random(rates.size) < rates).sum())
        trials += rates.size
        low, high = anytime(events, trials)
        assert trials % 320 or rule.stops(events, trials) == (high - low <= width)
        if high - low <= width:
            break
    return rule, events, trials


@pytest.mark.parametrize("rates", [np.full(16, 0.1), np.array([0.0, 0.0, 0.05, 0.75] * 4)])
def test_stopping_early_misses_the_rate_no_more_often_than_stated(rates):
    truth, missed, early = rates.mean(), 0, 0
    for seed in range(300):
        rule, events, trials = _stopped(rates, 0.16, 960, seed)
        low, high = rule.interval(events, trials)
        missed += not low <= truth <= high
        early += trials < 960
    assert missed / 300 <= 0.05
    assert early > 200  # or the simulation would say nothing about stopping


def test_peeking_with_the_exact_interval_would_miss_too_often():
    """Why the rule does not use it: the same simulation, stopped as soon as the exact interval leaves out the rate."""
    random, kept = np.random.default_rng(1), {exact: 0, anytime: 0}
    for _ in range(200):
        events = np.cumsum(random.random(800) < 0.1)
        for interval in kept:
            seen = [interval(int(events[n - 1]), n) for n in range(20, 801, 20)]
            kept[interval] += all(low <= 0.1 <= high for low, high in seen)
    assert kept[exact] / 200 < 0.9 and kept[anytime] / 200 >= 0.95


def test_a_width_of_zero_never_stops_and_reports_the_exact_interval():
    rule = power.StoppingRule(0)
    assert not rule.stops(0, 10**6) and rule.interval(2, 50) == power.exact_interval(2, 50)
    assert "No cell stops early" in rule.words and "0.16 wide" in power.StoppingRule(0.16).words


def test_the_plan_says_what_a_study_s_requests_can_see():
    found = power.plan(1000, (0.001, 0.01))
    assert list(found["to see it once"]) == [2995, 299]
    assert found["chance that 1,000 show it"].tolist() == pytest.approx([1 - 0.999**1000, 1 - 0.99**1000])
