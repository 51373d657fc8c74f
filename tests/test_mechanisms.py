"""Mechanisms: all off is row-invariant, each alone moves bits exactly when its trigger occurs, on dense and on expert
FFNs."""

from dataclasses import replace

import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.engine import (
    MECHANISMS,
    EngineConfig,
    ExpertSplit,
    Load,
    Mechanisms,
    Settings,
    build,
    load_weights,
    serve,
)
from batch_variance.engine import mechanisms as module
from batch_variance.engine.mechanisms import MechanismKernels
from batch_variance.kernels.norm.reference import rms_norm
from batch_variance.kernels.sets import EmulatedKernels
from batch_variance.kernels.tiles import differing_rows

CPU = torch.device("cpu")
KERNELS = EmulatedKernels()
SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65)
SPLIT = ExpertSplit([torch.arange(96) % 6] * 2, experts=6, top_k=4)
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 22, 9, 30)]
STORAGE = [("float32", "as computed"), ("float32", "float16"), ("bfloat16", "float8")]
KINDS = ("dense", "moe")


@pytest.fixture(scope="module")
def weights(tiny_folder):
    return {
        "dense": load_weights(tiny_folder, CPU, nvfp4=True),
        "moe": load_weights(tiny_folder, CPU, nvfp4=True, split=SPLIT),
    }


def run(weights, settings, concurrency, requests=24, tokens=6, seed=1):
    model, changes = build(weights, KERNELS, settings)
    config = EngineConfig(max_requests=concurrency, max_length=40, ignore_eos=True, **changes)
    return serve(model, PROMPTS, Load(concurrency, requests, tokens, seed), config)


def served(found):
    """Per prompt, the (tokens, margins) it got: one entry each when nothing depends on the batch."""
    seen = {}
    for request in found.requests:
        seen.setdefault(request.prompt, set()).add((tuple(request.output), tuple(request.margins)))
    return seen


def choices(found, name):
    """What the steps that carried decode rows chose."""
    return {
        choice
        for step in found.steps
        if any(phase == "decode" for _, _, phase in step.rows)
        for (known, choice) in step.choices
        if known == name
    }


# --- the record


def test_names_and_their_sets():
    assert Mechanisms.none().on == () and str(Mechanisms.none()) == "none"
    assert Mechanisms.all().on == MECHANISMS and len(MECHANISMS) == 7
    for name in MECHANISMS:
        assert Mechanisms.only(name).on == (name,) and str(Mechanisms.only(name)) == name
        assert set(Mechanisms.all().without(name).on) == set(MECHANISMS) - {name}
        assert Mechanisms.none().without(name) == Mechanisms.none()
    assert Mechanisms.of(["split_k", "norm_blocks"]).on == ("split_k", "norm_blocks")
    for wrong in (lambda: Mechanisms.only("split-k"), lambda: Mechanisms.all().without("")):
        with pytest.raises(BadInput, match="row_threshold, batch_splits"):
            wrong()


@pytest.mark.parametrize(
    "change",
    [
        {"storage": "float16"},
        {"logits": "half"},
        {"ties": "random"},
        {"activations": "int8"},
        {"planted": -1.0},
        {"planted": float("nan")},
        {"threshold": -1},
        {"mechanisms": Mechanisms.only("batch_scale"), "activations": "as computed"},
    ],
)
def test_wrong_settings_are_refused_by_name(change):
    name = "batch_scale" if "mechanisms" in change else next(iter(change))
    with pytest.raises(BadInput, match=name):
        Settings(**change)


# --- all off


@pytest.mark.parametrize("storage,activations", STORAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_all_off_gives_each_prompt_what_it_gets_alone(weights, kind, storage, activations):
    settings = Settings(storage=storage, logits=storage, activations=activations)
    alone = served(run(weights[kind], settings, 1, requests=4))
    for concurrency in (2, 5, 16, 24):
        found = run(weights[kind], settings, concurrency)
        assert max(step.co_resident_rows for step in found.steps) > 2 * concurrency
        assert served(found) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_model_computes_is_the_plain_engines_when_nothing_is_set(weights, kind):
    """With every mechanism off and nothing rounded, only decode attention differs from the plain engine: by its
    plan."""
    from batch_variance.engine import Model
    from batch_variance.kernels.nvfp4 import policy

    config = EngineConfig(
        max_length=40, ignore_eos=True, split_rule="never-split", num_sm_parts=module.SPLIT_PARTS, split_block=16
    )
    plain = serve(Model(weights[kind], KERNELS, policy("force-gemv")), PROMPTS, Load(4, 8, 6, 1), config)
    assert served(plain) == served(run(weights[kind], Settings(activations="as computed"), 4, 8))


# --- one on

ALONE = [
    (kind, name, activations)
    for kind in KINDS
    for name in MECHANISMS
    for activations in ("as computed", "float16", "float8")
    if not (kind == "dense" and name == "expert_order") and not (name == "batch_scale" and activations == "as computed")
]


@pytest.mark.parametrize("kind,name,activations", ALONE)
def test_one_alone_moves_bits_where_its_trigger_occurs(weights, kind, name, activations):
    """In float32; bfloat16 storage rounds most of a small model's noise away again."""
    settings = Settings(Mechanisms.only(name), activations=activations, threshold=8)
    alone, together = run(weights[kind], settings, 1, requests=4), run(weights[kind], settings, 24)
    assert served(alone) != served(together)
    assert choices(together, name) - choices(alone, name), "a decode row met what it never meets alone"


def test_expert_order_does_nothing_to_a_dense_ffn(weights):
    settings = Settings(Mechanisms.only("expert_order"))
    assert served(run(weights["dense"], settings, 24)) == served(run(weights["dense"], Settings(), 1, requests=4))


def test_without_its_trigger_a_mechanism_does_nothing(weights, monkeypatch):
    """Each trigger moved out of reach: the same bits as with the mechanism off."""
    monkeypatch.setattr(module, "SPLIT_K_BY_ROWS", ((1000, 1), (None, 2)))
    monkeypatch.setattr(module, "NORM_BLOCK_BY_ROWS", ((0, 32), (None, 1024)))
    monkeypatch.setattr(module, "ATTENTION_BLOCK_BY_LONGEST", ((1000, 16), (None, 32)))
    monkeypatch.setattr(module, "SPLIT_PARTS", 1)  # nothing to cut for
    on = Mechanisms.of(["row_threshold", "split_k", "norm_blocks", "attention_dispatch", "batch_splits"])
    for kind in KINDS:
        off = Settings(threshold=1000)
        assert served(run(weights[kind], replace(off, mechanisms=on), 24)) == served(
            run(weights[kind], off, 1, requests=4)
        )


def test_off_and_on_differ_by_the_plan_alone(weights):
    """batch_splits: where FlashMLA's schedule leaves a row whole, it has the bits of the own-length rule."""
    found = [
        build(weights["dense"], KERNELS, Settings(mechanisms))[1]
        for mechanisms in (Mechanisms.none(), Mechanisms.only("batch_splits"))
    ]
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"split_rule"}


# --- the operations


@pytest.mark.parametrize("name", ["split_k", "norm_blocks", "batch_scale"])
def test_operations_are_row_invariant_off_and_not_on(name):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(24, 576, generator=generator), torch.randn(64, 576, generator=generator)

    def operation(kernels):
        return {
            "split_k": lambda rows: kernels.linear(rows, weight),
            "batch_scale": kernels.activations,
            "norm_blocks": lambda rows: kernels.rms_norm(rows, weight[0], 1e-5),
        }[name]

    off, on = (
        MechanismKernels(KERNELS, Settings(mechanisms)) for mechanisms in (Mechanisms.none(), Mechanisms.only(name))
    )
    assert differing_rows(operation(off), x, SIZES) == (0, sum(SIZES))
    assert differing_rows(operation(on), x, SIZES)[0] > 0
    # Within one entry of the dispatch table nothing varies either.
    if name != "batch_scale":
        assert differing_rows(operation(on), x, (1, 2, 3, 4)) == (0, 10)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_segments_of_k_add_up(pieces, monkeypatch):
    monkeypatch.setattr(module, "SPLIT_K_BY_ROWS", ((None, pieces),))
    kernels = MechanismKernels(KERNELS, Settings(Mechanisms.only("split_k")))
    for k in (64, 576, 100, 16):
        x, weight = torch.randn(5, k), torch.randn(7, k)
        exact = x.double() @ weight.double().t()
        bound = k * 2.0**-23 * (x.abs().double() @ weight.abs().double().t())
        assert ((kernels.linear(x, weight) - exact).abs() <= bound).all()
        assert kernels.linear(x[:0], weight).shape == (0, 7)
    assert {choice for _, choice in kernels.choices} == {pieces}


def test_cut_weights_are_kept_per_weight():
    kernels = MechanismKernels(KERNELS, Settings(Mechanisms.only("split_k")))
    x = torch.randn(1, 64)
    for seed in range(20):  # a freed weight's address comes back
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(kernels.linear(x, weight), x @ weight.t())


def test_blocked_norm_against_float64():
    for rows, k in ((0, 64), (1, 64), (3, 576), (2, 100)):
        x, weight = torch.randn(rows, k), torch.randn(k)
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        for block in (16, 32, 1024):
            assert ((rms_norm(x, weight, 1e-5, block) - exact).abs() <= 1e-6 * exact.abs() + 1e-30).all()
    assert not torch.equal(
        rms_norm(torch.randn(40, 576, generator=torch.Generator().manual_seed(1)), torch.ones(576), 0.0, 32),
        rms_norm(torch.randn(40, 576, generator=torch.Generator().manual_seed(1)), torch.ones(576), 0.0),
    )


@pytest.mark.parametrize("activations,relative", [("float8", 2.0**-4), ("float16", 2.0**-11)])
def test_scaled_activations(activations, relative):
    x = torch.randn(6, 80) * torch.tensor([1.0, 1e-20, 1e20, 0.0, 3.0, 1.0])[:, None]
    x[4, 0] = torch.nan
    for mechanisms, alike in ((Mechanisms.none(), True), (Mechanisms.only("batch_scale"), False)):
        kernels = MechanismKernels(KERNELS, Settings(mechanisms, activations=activations))
        whole = kernels.activations(x[[0, 1, 2, 3, 5]])
        assert whole.isfinite().all()
        alone = torch.cat([kernels.activations(x[i : i + 1]) for i in (0, 1, 2, 3, 5)])
        # Relative to a row's largest value, a subnormal below counting as rounded to it.
        error = (alone - x[[0, 1, 2, 3, 5]]).abs() / x[[0, 1, 2, 3, 5]].abs().amax(-1, keepdim=True).clamp(min=1e-38)
        assert (error <= relative).all() and (alone[3] == 0).all()
        assert torch.equal(alone, whole) == alike
        assert kernels.activations(x[:0]).shape == (0, 80)
    off = MechanismKernels(KERNELS, Settings(activations=activations))
    assert off.activations(x)[5].isfinite().all() and off.activations(x)[4].isnan().any()  # NaN stays in its row
    left = MechanismKernels(KERNELS, Settings(activations="as computed"))
    assert left.activations(x) is x


def test_a_scale_spans_the_rows_of_one_expert():
    kernels = MechanismKernels(KERNELS, Settings(Mechanisms.only("batch_scale"), activations="float8"))
    x = torch.randn(7, 64) * torch.logspace(-3, 3, 7)[:, None]
    group = torch.tensor([0, 0, 0, 3, 3, 5, 5])
    found = kernels.activations(x, group, 6)
    for expert in (0, 3, 5):
        assert torch.equal(found[group == expert], kernels.activations(x[group == expert]))
    assert not torch.equal(found, kernels.activations(x))


def test_storage_rounds_to_bfloat16_and_keeps_float32():
    kernels = MechanismKernels(KERNELS, Settings(storage="bfloat16", activations="as computed"))
    x = torch.randn(5, 64)
    for found in (kernels.linear(x, torch.randn(7, 64)), kernels.rms_norm(x, torch.ones(64), 1e-5), kernels.store(x)):
        assert found.dtype == torch.float32 and torch.equal(found, found.bfloat16().float())
    assert MechanismKernels(KERNELS, Settings()).store(x) is x
    logits = kernels.head(x, torch.randn(7, 64))  # their dtype is another setting's
    assert not torch.equal(logits, logits.bfloat16().float())


def test_a_bfloat16_run_keeps_nothing_finer(weights):
    """The residual stream and the KV cache hold bfloat16 values."""
    from batch_variance.engine.experts import prompt_logits

    for kind in KINDS:
        model, _ = build(weights[kind], KERNELS, Settings(Mechanisms.all(), storage="bfloat16"))
        seen = []
        prompt_logits(model, PROMPTS[1], lambda layer, hidden: seen.append(hidden))
        assert all(torch.equal(hidden, hidden.bfloat16().float()) for hidden in seen) and len(seen) == 2


# --- logits and ties


class Tied(EmulatedKernels):
    """Logits of which two are the largest: equal in bfloat16, in float32 the second is a hair above the first."""

    def linear(self, x, weight):
        found = super().linear(x, weight)
        if weight.shape[0] == 272:
            found = torch.zeros_like(found)
            found[:, 40], found[:, 200] = 8.0, 8.0 + 2.0**-10
        return found


@pytest.mark.parametrize(
    "logits,ties,token,margin",
    [("float32", "lowest", 200, 2.0**-10), ("bfloat16", "lowest", 40, 0.0), ("bfloat16", "highest", 200, 0.0)],
)
def test_bfloat16_logits_tie_and_the_rule_decides(weights, logits, ties, token, margin):
    model, changes = build(weights["dense"], Tied(), Settings(logits=logits, ties=ties))
    found = serve(model, PROMPTS[:1], Load(1, 1, 3, 0), EngineConfig(max_length=40, ignore_eos=True, **changes))
    assert found.requests[0].output == [token] * 3
    assert found.requests[0].margins == [margin] * 3


def test_wrong_engine_settings_are_refused(weights):
    from batch_variance.engine import Engine

    model, _ = build(weights["dense"], KERNELS, Settings())
    for change in ({"logits": "float16"}, {"ties": "first"}, {"wide_block": 0}):
        with pytest.raises(BadInput, match=next(iter(change))):
            Engine(model, EngineConfig(**change))


# --- planted


def test_planted_noise_comes_with_company_only_and_grows_with_its_size(weights):
    alone = served(run(weights["dense"], Settings(), 1, requests=4))
    assert served(run(weights["dense"], Settings(planted=1.0), 1, requests=4)) == alone
    distance = []
    for size in (1e-3, 1e-1):
        found = run(weights["dense"], Settings(planted=size), 8)
        moved = [abs(margin - next(iter(alone[r.prompt]))[1][0]) for r in found.requests for margin in r.margins[:1]]
        distance.append(max(moved))
        assert served(found) == served(run(weights["dense"], Settings(planted=size), 8))
    assert 0 < distance[0] < 0.01 < distance[1]
