"""Mechanisms on a GPU: off, every operation and the whole engine are row-invariant; on, each alone moves bits. Skipped
without CUDA."""

import pandas as pd
import pytest
import torch

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
from batch_variance.engine.mechanisms import MechanismKernels
from batch_variance.kernels.norm.reference import rms_norm as norm_reference
from batch_variance.kernels.sets import kernel_set
from batch_variance.kernels.tiles import differing_rows
from batch_variance.studies.cells import Cell, Subject, occurred, serve_cells

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")
SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 129)
SPLIT = ExpertSplit([torch.arange(96) % 6] * 2, experts=6, top_k=4)
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 22, 9, 30)]
CASES = [(kind, name) for kind in ("dense", "moe") for name in MECHANISMS if (kind, name) != ("dense", "expert_order")]


@pytest.fixture(scope="module")
def kernels():
    return kernel_set(CUDA)


@pytest.fixture(scope="module")
def weights(tiny_folder):
    return {
        "dense": load_weights(tiny_folder, CUDA, nvfp4=True),
        "moe": load_weights(tiny_folder, CUDA, nvfp4=True, split=SPLIT),
    }


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def run(kernels, weights, settings, concurrency, requests=24):
    model, changes = build(weights, kernels, settings)
    return serve(
        model,
        PROMPTS,
        Load(concurrency, requests, 6, 1),
        EngineConfig(max_requests=concurrency, max_length=40, ignore_eos=True, **changes),
    )


def served(found):
    seen = {}
    for request in found.requests:
        seen.setdefault(request.prompt, set()).add((tuple(request.output), tuple(request.margins)))
    return seen


@pytest.mark.parametrize("name", ["split_k", "norm_blocks", "batch_scale"])
@pytest.mark.parametrize("k", [576, 1536])
def test_operations_are_row_invariant_off_and_not_on(kernels, name, k):
    x, weight = random(40, k), random(96, k, seed=1)

    def operation(chosen):
        return {
            "split_k": lambda rows: chosen.linear(rows, weight),
            "batch_scale": chosen.activations,
            "norm_blocks": lambda rows: chosen.rms_norm(rows, weight[0], 1e-5),
        }[name]

    for activations in ("float16", "float8"):
        off = MechanismKernels(kernels, Settings(activations=activations))
        assert differing_rows(operation(off), x, SIZES) == (0, sum(SIZES))
    on = MechanismKernels(kernels, Settings(Mechanisms.only(name)))
    assert differing_rows(operation(on), x, SIZES)[0] > 0
    if name != "batch_scale":
        assert differing_rows(operation(on), x, (1, 2, 3, 4)) == (0, 10)


def test_cut_weights_and_blocks_are_accurate(kernels):
    chosen = MechanismKernels(kernels, Settings(Mechanisms.of(["split_k", "norm_blocks"])))
    for rows in (1, 20, 40):
        x, weight = random(rows, 576), random(96, 576, seed=1)
        bound = 576 * 2.0**-22 * (x.abs().double() @ weight.abs().double().t())
        assert ((chosen.linear(x, weight).double() - x.double() @ weight.double().t()).abs() <= bound).all()
        exact = norm_reference(x.double().cpu(), weight[0].double().cpu(), 1e-5)
        assert (chosen.rms_norm(x, weight[0], 1e-5).cpu() - exact).abs().max() < 1e-5


def test_scales_of_experts_are_those_of_their_rows(kernels):
    chosen = MechanismKernels(kernels, Settings(Mechanisms.only("batch_scale"), activations="float8"))
    x, group = random(30, 576) * torch.logspace(-2, 2, 30).cuda()[:, None], torch.arange(30).cuda() // 7
    found = chosen.activations(x, group, 16)
    for expert in range(5):
        assert torch.equal(found[group == expert], chosen.activations(x[group == expert]))


@pytest.mark.parametrize(
    "storage,activations", [("float32", "as computed"), ("float32", "float16"), ("bfloat16", "float8")]
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_all_off_gives_each_prompt_what_it_gets_alone(kernels, weights, kind, storage, activations):
    settings = Settings(storage=storage, logits=storage, activations=activations)
    alone = served(run(kernels, weights[kind], settings, 1, requests=4))
    for concurrency in (2, 16, 24):
        assert served(run(kernels, weights[kind], settings, concurrency)) == alone


@pytest.mark.parametrize("kind,name", CASES)
def test_one_alone_moves_bits(kernels, weights, kind, name):
    settings = Settings(Mechanisms.only(name), threshold=8)
    assert served(run(kernels, weights[kind], settings, 1, requests=4)) != served(
        run(kernels, weights[kind], settings, 24)
    )


def test_ties_on_a_gpu_follow_the_rule(kernels, weights):
    """argmax takes the first of equals here too, or the tie rule would be no rule."""
    logits = torch.zeros(5, 49152, device=CUDA)
    logits[:, [40, 9000, 49000]] = 8.0
    assert logits.argmax(-1).tolist() == [40] * 5 and logits.bfloat16().argmax(-1).tolist() == [40] * 5
    assert (49151 - logits.flip(-1).argmax(-1)).tolist() == [49000] * 5


def test_processes_share_a_gpu_and_change_nothing(tiny_folder):
    subject = Subject.of(
        str(tiny_folder), "moe", 6, 4, "contiguous", "cuda", ["a", "what is it", "tell me more of this thing", "no"]
    )
    plan = [Cell(Settings(mechanisms, threshold=8), 12, 70, 5) for mechanisms in (Mechanisms.none(), Mechanisms.all())]
    one, three = (serve_cells(subject, plan, processes, progress=False) for processes in (1, 3))
    pd.testing.assert_frame_equal(one.requests, three.requests)
    assert subject.tier == "live-gpu" and not one.requests[one.requests.mechanisms == "none"].margins_moved.any()
    on = one.choices[one.choices.mechanisms != "none"]
    assert all(occurred(on, name) for name in MECHANISMS)
