"""The derived mixture of experts: equal to the dense model when every expert is taken, routed by the row alone."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from batch_variance.common import BadInput, data_path
from batch_variance.engine import (
    DEFAULT_MODEL,
    ChatTokenizer,
    EngineConfig,
    ExpertSplit,
    Load,
    Model,
    load_weights,
    serve,
)
from batch_variance.engine.experts import (
    SHIPPED_SPLIT, _balanced_groups, perplexity, prompt_logits, python_docs, split_for,
)
from batch_variance.kernels.nvfp4 import policy
from batch_variance.kernels.sets import EmulatedKernels
from batch_variance.kernels.tiles import differing_rows

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def model(folder, **options) -> Model:
    return Model(load_weights(folder, CPU, **options), EmulatedKernels(), policy("force-gemv"))


def shuffled(experts, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return ExpertSplit([torch.randperm(96, generator=generator) % experts for _ in range(2)], experts, top_k)


@pytest.mark.parametrize("experts", [2, 6])
def test_all_experts_make_the_dense_model(tiny_folder, experts):
    dense = prompt_logits(model(tiny_folder), TOKENS)
    derived = prompt_logits(model(tiny_folder, split=shuffled(experts, experts)), TOKENS)
    torch.testing.assert_close(derived, dense, rtol=0, atol=1e-4)
    fewer = prompt_logits(model(tiny_folder, split=shuffled(experts, 1)), TOKENS)
    assert (fewer - dense).abs().max() > 0.1


@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize("top_k", [1, 4, 6])
def test_rows_per_expert_sum_to_rows_times_top_k(tiny_folder, top_k, nvfp4):
    runner = model(tiny_folder, nvfp4=nvfp4, split=shuffled(6, top_k))
    run = serve(runner, [TOKENS, TOKENS[:20]], Load(4, 6, 5, seed=0), EngineConfig(ignore_eos=True))
    assert any(kind == "decode" for step in run.steps for _, _, kind in step.rows)
    for step in run.steps:
        rows, decode = Counter(), Counter()
        for record in step.matmuls:
            assert 0 <= record.expert < 6 and 0 <= record.decode_rows <= record.rows <= step.co_resident_rows
            assert record.kernel == ("gemv" if nvfp4 else "plain")
            rows[record.layer] += record.rows
            decode[record.layer] += record.decode_rows
        assert rows == {0: top_k * step.co_resident_rows, 1: top_k * step.co_resident_rows}
        wanted = top_k * sum(kind == "decode" for _, _, kind in step.rows)
        assert [decode[layer] for layer in (0, 1)] == [wanted, wanted]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_router_looks_at_the_row_alone(tiny_folder, threads):
    runner = model(tiny_folder, split=shuffled(6, 4))
    experts = runner.weights.layers[0].ffn
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    x[3], x[5] = torch.nan, 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert (runner._route(x, experts).sum(1) == 4).all()
        assert differing_rows(lambda rows: runner._route(rows, experts), x, SIZES) == (0, sum(SIZES))
    finally:
        torch.set_num_threads(before)


def test_the_router_takes_the_largest_activation_sums(tiny_folder):
    split = shuffled(6, 2)
    runner = model(tiny_folder, split=split)
    dense = load_weights(tiny_folder, CPU).layers[1].ffn
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    gate, up = (x.double() @ dense.gate_up.double().t()).chunk(2, dim=1)
    activation = (gate * torch.sigmoid(gate) * up).abs()
    sums = torch.stack([activation[:, split.group[1] == e].sum(1) for e in range(6)], dim=1)
    ordered = sums.sort(dim=1, descending=True)
    clear = (ordered.values[:, 1] - ordered.values[:, 2]) > 1e-4
    assert clear.sum() > 30
    chosen = runner._route(x, runner.weights.layers[1].ffn)
    expected = torch.zeros_like(chosen).scatter_(1, ordered.indices[:, :2], True)
    assert torch.equal(chosen[clear], expected[clear])


def test_the_label_says_derived(tiny_folder):
    assert "derived: FFN split into 6 experts, top 4" in load_weights(tiny_folder, CPU, split=shuffled(6, 4)).label
    assert "derived" not in load_weights(tiny_folder, CPU, nvfp4=True).label


# --- splits

@pytest.mark.parametrize("kind", ["contiguous", "clustered"])
def test_splits_are_balanced_and_repeat(tiny_folder, kind):
    weights = load_weights(tiny_folder, CPU)
    first, second = (split_for(weights, tiny_folder, "some/model", kind, 6, 4) for _ in range(2))
    assert (first.experts, first.top_k, len(first.group)) == (6, 4, 2)
    for a, b in zip(first.group, second.group):
        assert a.dtype == torch.int64 and torch.equal(a, b)
        assert a.bincount(minlength=6).tolist() == [16] * 6
    if kind == "contiguous":
        assert torch.equal(first.group[0], torch.arange(96) // 16)
    else:
        assert not torch.equal(first.group[0], first.group[1])


def test_neurons_that_fire_together_end_in_one_group():
    generator = torch.Generator().manual_seed(0)
    truth = torch.randperm(64, generator=generator) % 4
    activation = torch.rand(300, 4, generator=generator).pow(4)[:, truth] + 0.01 * torch.rand(
        300, 64, generator=generator
    )
    found = _balanced_groups(activation, 4, seed=0)
    assert all(len(found[truth == group].unique()) == 1 for group in range(4))


def test_the_shipped_split_fits_the_default_model(tiny_folder):
    group = np.load(data_path(SHIPPED_SPLIT))["group"]
    assert group.shape == (30, 1536)
    assert all(np.bincount(layer, minlength=16).tolist() == [96] * 16 for layer in group)
    weights = load_weights(tiny_folder, CPU)
    sized = replace(weights, shape=replace(weights.shape, intermediate=1536, layers=30))
    split = split_for(sized, tiny_folder, DEFAULT_MODEL, "clustered", 16, 12)
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(split.group, group))


@pytest.mark.parametrize("kind,experts,top_k,message", [
    ("random", 6, 4, "expert split 'random' is unknown: give contiguous or clustered"),
    ("contiguous", 1, 1, "experts = 1 does not cut 96 neurons"),
    ("contiguous", 0, 1, "experts = 0 does not cut"),
    ("contiguous", -6, 1, "experts = -6 does not cut"),
    ("contiguous", 5, 1, "experts = 5 does not cut"),
    ("contiguous", 12, 1, "groups of a multiple of 16"),
    ("contiguous", 6, 0, "top_k = 0 does not fit 6 experts"),
    ("contiguous", 6, 7, "top_k = 7 does not fit 6 experts"),
])
def test_bad_numbers(tiny_folder, kind, experts, top_k, message):
    with pytest.raises(BadInput, match=message):
        split_for(load_weights(tiny_folder, CPU), tiny_folder, "some/model", kind, experts, top_k)


# --- perplexity

def test_perplexity_of_a_uniform_model_is_its_vocabulary(tiny_folder):
    weights = load_weights(tiny_folder, CPU)
    weights.head = torch.zeros_like(weights.head)
    assert perplexity(Model(weights, EmulatedKernels(), policy("default")), TOKENS, window=20) == pytest.approx(
        272, rel=1e-5
    )


def test_perplexity_by_windows(tiny_folder):
    runner = model(tiny_folder)
    losses = []
    for part in (TOKENS[:20], TOKENS[20:40], TOKENS[40:]):
        logits = prompt_logits(runner, part).double()
        losses += [(logits[i].logsumexp(0) - logits[i, token]).item() for i, token in enumerate(part[1:])]
    assert len(losses) == 47
    assert perplexity(runner, TOKENS, window=20) == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_python_docs_are_consecutive(tiny_folder):
    tokenizer = ChatTokenizer(tiny_folder)
    first = python_docs(tokenizer, 0, 300)
    assert len(first) == 300 and python_docs(tokenizer, 100, 200) == first[100:]
    assert "assert" in tokenizer.decode(first)
