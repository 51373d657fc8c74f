"""The engine's decode attention along a split plan: own-length rules keep a row's bits, the batch-wide one recuts it."""

import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.engine import Engine, EngineConfig, Load, Model, load_weights, serve
from batch_variance.kernels.nvfp4 import policy
from batch_variance.kernels.sets import EmulatedKernels
from batch_variance.schedules import make_plan

PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 33, 20)]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return Model(load_weights(tiny_folder, torch.device("cpu")), EmulatedKernels(), policy("default"))


def run(model, concurrency, rule, parts=12):
    config = EngineConfig(max_requests=8, max_length=128, page=16, ignore_eos=True, split_rule=rule, num_sm_parts=parts, split_block=8)
    return serve(model, PROMPTS, Load(concurrency, 8, 6, seed=1), config)


def margins(found):
    """Per prompt, the set of (tokens, margins): one entry when batch and solo agree to the bit."""
    seen = {}
    for request in found.requests:
        seen.setdefault(request.prompt, set()).add((tuple(request.output), tuple(request.margins)))
    return seen


@pytest.mark.parametrize("rule", ["never-split", "fixed-count-2", "fixed-chunk-1", "free-1"])
def test_an_own_length_rule_keeps_a_rows_bits(model, rule):
    assert margins(run(model, 8, rule)) == margins(run(model, 1, rule))


def test_the_batch_wide_rule_recuts_a_row_and_moves_its_bits(model):
    alone, together = run(model, 1, "flashmla"), run(model, 8, "flashmla")
    assert max(max(step.splits) for step in alone.steps if step.splits) > max(
        max(step.splits) for step in together.steps if len(step.splits) > 4)
    assert margins(alone) != margins(together)


def test_the_trace_names_each_decode_rows_splits(model):
    found = run(model, 8, "flashmla")
    assert any(step.splits for step in found.steps)
    positions = {request.number: request.prompt_length for request in found.requests}
    for step in found.steps:
        decoding = [number for number, _, phase in step.rows if phase == "decode"]
        assert len(step.splits) == len(decoding)
        if decoding:
            for number in decoding:
                positions[number] += 1
            plan = make_plan("flashmla", [positions[n] for n in decoding], 12, 8)
            assert step.splits == tuple(plan.pieces.tolist())


def test_without_a_rule_nothing_is_cut(model):
    assert all(step.splits == () for step in run(model, 8, "").steps)


def test_wrong_rules_and_sizes_are_refused(model):
    with pytest.raises(BadInput, match="sometimes"):
        Engine(model, EngineConfig(split_rule="sometimes"))
    for name in ("num_sm_parts", "split_block"):
        with pytest.raises(BadInput, match=name):
            Engine(model, EngineConfig(**{name: 0}))
