"""Predicted divergence against simulated requests: right where the noise model holds, and visibly wrong where it does
not.
"""

import numpy as np
import pandas as pd
import pytest

from batch_variance.common import BadInput
from batch_variance.studies import prediction

PROMPTS, TOKENS, REQUESTS = 10, 16, 400


def _margins(seed=0):
    margin = np.random.default_rng(seed).exponential(1.5, (PROMPTS, TOKENS))
    return pd.DataFrame(
        [{"prompt": p, "position": t, "margin": margin[p, t]} for p in range(PROMPTS) for t in range(TOKENS)]
    )


def _noise(level, sigma, seed, shared=0.0, requests=REQUESTS):
    """Noise of a request: shared is how much of its variance lasts along the request."""
    random = np.random.default_rng(seed)
    paths = sigma * (
        np.sqrt(1 - shared) * random.normal(size=(requests, TOKENS))
        + np.sqrt(shared) * random.normal(size=(requests, 1))
    )
    index = pd.MultiIndex.from_product([range(requests), range(TOKENS)], names=["request", "position"])
    frame = pd.DataFrame({"noise": paths.ravel()}, index=index).reset_index()
    return frame.assign(concurrency=level, run="A", prompt=frame.request % PROMPTS, flipped=False, third=False)


def _requests(margins, noise):
    """What such noise does to texts: each request diverges where its noise first outweighs its prompt's margin."""
    both = noise.merge(margins, on=["prompt", "position"])
    first = both[both.noise < -both.margin].groupby(["concurrency", "request"]).position.min()
    keys = noise[["concurrency", "request", "prompt"]].drop_duplicates().set_index(["concurrency", "request"])
    return keys.assign(first_divergence=first.reindex(keys.index).fillna(-1).astype(int)).reset_index()


def _case(shared=0.0, sigma=(0.05, 0.2), seed=0):
    margins = _margins(seed)
    measured = pd.concat([_noise(level, s, 10 + level, shared) for level, s in zip((4, 16), sigma)])
    fresh = pd.concat([_noise(level, s, 90 + level, shared) for level, s in zip((4, 16), sigma)])
    return margins, measured, prediction.observe(_requests(margins, fresh), TOKENS)


@pytest.mark.parametrize("model", prediction.MODELS)
def test_a_true_noise_model_predicts_what_fresh_noise_does(model):
    margins, noise, observed = _case()
    found = prediction.error(prediction.matched(prediction.predict(margins, noise, model), observed))
    assert found["mean_absolute"] < 0.03  # 400 requests: a standard error of 0.02
    assert found["skill"] > 0.2


def test_misplaced_margins_predict_the_share_and_not_the_prompt():
    margins, noise, observed = _case()
    found = prediction.errors(margins, noise, observed).set_index("model")
    assert found.loc["margins misplaced", "skill"] < found.loc["independent", "skill"] - 0.2


def test_noise_that_lasts_along_a_request_fools_independence_and_not_the_path():
    margins, noise, observed = _case(shared=0.95, sigma=(1.0, 2.0))
    found = prediction.errors(margins, noise, observed).set_index("model")
    assert found.loc["independent", "bias"] > 0.05  # it lets every position draw anew
    assert abs(found.loc["path", "bias"]) < 0.03
    structure = prediction.noise_structure(noise).set_index("concurrency")
    assert structure.loc[16, "neighbours' correlation"] > 0.5
    assert abs(prediction.noise_structure(_case()[1]).set_index("concurrency").loc[16, "neighbours' correlation"]) < 0.1


def test_noise_that_a_prompt_s_requests_share_is_seen():
    own = _noise(8, 0.3, 5)
    together = own.assign(noise=own.groupby(["prompt", "position"]).noise.transform("first"))
    half = own.assign(noise=own.noise + together.noise)
    shared = [
        prediction.noise_structure(frame).loc[0, "shared by a prompt's requests"] for frame in (own, half, together)
    ]
    assert shared[0] < 0.05 and 0.4 < shared[1] < 0.6 and shared[2] == pytest.approx(1.0)
    assert np.isnan(prediction.noise_structure(_noise(8, 0.0, 1)).loc[0, "shared by a prompt's requests"])


def test_the_hazard_by_hand():
    margins = pd.DataFrame({"prompt": [0, 0, 1, 1], "position": [0, 1, 0, 1], "margin": [0.5, 2.0, 9.0, 9.0]})
    noise = pd.DataFrame(
        {
            "concurrency": 4,
            "run": "A",
            "request": [1, 1, 2, 2],
            "prompt": 1,
            "position": [0, 1, 0, 1],
            "noise": [-1.0, 0.0, 0.0, -3.0],
        }
    )
    own = noise.assign(prompt=0, noise=-100.0, request=[5, 5, 6, 6])
    everything = pd.concat([noise, own])

    def by(model):
        return prediction.predict(margins, everything, model).set_index(["prompt", "position"]).predicted

    # Prompt 0 meets prompt 1's noise {-1, 0, 0, -3}: over 0.5 twice in four, over 2 once in four.
    assert by("independent").loc[0].tolist() == pytest.approx([0.5, 1 - 0.5 * 0.75])
    # One of two paths flips at once, the other at the second token.
    assert by("path").loc[0].tolist() == pytest.approx([0.5, 1.0])
    assert prediction.predict(margins, everything, "path", spare_own=False).set_index(
        ["prompt", "position"]
    ).predicted.loc[1, 1] == pytest.approx(0.5)


def test_ties_made_by_noise_are_a_coin_and_old_ties_that_do_not_move_are_none():
    flips = prediction._flips(np.array([0.25, 0.0]), np.array([[-0.25, 0.0], [0.25, -0.125]]))
    assert flips.tolist() == [[0.5, 0.0], [0.0, 1.0]]


def test_no_noise_predicts_no_divergence():
    margins = _margins()
    quiet = _noise(4, 0.0, 1)
    for model in prediction.MODELS:
        assert prediction.predict(margins, quiet, model).predicted.max() == 0
    observed = prediction.observe(_requests(margins, quiet), TOKENS)
    assert observed.observed.max() == 0
    found = prediction.error(prediction.matched(prediction.predict(margins, quiet), observed))
    assert found["mean_absolute"] == 0 and np.isnan(found["skill"])
    assert np.isnan(prediction.noise_structure(quiet).loc[0, "neighbours' correlation"])


def test_observed_shares_by_hand():
    requests = pd.DataFrame({"concurrency": 8, "prompt": [0, 0, 0, 0, 1], "first_divergence": [-1, 0, 2, 2, -1]})
    found = prediction.observe(requests, 3).set_index(["prompt", "position"])
    assert found.observed.loc[0].tolist() == [0.25, 0.25, 0.75] and found.observed.loc[1].tolist() == [0, 0, 0]
    levels = prediction.by_concurrency(found.reset_index().assign(predicted=0.5))
    assert levels.observed.tolist() == pytest.approx([0.2, 0.2, 0.6]) and levels.predicted.tolist() == pytest.approx(
        [0.5] * 3
    )


def test_the_brier_score_is_the_mean_over_requests():
    both = pd.DataFrame(
        {
            "concurrency": 8,
            "prompt": [0, 1],
            "position": 3,
            "requests": [4, 4],
            "predicted": [0.8, 0.1],
            "observed": [0.75, 0.0],
        }
    )
    found = prediction.error(both)
    outcomes = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    assert found["brier"] == pytest.approx(np.mean((np.repeat([0.8, 0.1], 4) - outcomes) ** 2))
    assert found["reference"] == pytest.approx(np.mean((0.375 - outcomes) ** 2))


def test_calibration_bins_and_the_worst_groups():
    both = pd.DataFrame(
        {
            "concurrency": [8, 8, 16],
            "prompt": [0, 1, 0],
            "position": 3,
            "requests": [10, 30, 10],
            "predicted": [0.1, 0.05, 1.0],
            "observed": [0.2, 0.0, 0.5],
        }
    )
    found = prediction.calibration(both, bins=4)
    assert found.requests.tolist() == [40, 10] and found.observed.tolist() == pytest.approx([0.05, 0.5])
    worst = prediction.where_it_fails(both, 1)
    assert (worst.concurrency[0], worst.prompt[0], worst.difference[0]) == (16, 0, 0.5)


def test_the_skill_s_interval_holds_it_and_needs_two_prompts():
    margins, noise, observed = _case()
    both = prediction.matched(prediction.predict(margins, noise), observed)
    low, high = prediction.skill_interval(both, draws=60)
    assert 0 < low <= prediction.error(both)["skill"] <= high
    assert np.isnan(prediction.skill_interval(both[both.prompt == 0], draws=10)).all()


def test_what_cannot_be_predicted_is_one_sentence():
    margins, noise, _ = _case()
    with pytest.raises(BadInput, match="noise model 'magic' is unknown"):
        prediction.predict(margins, noise, "magic")
    with pytest.raises(BadInput, match="only prompt 3 has measured noise: serve more prompts"):
        prediction.predict(margins, noise[noise.prompt == 3], "path")
