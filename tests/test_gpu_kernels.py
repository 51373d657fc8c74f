"""The Triton kernels on a GPU: accuracy against float64, and rows that do not see each other. Skipped without CUDA."""

import pytest
import torch

from batch_variance.engine import EngineConfig, Load, Model, load_weights, serve
from batch_variance.kernels.attention.reference import attend_float64
from batch_variance.kernels.decode import attend as split_attend
from batch_variance.kernels.decode import exact, random_inputs
from batch_variance.kernels.gemm.reference import matmul_float64 as gemm_float64
from batch_variance.kernels.moe import in_turn as moe_reference
from batch_variance.kernels.norm.reference import rms_norm as norm_reference
from batch_variance.kernels.nvfp4 import GEMM, GEMV, policy
from batch_variance.kernels.nvfp4.reference import matmul_float64
from batch_variance.kernels.sets import PreparedExperts, PreparedNVFP4, kernel_set
from batch_variance.kernels.tiles import differing_rows
from batch_variance.numerics import quantize
from batch_variance.schedules import make_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
SHAPES = [(576, 1536), (1536, 576), (96, 576), (576, 192), (64, 16), (80, 48)]
ARITHMETICS = [
    GEMV, GEMM, GEMV.but("rounded", activations="bfloat16"), GEMV.but("bf16 weights", weights="bfloat16", tensor_scale="before"),
    GEMM.but("exact weights", tensor_scale="after"), GEMM.but("float32 activations", activations="float32"),
    GEMV.but("order", order="gemm"),
]


@pytest.fixture(scope="module")
def kernels():
    from batch_variance.kernels.sets import TritonKernels

    return TritonKernels()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def weight(k, n, seed=1):
    return PreparedNVFP4(quantize(random(n, k, seed=seed) / k**0.5))


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: a.name)
@pytest.mark.parametrize("k,n", SHAPES)
def test_nvfp4_accuracy(kernels, k, n, arithmetic):
    x, w = random(65, k), weight(k, n)
    exact = matmul_float64(x, w.weight, arithmetic)
    found = kernels.nvfp4(x, w, arithmetic)
    assert found.isfinite().all()
    # Rounding of K float32 additions of terms whose magnitudes sum to at most |x| |W|.
    bound = k * 2.0**-22 * (x.abs().double() @ w.weight.dequantize().abs().double().t())
    assert ((found.double() - exact).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: a.name)
@pytest.mark.parametrize("k,n", SHAPES)
def test_nvfp4_rows_are_independent(kernels, k, n, arithmetic):
    x, w = random(40, k), weight(k, n)
    x[3], x[5, 0] = torch.nan, torch.inf
    assert differing_rows(lambda rows: kernels.nvfp4(rows, w, arithmetic), x, SIZES) == (0, sum(SIZES))


@pytest.mark.parametrize("counts", [[0, 0], [1, 0, 5], [32, 33, 0, 64, 65, 1], [128, 1, 1, 1]], ids=str)
def test_experts_at_once_give_the_bits_of_each_alone(kernels, counts):
    x, experts = random(sum(counts), 576), [weight(576, 192, seed=e) for e in range(len(counts))]
    arithmetics = [policy("default").choose(count) for count in counts]
    found = kernels.experts(x, PreparedExperts(experts), counts, arithmetics)
    alone = [kernels.nvfp4(*case) for case in zip(x.split(counts), experts, arithmetics)]
    assert torch.equal(found.view(torch.int32), torch.cat(alone).view(torch.int32))


@pytest.mark.parametrize("rounded", [False, True])
def test_a_sum_in_one_launch_has_the_bits_of_many(kernels, rounded):
    parts = random(129, 12, 576)
    found = kernels.add_in_turn(parts, rounded)
    assert torch.equal(found.view(torch.int32), moe_reference.add_in_turn(parts, rounded).view(torch.int32))
    assert kernels.add_in_turn(parts[:0], rounded).shape == (0, 576)


def test_the_two_paths_differ(kernels):
    x, w = random(64, 576), weight(576, 1536)
    gemv, gemm = kernels.nvfp4(x, w, GEMV), kernels.nvfp4(x, w, GEMM)
    assert (gemv != gemm).float().mean() > 0.9
    order = kernels.nvfp4(x, w, GEMV.but("order", order="gemm"))
    assert 0 < (gemv != order).float().mean() and (gemv - order).abs().max() < (gemv - gemm).abs().max() / 10


def test_no_rows_and_every_output_written(kernels, monkeypatch):
    w = weight(576, 192)
    assert kernels.nvfp4(random(0, 576), w, GEMM).shape == (0, 192)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(torch.nan))
    for rows in (1, 17, 65):
        for arithmetic in (GEMV, GEMM):
            assert kernels.nvfp4(random(rows, 576), w, arithmetic).isfinite().all()
        assert kernels.linear(random(rows, 576), random(100, 576)).isfinite().all()


@pytest.mark.parametrize("k,n", [*SHAPES, (576, 49152), (577, 33)])
def test_matmul(kernels, k, n):
    x, w = random(40, k), random(n, k, seed=1) / k**0.5
    bound = k * 2.0**-22 * (x.abs().double() @ w.abs().double().t())
    assert ((kernels.linear(x, w).double() - gemm_float64(x, w)).abs() <= bound).all()
    assert differing_rows(lambda rows: kernels.linear(rows, w), x, SIZES)[0] == 0


def test_rms_norm(kernels):
    x, w = random(40, 576), random(576, seed=2)
    exact = norm_reference(x.double().cpu(), w.double().cpu(), 1e-5)
    assert (kernels.rms_norm(x, w, 1e-5).cpu() - exact).abs().max() < 1e-5
    assert differing_rows(lambda rows: kernels.rms_norm(rows, w, 1e-5), x, SIZES)[0] == 0


@pytest.mark.parametrize("page", [16, 32])
def test_attention(kernels, page):
    lengths = torch.tensor([0, 1, 15, 16, 17, 31, 32, 33, 100, 128, 129, 255] * 3).cuda()
    k_pages, v_pages = random(300, page, 3, 64, seed=3), random(300, page, 3, 64, seed=4)
    tables = torch.stack([torch.randperm(300, generator=torch.Generator().manual_seed(i))[:16] for i in range(36)]).cuda()
    q = random(36, 9, 64, seed=5)
    exact = attend_float64(q.cpu(), k_pages.cpu(), v_pages.cpu(), tables.cpu(), lengths.cpu())
    found = kernels.attend(q, k_pages, v_pages, tables, lengths)
    assert (found.cpu() - exact).abs().max() < 1e-5
    packed = torch.arange(36, device="cuda").float().unsqueeze(1)

    def rows(index):
        pick = index[:, 0].long()
        return kernels.attend(q[pick], k_pages, v_pages, tables[pick], lengths[pick]).flatten(1)

    assert differing_rows(rows, packed, SIZES)[0] == 0


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("rule", ["flashmla", "never-split", "fixed-count-2", "fixed-chunk-1", "free-1"])
def test_split_decode_in_float32(rule, sink):
    """The engine's own shapes: 9 query and 3 key/value heads of 64, float32."""
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 129, 400]
    inputs = random_inputs(lengths, 9, 3, 64, 64, page_size=16, sink=sink, dtype=torch.float32, device="cuda")
    plan = make_plan(rule, lengths, 24, 16)
    out, lse = split_attend(inputs, plan)
    exact_out, exact_lse = exact(inputs)
    assert (out.double() - exact_out.double()).abs().max() < 1e-5
    longer = torch.tensor(lengths, device="cuda") > 0
    assert (lse.double() - exact_lse.double())[longer].abs().max() < 1e-5
    alone = [split_attend(inputs.row(i), make_plan(rule, lengths[i : i + 1], 24, 16))[0] for i in range(len(lengths))]
    same = torch.equal(torch.cat(alone).view(torch.int32), out.view(torch.int32))
    assert same == (rule != "flashmla")


@pytest.mark.parametrize("rule", ["", "flashmla", "never-split", "free-1"])
def test_the_engine_on_a_gpu(tiny_folder, rule):
    model = Model(load_weights(tiny_folder, torch.device("cuda"), nvfp4=True), kernel_set(torch.device("cuda")), policy("force-gemm"))
    prompts = [list(range(3, 3 + n)) for n in (5, 17, 33, 40)]

    def run(concurrency):
        config = EngineConfig(max_requests=8, max_length=128, ignore_eos=True, split_rule=rule, num_sm_parts=12, split_block=16)
        found = serve(model, prompts, Load(concurrency, 8, 6, seed=1), config)
        return {(r.prompt, tuple(r.output), tuple(r.margins)) for r in found.requests}

    assert (run(8) == run(1)) == (rule != "flashmla")
