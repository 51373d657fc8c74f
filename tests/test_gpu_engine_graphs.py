"""The engine's decode steps replayed as CUDA graphs: texts, margins and traces of the ordinary steps, bit for bit."""

from dataclasses import replace

import pytest
import torch

from batch_variance.engine import DecodeGraphs, EngineConfig, Load, Model, load_weights, serve
from batch_variance.kernels.nvfp4 import policy
from batch_variance.kernels.sets import TritonKernels
from batch_variance.studies import engine_bench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPE = replace(
    engine_bench.SHAPE, hidden=1024, intermediate=2048, layers=2, heads=8, kv_heads=4, head_dim=64, vocabulary=1024
)


def seen(run):
    return [(r.tokens, r.margins, r.runners_up, r.finished) for r in run.requests], run.steps


@pytest.fixture(scope="module")
def weights():
    return engine_bench.random_weights(SHAPE)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize("kernels,rule", [("default", "flashmla"), ("invariant", "free-1"), ("invariant", "free-4")])
def test_replayed_steps_are_the_ordinary_ones(weights, kernels, rule, concurrency):
    config = EngineConfig(
        max_rows=256, max_requests=32, max_length=512, page=32, ignore_eos=True, split_rule=rule, split_block=32
    )
    model = Model(weights, engine_bench.kernels_of(kernels), policy("default"))
    prompts = [p * (1 + 3 * (i % 2)) for i, p in enumerate(engine_bench.prompts(9, SHAPE.vocabulary))]  # ragged
    load = Load(concurrency, concurrency + 6, 40, seed=1)
    graphs = DecodeGraphs(model, config)
    expected = serve(model, prompts, load, config)
    for _ in range(2):
        assert seen(serve(model, prompts, load, config, build=graphs.engine)) == seen(expected)
    assert graphs.replayed > graphs.captured and graphs.ordinary
    assert max(max(step.splits, default=0) for step in expected.steps) > 1  # so the combine step had work


@pytest.mark.parametrize("rule", ["", "flashmla", "never-split", "free-most-2"])
def test_the_tiny_nvfp4_model_is_replayed_under_a_row_threshold(tiny_folder, rule):
    weights = load_weights(tiny_folder, torch.device("cuda"), nvfp4=True)
    model = Model(weights, TritonKernels(), policy("default", 4))
    config = EngineConfig(
        max_requests=8, max_length=128, ignore_eos=True, split_rule=rule, num_sm_parts=12, split_block=16
    )
    prompts = [list(range(3, 3 + n)) for n in (5, 17, 33, 40)]
    load, graphs = Load(8, 8, 30, seed=1), DecodeGraphs(model, config)
    expected = serve(model, prompts, load, config)
    assert seen(serve(model, prompts, load, config, build=graphs.engine)) == seen(expected)
    taken = {policy("default", 4).choose(rows).name for rows in (4, 5)}
    assert {m.kernel for step in expected.steps for m in step.matmuls} == taken and len(taken) == 2
    assert graphs.replayed


def test_a_replay_keeps_its_rotary_table_when_the_models_grows(weights):
    model = Model(weights, engine_bench.kernels_of("invariant"), policy("default"))
    config = EngineConfig(max_rows=256, max_length=256, page=32, ignore_eos=True, split_rule="free-4")
    prompts, load = engine_bench.prompts(3, SHAPE.vocabulary), Load(3, 3, 30, seed=0)
    graphs = DecodeGraphs(model, config)
    first = seen(serve(model, prompts, load, config, build=graphs.engine))
    serve(model, [[1] * 2100], Load(1, 1, 2, 0), replace(config, max_length=2200, prefill_chunk=256))
    size = 2048 * SHAPE.head_dim // 2
    fill = [torch.full((size,), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(64)]
    assert fill  # one of them would lie where the smaller table was, were that freed
    assert seen(serve(model, prompts, load, config, build=graphs.engine)) == first


def test_invariant_kernels_keep_texts_when_replayed(weights):
    config = EngineConfig(max_rows=256, max_length=256, page=32, ignore_eos=True, split_rule="free-4")
    model = Model(weights, engine_bench.kernels_of("invariant"), policy("default"))
    graphs = DecodeGraphs(model, config)
    found = engine_bench.variants(model, config, engine_bench.prompts(8, SHAPE.vocabulary), 16, 64, 32, graphs.engine)
    assert found == (0, 64) and graphs.replayed > 100
