"""The probe against kernels whose fault is known: each found on its own axis and no other, and no alarm on clean
ones.
"""

import types

import pytest
import torch

from batch_variance.hooks import AXES, CallSiteProbe
from batch_variance.hooks.checks import TailUnread
from batch_variance.hooks.zoo import ZOO, Planted, clean, instance

INSTANCES = {"now": 200, "later": 40}


def examine(
    planted: Planted, controls: str, seed: int, generator: torch.Generator
) -> tuple[set[str], str, dict[str, str]]:
    engine = types.SimpleNamespace(kernel=planted.make())
    with CallSiteProbe(
        (engine, "kernel"),
        {"x": 0, "lengths": 0},
        axes=AXES,
        lengths="lengths",
        pad={"x": 1},
        rows=1,
        seed=seed,
        checks=[TailUnread("x", "lengths")],
        controls=controls,
    ) as probe:
        x, lengths = instance(generator)
        engine.kernel(x, lengths)
        x.zero_(), lengths.zero_()  # as an engine does with buffers of its own
    verdict = probe.verdict()
    return {axis for axis, said in verdict.items() if said == "variant"}, probe.well_formed()["verdict"][0], verdict


@pytest.mark.parametrize("controls", INSTANCES)
@pytest.mark.parametrize("planted", ZOO, ids=lambda p: p.name)
def test_a_planted_fault_is_found_on_its_axis_and_no_other(planted, controls):
    generator = torch.Generator().manual_seed(11)
    expected = {planted.axis} & set(AXES)
    for seed in range(INSTANCES[controls]):
        found, tail, verdict = examine(planted, controls, seed, generator)
        assert found == expected, (seed, verdict)
        assert tail == {"tail": "fails", "rerun": "inconclusive"}.get(planted.axis, "ok"), (seed, tail)
        if planted.axis is None:
            assert set(verdict.values()) == {"invariant"}, (seed, verdict)


@pytest.mark.parametrize("controls", INSTANCES)
def test_clean_calls_raise_no_alarm_and_are_all_judged(controls):
    """One long session: 400 calls here; the recorded run in data/recorded/probe_zoo.csv has 10,000."""
    generator = torch.Generator().manual_seed(3)
    engine = types.SimpleNamespace(kernel=clean)
    with CallSiteProbe(
        (engine, "kernel"), {"x": 0, "lengths": 0}, axes=AXES, lengths="lengths", rows=1, controls=controls
    ) as probe:
        for call in range(400):
            engine.kernel(*instance(generator))
            if call % 50 == 0:
                probe.run_controls()
    assert set(probe.verdict().values()) == {"invariant"}
    frame = probe.frame()
    assert len(frame) == 400 * len(AXES) and frame["rows_differ"].sum() == 0
    assert (frame["rows_checked"] > 0).all() and not probe.refusals


def test_a_threshold_that_only_a_larger_batch_crosses_is_found_by_composition():
    from batch_variance.hooks.zoo import chunked_sum

    engine = types.SimpleNamespace(kernel=lambda x, lengths: chunked_sum(x, lengths, 8 if len(x) <= 8 else 32))
    with CallSiteProbe((engine, "kernel"), {"x": 0, "lengths": 0}, axes=AXES) as probe:
        for seed in range(20):
            engine.kernel(torch.randn(6, 64, 16), torch.full((6,), 60))
    assert probe.verdict()["composition"] == "variant"
    assert probe.verdict()["solo"] == "invariant" and probe.verdict()["contents"] == "invariant"
