"""Notebook 03's study: forced texts, spans and margins by hand, and its tables, verdicts and figures on a tiny model."""

from dataclasses import replace
from functools import partial

import matplotlib

matplotlib.use("Agg")

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from batch_variance.engine import EngineConfig, Load, Mechanisms, Settings, build, load_weights, serve  # noqa: E402
from batch_variance.kernels.sets import kernel_set  # noqa: E402
from batch_variance.studies import forcing, spans  # noqa: E402

TOKENS = 6
PROMPTS = [[256, 7, 8, 9], [256, 70, 80, 90, 100, 110, 120], [256] + list(range(30, 52)), [256, 5]]


@pytest.fixture(scope="module")
def weights(tiny_folder):
    return load_weights(tiny_folder, torch.device("cpu"), nvfp4=True)


def _served(weights, settings, concurrency):
    model, changes = build(weights, kernel_set(torch.device("cpu")), settings)
    return model, EngineConfig(max_requests=concurrency, max_length=40, ignore_eos=True, **changes)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def case(request, weights):
    """(settings, model, solo reference) with every mechanism on and a threshold that a tiny batch crosses."""
    settings = Settings(mechanisms=Mechanisms.all(), storage=request.param, threshold=4)
    model, config = _served(weights, settings, 1)
    return settings, model, forcing.solo(model, PROMPTS, TOKENS, config, request.param)


# --- Forcing ---


def test_alone_and_free_is_the_engine_s_own_text(case):
    _, model, alone = case
    config = EngineConfig(max_requests=1, max_length=40, ignore_eos=True)
    plain = serve(model, PROMPTS, Load(1, len(PROMPTS), TOKENS, seed=0), _as_built(case, config))
    assert {r.prompt: r.output for r in plain.requests} == alone.texts
    margins = alone.margins().pivot(index="prompt", columns="position", values="margin").to_numpy()
    assert margins.tolist() == [r.margins for r in plain.requests]
    assert (margins >= 0).all() and alone.logits.shape == (4, TOKENS, 272) and alone.hidden.shape == (4, TOKENS, 64)


def _as_built(case, config):
    _, changes = build(case[1].weights, kernel_set(torch.device("cpu")), case[0])
    return replace(config, **changes)


def test_forced_alone_nothing_moves(case):
    settings, model, alone = case
    found = forcing.measure(model, PROMPTS, alone, Load(1, 8, TOKENS, seed=3), _as_built(case, EngineConfig(max_requests=1, max_length=40, ignore_eos=True)), {"concurrency": 1})
    assert len(found.positions) == 8 * TOKENS and not found.positions.flipped.any() and (found.positions.noise == 0).all()
    assert found.positions[["hidden_largest_ulp", "logits_largest_ulp", "hidden_other_bits"]].to_numpy().max() == 0
    moved = found.values[found.values.up_to > 0]["values"].sum()
    assert moved == 0 and found.values["values"].sum() == 8 * TOKENS * (64 + 272)


def test_forced_in_a_batch_bits_move_and_contexts_do_not(case):
    settings, model, alone = case
    config = _as_built(case, EngineConfig(max_requests=8, max_length=40, ignore_eos=True))
    engines = []

    def watch(requests, hidden, logits, chosen):
        engines.append(([(r.prompt, list(r.output)) for r in requests], logits.clone(), hidden.clone(), chosen))

    run = serve(model, PROMPTS, Load(8, 16, TOKENS, seed=3), config, build=partial(forcing.ForcedEngine, texts=alone.texts, notice=watch))
    assert all(r.output == alone.texts[r.prompt] for r in run.requests)
    found = forcing.measure(model, PROMPTS, alone, Load(8, 16, TOKENS, seed=3), config, {"concurrency": 8, "run": "F"}).positions
    assert (found.hidden_other_bits > 0).any() and (found.concurrency == 8).all()
    # The numbers of one step again, from the tensors that the engine showed.
    said, logits, hidden, chosen = engines[-1]
    prompt, output = said[0]
    position = len(output)
    assert output == alone.texts[prompt][:position]
    number = [r.number for r in run.requests if r.prompt == prompt]
    rows = found[(found.prompt == prompt) & (found.position == position) & found.request.isin(number)]
    best, second = int(alone.best[prompt, position]), int(alone.second[prompt, position])
    noise = float(logits[0, best] - logits[0, second]) - float(alone.logits[prompt, position, best] - alone.logits[prompt, position, second])
    assert noise in rows.noise.tolist() and chosen[0] in rows.chosen.tolist()
    assert (rows.flipped == (rows.chosen != best)).all()
    share = float((hidden[0] != alone.hidden[prompt, position]).double().mean())
    assert share in rows.hidden_other_bits.tolist()


def test_row_scaled_ranges_count_each_value_once(case):
    settings, model, alone = case
    found = forcing.measure(model, PROMPTS, alone, Load(4, 4, TOKENS, seed=0), _as_built(case, EngineConfig(max_requests=4, max_length=40, ignore_eos=True)), {"concurrency": 4})
    for kind, width in zip(forcing.KINDS, (64, 272)):
        part = found.values[found.values.kind == kind]
        assert part["values"].sum() == 4 * TOKENS * width
        zero = 1 - found.positions[f"{kind.split()[0]}_other_bits"].mean()
        assert part[part.up_to == 0]["values"].sum() / part["values"].sum() == pytest.approx(zero)


# --- Spans ---


def _requests(*rows, **more):
    return pd.DataFrame([dict(zip(("concurrency", "prompt", "first_divergence"), row)) for row in rows]).assign(**more)


def test_survival_by_hand():
    found = spans.survival(_requests((8, 0, 0), (8, 0, 2), (8, 1, 2), (8, 1, -1), (1, 0, -1)), 4)
    assert found[found.concurrency == 8].share.tolist() == [1.0, 0.75, 0.75, 0.25, 0.25]
    assert found[found.concurrency == 1].share.tolist() == [1.0] * 5
    part = found[found.concurrency == 8]
    assert ((part.low <= part.share) & (part.share <= part.high)).all()


def test_survival_when_all_diverge_at_once():
    found = spans.survival(_requests((8, 0, 0), (8, 0, 0)), 2)
    assert found.share.tolist() == [1.0, 0.0, 0.0] and found[["low", "high"]].notna().all(axis=None)


def test_second_spans_by_hand():
    alone = "1 2 3 4 5 6"
    requests = _requests((8, 0, 1), (8, 0, 2), (8, 0, 5), (8, 0, -1), (8, 0, 0), run="A", request=range(5), alone=alone).assign(
        text=["1 9 3 4 9 6", "1 2 9 9 5 6", "1 2 3 4 5 9", alone, "9 2 3 4 5 6"])
    found = spans.second_spans(requests).set_index("request")
    assert found.second_span.tolist() == [2, 0, 0, 5] and found.censored.tolist() == [False, False, True, True]
    assert found.agree_after.tolist()[:2] == [0.75, pytest.approx(2 / 3)] and np.isnan(found.agree_after[2])
    summary = spans.span_summary(requests, found.reset_index(), 6).iloc[0]
    assert (summary["diverged"], summary["second span 0"], summary["censored"]) == (4, 1, 2)
    assert summary["median first span"] == 2  # of 0, 1, 2, 5 and one that never parted, half are over after 2 tokens
    assert spans.second_spans(requests[requests.first_divergence < 0]).empty


# --- Margins ---


def _positions(scale, prompts=6, length=40, seed=0):
    solo = np.random.default_rng(seed).exponential(2, (prompts, length)) + 0.01
    return pd.DataFrame([{"concurrency": 8, "prompt": p, "position": t, "solo_margin": solo[p, t], "margin": solo[p, t] * scale}
                         for p in range(prompts) for t in range(length)])


def test_a_shrunken_margin_is_seen_and_noise_is_not():
    same = spans.median_ratio(_positions(1.0)).iloc[0]
    assert (same.ratio, same.low, same.high, same["margins that moved"]) == (1, 1, 1, 0)
    assert spans.median_ratio(_positions(0.5)).iloc[0].high == pytest.approx(0.5)
    noisy = _positions(1.0)
    noisy["margin"] += np.random.default_rng(1).normal(0, 0.1, len(noisy))
    found = spans.median_ratio(noisy).iloc[0]
    assert found.low <= 1 <= found.high and found["margins that moved"] == 1


def test_near_ties_are_told_from_any_place():
    margins = _positions(1.0)[["prompt", "position", "margin"]]
    smallest = margins.sort_values("margin").groupby("prompt").head(2)
    tied = spans.near_ties(pd.concat([smallest, smallest]), margins)
    assert tied["places"] == 12 and tied["p"] < 0.001 and tied["mean_rank"] < 0.05 and tied["expected"] == pytest.approx(0.5, abs=0.01)
    random, small = np.random.default_rng(3), 0
    for seed in range(60):
        anywhere = margins.groupby("prompt").sample(2, random_state=random.integers(2**31))
        small += spans.near_ties(anywhere, margins, draws=400, seed=seed)["p"] <= 0.1
    assert small <= 12  # 10% of 60 expected; 13 or more have a chance of 1%
    assert np.isnan(spans.near_ties(smallest.head(0), margins)["p"])


def test_the_margin_at_a_divergence_is_looked_up_on_both_sides():
    requests = _requests((8, 0, 1), (8, 0, -1), run="A", request=[0, 1], margins="3.0 0.25 1.0")
    margins = pd.DataFrame({"prompt": 0, "position": [0, 1, 2], "margin": [3.0, 0.5, 1.0]})
    found = spans.at_divergence(requests, margins)
    assert len(found) == 1 and (found.margin[0], found.solo_margin[0], found.position[0]) == (0.25, 0.5, 1)


def test_the_trend_test_sees_a_rise_and_not_a_fall():
    random = np.random.default_rng(0)

    def drawn(shares):
        return pd.concat([_requests(*[(c, p, 3 if random.random() < share else -1) for p in range(8) for _ in range(10)]) for c, share in shares.items()])

    up = spans.trend(drawn({1: 0, 2: 0.1, 8: 0.25, 64: 0.5}), draws=300)
    assert up["p"] < 0.01 and up["correlation"] > 0.2 and up["lowest"] < up["highest"]
    assert spans.trend(drawn({2: 0.5, 64: 0.1}), draws=300)["p"] > 0.9
    assert np.isnan(spans.trend(drawn({1: 0, 8: 0.3}))["p"]) and np.isnan(spans.trend(drawn({2: 0, 8: 0}))["p"])
