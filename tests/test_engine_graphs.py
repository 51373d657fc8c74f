"""Decode steps replayed from buffers that keep their places: the same texts, margins and traces as run step by step.

Here a "graph" is the forward pass run again over the buffers; on a GPU `test_gpu_engine_graphs` uses CUDA's.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted

from batch_variance.common import BadInput
from batch_variance.engine import DecodeGraphs, Engine, EngineConfig, Load, Model, Request, load_weights, serve
from batch_variance.engine.graphs import ALIGNED, Buffers
from batch_variance.engine.mechanisms import Mechanisms, Settings, build
from batch_variance.kernels.nvfp4 import policy
from batch_variance.kernels.sets import EmulatedKernels
from batch_variance.schedules import make_plan, plan_room
from batch_variance.studies import engine_bench
from batch_variance.studies.forcing import ForcedEngine

CPU = torch.device("cpu")
PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 33, 20, 1)]
RULES = ["", "flashmla", "never-split", "fixed-chunk-1", "free-1", "free-most-2"]


class Reruns:
    """Captures work by running it, and replays it into the tensors of that first run."""

    def __init__(self):
        self.calls = 0

    def __call__(self, work):
        self.calls += 1
        seen = work()
        seen.logits.fill_(torch.nan)

        def replay():
            seen.logits.copy_(work().logits)

        return replay, seen


@pytest.fixture(scope="module")
def weights(tiny_folder):
    return load_weights(tiny_folder, CPU, nvfp4=True)


def settings_of(rule, **changes):
    return EngineConfig(
        max_requests=8,
        max_length=96,
        page=16,
        ignore_eos=True,
        split_rule=rule,
        num_sm_parts=12,
        split_block=8,
        **changes,
    )


def seen(run):
    return [(r.tokens, r.margins, r.runners_up, r.finished) for r in run.requests], run.steps


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_replayed_steps_have_the_texts_margins_and_traces_of_ordinary_ones(weights, rule, concurrency):
    model, config = Model(weights, EmulatedKernels(), policy("default", 4)), settings_of(rule)
    graphs = DecodeGraphs(model, config, Reruns())
    load = Load(concurrency, 8, 12, seed=1)
    expected = serve(model, PROMPTS, load, config)
    for _ in range(2):  # the second engine finds graphs, and pages that the first one has left
        assert seen(serve(model, PROMPTS, load, config, build=graphs.engine)) == seen(expected)
    prefilling = sum(any(phase == "prefill" for _, _, phase in step.rows) for step in expected.steps)
    assert (graphs.replayed, graphs.ordinary) == (2 * (len(expected.steps) - prefilling), 2 * prefilling)
    decoding = {len(step.rows) for step in expected.steps if all(phase == "decode" for _, _, phase in step.rows)}
    assert graphs.captured == len(decoding) and max(decoding) == concurrency


def test_mechanisms_that_look_at_the_batch_are_replayed_with_their_choices(weights):
    model, changes = build(weights, EmulatedKernels(), Settings(Mechanisms.all(), storage="bfloat16"))
    config = EngineConfig(max_requests=8, max_length=96, ignore_eos=True, **changes)
    graphs = DecodeGraphs(model, config, Reruns())
    load = Load(5, 10, 12, seed=1)
    expected = serve(model, PROMPTS, load, config)
    assert seen(serve(model, PROMPTS, load, config, build=graphs.engine)) == seen(expected)
    blocks = {key for step in expected.steps for key in step.choices}
    assert ("attention_dispatch", "by the batch") in blocks and graphs.replayed


def test_graphs_refuse_what_they_cannot_replay(weights, tiny_folder):
    model, config = Model(weights, EmulatedKernels(), policy("default")), settings_of("free-1")
    with pytest.raises(BadInput, match="on cpu"):
        DecodeGraphs(model, config)
    planted, _ = build(weights, EmulatedKernels(), Settings(planted=0.1))
    with pytest.raises(BadInput, match="PlantedModel has a forward pass of its own"):
        DecodeGraphs(planted, config, Reruns())
    forced = ForcedEngine(model, config, {}, lambda *_: None)
    with pytest.raises(BadInput, match="forward pass of its own"):
        DecodeGraphs(forced.model, config, Reruns())
    from batch_variance.engine import ExpertSplit

    split = ExpertSplit([torch.arange(96) % 6] * 2, experts=6, top_k=4)
    experts = load_weights(tiny_folder, CPU, split=split)
    with pytest.raises(BadInput, match="experts"):
        DecodeGraphs(Model(experts, EmulatedKernels(), policy("default")), config, Reruns())


def test_graphs_serve_one_engine_of_their_model_at_a_time(weights):
    model, config = Model(weights, EmulatedKernels(), policy("default")), settings_of("free-1")
    graphs = DecodeGraphs(model, config, Reruns())
    for other in ((Model(weights, EmulatedKernels(), policy("default")), config), (model, replace(config, page=32))):
        with pytest.raises(BadInput, match="another model or configuration"):
            graphs.engine(*other)
    first = graphs.engine(model, config)
    first.submit(Request(0, 0, [5], 1, 2, 0))
    with pytest.raises(BadInput, match="still has 1 requests"):
        graphs.engine(model, config)
    first.step(), first.step()
    assert isinstance(graphs.engine(model, config), Engine)


def test_the_engine_bench_times_decode_steps_and_whole_runs_of_graphs(weights):
    model, config = Model(weights, EmulatedKernels(), policy("default")), settings_of("free-1")
    graphs = DecodeGraphs(model, config, Reruns())
    found = engine_bench.graph_times(graphs, PROMPTS, 3, 20)
    assert set(found) == {"step, CUDA graphs", "run, CUDA graphs"} and graphs.replayed > 10
    assert 0 < found["step, CUDA graphs"] < found["run, CUDA graphs"] / 10
    assert engine_bench.variants(model, config, PROMPTS, 4, 12, 6, graphs.engine) == (0, 12)


def test_buffers_keep_their_places_and_the_devices_alignment():
    buffers = Buffers({"a": (np.int64, (3,)), "b": (np.int32, (2, 5)), "c": (np.int32, (1,))}, CPU)
    places = {name: tensor.data_ptr() for name, tensor in buffers.there.items()}
    first = min(places.values())
    assert all((place - first) % ALIGNED == 0 for place in places.values())
    buffers.host["a"][:] = [1, -2, 2**40]
    buffers.host["b"][:] = np.arange(10).reshape(2, 5)
    buffers.host["c"][:] = -7
    buffers.upload()
    assert buffers.there["a"].tolist() == [1, -2, 2**40] and buffers.there["a"].dtype == torch.int64
    assert buffers.there["b"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] and buffers.there["b"].dtype == torch.int32
    assert buffers.there["c"].tolist() == [-7]
    assert {name: tensor.data_ptr() for name, tensor in buffers.there.items()} == places


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from([*RULES[1:], "free-4", "fixed-count-3", "root-length", "by-length-2-5"]),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=40),
    programs=st.integers(1, 140),
    block=st.sampled_from([1, 16, 64]),
)
def test_no_plan_needs_more_than_the_room_for_its_rule(rule, lengths, programs, block):
    plan = make_plan(rule, lengths, programs, block)
    segments, slots = plan_room(rule, len(lengths), 700, programs, block)
    assert len(plan.segments) <= segments and plan.num_slots <= slots


def test_the_kernels_read_a_plan_in_large_arrays_as_they_read_it_alone():
    """In the interpreter, which shows what the kernels read and write, not a GPU's order of additions."""
    found = interpreted("graphs_interpreted.py")
    assert len(found) == 12 and all(case["same"] and not case["nan"] for case in found), found
    assert all(case["slots"] <= case["room"] for case in found) and any(case["padded"] for case in found)
    for rule in ("flashmla", "free-2", "fixed-chunk-1"):  # combined rows, and not as many in every call
        assert len({case["slots"] for case in found if case["rule"] == rule}) > 1
    assert {case["room"] for case in found if case["rule"] == "never-split"} == {0}
