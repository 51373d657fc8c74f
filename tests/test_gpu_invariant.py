"""The invariant kernels on a GPU: one bit class over row counts and configurations, accuracy. Skipped without CUDA."""

import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.kernels.classes import SIZES, bit_name, classify
from batch_variance.kernels.decode import Workspace, exact, launch, random_inputs
from batch_variance.kernels.gemm import invariant
from batch_variance.kernels.gemm.invariant import Config
from batch_variance.kernels.gemm.reference import matmul_float64
from batch_variance.kernels.moe import invariant as moe
from batch_variance.kernels.moe.reference import grouped_float64
from batch_variance.kernels.norm import rows
from batch_variance.kernels.nvfp4 import invariant as nvfp4
from batch_variance.kernels.nvfp4.reference import matmul_float64 as nvfp4_float64
from batch_variance.kernels.tiles import differing_rows
from batch_variance.kernels.use import InvariantKernels
from batch_variance.numerics import quantize
from batch_variance.numerics.trees import matmul_tree
from batch_variance.schedules import make_plan, one_program_a_row

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# (K, N, segments): K a multiple of the segment or not, of 8 or not (then no tensor descriptors), N odd. Compiling is
# what takes time here, and every shape below is another set of binaries.
SHAPES = [(1024, 512, 1), (2048, 256, 4), (1480, 200, 3), (1001, 77, 2), (40, 33, 1)]
CONFIGS = [
    "parallel 16x64x128 w4 s4 tma swap",
    "parallel 16x64x128 w4 s4 swap",
    "parallel 16x32x64 w4 s3",
    "parallel 64x64x64 w4 s4 tma",
    "parallel 128x128x64 w8 s4 tma",
    "in-turn 128x256x64 w8 s3 tma",
    "in-turn 64x64x64 w4 s3",
    "in-turn 64x64x64 w8 s3 tma hold",
]
SHORT = tuple(m for m in SIZES if m <= 257)
FAR = 8192  # as many rows as "any number" is tried at


def one_line(found) -> str:
    """candidate: its classes, one after another."""
    parts = found.groupby("candidate").bit_class.unique()
    return "; ".join(f"{name}: {' '.join(classes)}" for name, classes in parts.items())


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


GEMM_CASES = [(*shape, torch.bfloat16) for shape in SHAPES] + [(*SHAPES[0], torch.float16), (*SHAPES[3], torch.float16)]


@pytest.mark.parametrize("K,N,count,dtype", GEMM_CASES)
def test_gemm_is_one_class_accurate_and_written(K, N, count, dtype, monkeypatch):
    x, w = random(300, K, dtype=dtype), random(N, K, seed=1, dtype=dtype)
    # Row 0's sums are cancelled but for what the output's dtype cannot hold, so that bits far below it name the class.
    b = -matmul_float64(x[:1], w)[0].to(dtype)
    empty = torch.empty
    poisoned = lambda *a, **kw: empty(*a, **kw).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(torch, "empty", poisoned)
    operations = {name: lambda rows, c=Config.parse(name): invariant.matmul(rows, w, b, c, count) for name in CONFIGS}
    found = classify(operations, x, SHORT)
    assert set(found.failure) == {""}
    assert found.bit_class.nunique() == 1, one_line(found)
    assert not found.rows_moved.any() and not found.not_finite.any()
    exact = matmul_float64(x, w) + b.double()
    size = x.double().abs() @ w.double().abs().t() + b.double().abs()
    for operation in operations.values():
        y = operation(x)
        assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + K * 2.0**-23 * size).all()
        assert operation(x[:0]).shape == (0, N)


def test_every_gemm_configuration_is_in_the_class_of_one_row_at_8192():
    K, N, count = SHAPES[1]
    x, w = random(FAR, K), random(N, K, seed=1)
    operations = {
        name: lambda rows, c=Config.parse(name): invariant.matmul(rows, w, None, c, count) for name in CONFIGS
    }
    found = classify(operations, x, (1, 1024, 4096, FAR))
    assert set(found.failure) == {""} and not found.rows_moved.any() and not found.not_finite.any()
    assert found.bit_class.nunique() == 1, one_line(found)
    other = classify({"one segment": lambda rows: invariant.matmul(rows, w, count=1)}, x, (1, FAR))
    assert set(other.bit_class).isdisjoint(found.bit_class)


@pytest.mark.parametrize("K,N", [(576, 192), (1001, 77)])
def test_gemm_in_float32_is_one_class_and_as_exact_as_float32(K, N):
    x, w = random(300, K, dtype=torch.float32), random(N, K, seed=1, dtype=torch.float32)
    found = classify({"float32": lambda rows: invariant.matmul(rows, w)}, x, SHORT)
    assert set(found.failure) == {""} and found.bit_class.nunique() == 1 and not found.rows_moved.any()
    size = x.double().abs() @ w.double().abs().t()
    assert ((invariant.matmul(x, w).double() - matmul_float64(x, w)).abs() <= K * 2.0**-23 * size).all()


def test_gemm_by_its_own_choice_keeps_a_row_among_shuffled_others():
    for K, N in ((4096, 4096), (7168, 2048)):
        x, w = random(64, K), random(N, K, seed=1)
        x[3], x[5, 0] = torch.nan, torch.inf
        assert differing_rows(
            lambda rows: invariant.matmul(rows, w), x, (1, 2, 16, 17, 33, 65, 129, 600, 1500, FAR)
        ) == (
            0,
            2363 + FAR,
        )


def test_gemm_segments_are_another_class():
    x, w = random(32, 2048), random(256, 2048, seed=1)
    assert len({bit_name(invariant.matmul(x, w, count=count)) for count in (1, 2, 4)}) == 3


def test_gemm_replayed_in_graphs_side_by_side_gives_the_eager_bits():
    x, w = random(16, 4096), random(1024, 4096, seed=1)
    eager = bit_name(invariant.matmul(x, w))
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [invariant.matmul(x, w) for _ in range(20)]
        graphs.append((graph, out, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert {bit_name(y) for _, out, _ in graphs for y in out} == {eager}


NVFP4_CONFIGS = list(dict.fromkeys(config for _, config in nvfp4.DEFAULTS)) + [
    Config.parse("in-turn 128x128x64 w8 s3"),
    Config.parse("in-turn 64x64x32 w4 s3"),
]
OUTSIDE = Config.parse("parallel 16x32x128 w4 s4")


@pytest.mark.parametrize("K,N,count", [(1024, 512, 1), (2048, 256, 4), (1488, 200, 3), (80, 33, 1)])
def test_nvfp4_is_one_class_accurate_and_written(K, N, count, monkeypatch):
    import triton.language as tl

    empty = torch.empty
    poisoned = lambda *a, **kw: empty(*a, **kw).fill_(torch.nan)  # noqa: E731
    x, w = random(300, K, dtype=torch.float32), quantize(random(N, K, seed=1, dtype=torch.float32))
    monkeypatch.setattr(torch, "empty", poisoned)
    operations = {str(c): lambda rows, c=c: nvfp4.matmul(rows, w, c, count) for c in NVFP4_CONFIGS}
    found = classify(operations, x, SHORT)
    assert set(found.failure) == {""}
    assert found.bit_class.nunique() == 1, one_line(found)
    assert not found.rows_moved.any() and not found.not_finite.any()
    exact = nvfp4_float64(x, w, nvfp4.INVARIANT)
    size = x.abs().double() @ w.dequantize().abs().double().t()
    for operation in operations.values():
        y = operation(x)
        assert ((y.double() - exact).abs() <= K * 2.0**-22 * size + 1e-30).all()
        assert operation(x[:0]).shape == (0, N)
    assert torch.equal(y.view(torch.int32), nvfp4.matmul(x.bfloat16(), w, NVFP4_CONFIGS[-1], count).view(torch.int32))
    # What is refused adds products from far apart, and this comparison sees it.
    other = nvfp4.matmul(x[:16], w, OUTSIDE, count, operand=tl.bfloat16)
    assert not torch.equal(other.view(torch.int32), y[:16].view(torch.int32))
    with pytest.raises(BadInput, match="another order"):
        nvfp4.matmul(x, w, OUTSIDE, count)


def test_nvfp4_keeps_a_row_among_shuffled_others():
    x, w = random(64, 4096, dtype=torch.float32), quantize(random(1024, 4096, seed=1, dtype=torch.float32))
    x[3], x[5, 0] = torch.nan, torch.inf
    assert differing_rows(lambda rows: nvfp4.matmul(rows, w), x, (1, 2, 16, 17, 32, 33, 65, 129, 600, FAR))[0] == 0


@pytest.mark.parametrize("count", [1, 2])
def test_the_gemms_tree_is_one_over_rows_and_forms_and_that_of_its_design(count):
    K, N = 512, 256

    def tree(rows, name=None):
        config = Config.parse(name) if name else None
        return matmul_tree(
            lambda x, w: invariant.matmul(x, w, config=config, count=count), rows, N, K, torch.bfloat16, "cuda"
        )

    found = tree(1)
    assert {tree(rows) for rows in (16, 64, 300, 1000)} == {found}
    assert {tree(300, name) for name in CONFIGS} == {found}
    assert max(found.ways) > 2  # a tensor core adds several products and its accumulator at once
    first, second = found.joins(0)[: K // 2], found.joins(0)[K // 2 :]
    assert (int(first.max()) == K // 2 and set(second.tolist()) == {K}) == (count == 2)


@pytest.mark.parametrize("K,N,count", [(1024, 512, 2), (200, 77, 1)])
def test_experts_are_one_class_over_rows_and_blocks_and_the_plain_gemms(K, N, count, monkeypatch):
    tokens, top_k, experts = 300, 2, 8
    x, w = random(tokens, K), random(experts, N, K, seed=1)
    generator = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).cuda()
    chosen[:150, 0], chosen[:150, 1] = 3, 4  # two crowded experts
    gates = random(tokens, top_k, seed=3)
    empty = torch.empty
    poisoned = lambda *a, **kw: empty(*a, **kw).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(torch, "empty", poisoned)
    whole = {block: moe.grouped_matmul(x, w, chosen, block, count) for block in (16, 32, 64, 128)}
    assert len({bit_name(y) for y in whole.values()}) == 1
    y = whole[64]
    size = torch.einsum("tk,tjnk->tjn", x.double().abs(), w.double().abs()[chosen])
    exact = grouped_float64(x, w, chosen)
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + K * 2.0**-23 * size).all()
    plain = invariant.matmul(x, w[3], count=count)
    assert torch.equal(y[:150, 0].view(torch.int16), plain[:150].view(torch.int16))

    def run(index):
        pick = index[:, 0].long()
        found = moe.grouped_matmul(x[pick], w, chosen[pick], count=count)
        return moe.expert_sum(found, gates[pick], chosen[pick])

    assert differing_rows(run, torch.arange(300.0, device="cuda").unsqueeze(1), (1, 2, 17, 129, 600, FAR))[0] == 0
    assert moe.grouped_matmul(x[:0], w, chosen[:0]).shape == (0, top_k, N)


@pytest.mark.parametrize("rule", ["free-2", "free-most-8"])
def test_decode_pieces_by_own_length_keep_bits_under_every_schedule(rule):
    lengths = [1024, 1, 0, 5000, 64, 8192, 65]
    inputs = random_inputs(lengths, dtype=torch.bfloat16, heads=64, kv_heads=8, d_qk=128, d_v=128, device="cuda")
    truth, _ = exact(inputs, 64)

    def poisoned(some, plan):
        work = Workspace.for_slots(plan.num_slots, some.heads, some.d_v, "cuda")
        work.accumulators.fill_(torch.nan), work.states.fill_(torch.nan)
        out = torch.full((some.batch, some.heads, some.d_v), torch.nan, dtype=torch.bfloat16, device="cuda")
        return launch(some, plan, workspace=work, out=out)[0]

    plans = [make_plan(rule, lengths, programs) for programs in (1, 16, 33, 500)]
    outs = [poisoned(inputs, plan) for plan in (*plans, one_program_a_row(plans[0]))]
    assert {bit_name(out) for out in outs} == {bit_name(outs[0])}
    assert (outs[0].double() - truth).norm() <= 6e-3 * truth.norm()
    for row, length in enumerate(lengths):
        alone = poisoned(inputs.row(row), make_plan(rule, [length], 132))
        assert torch.equal(alone[0].view(torch.int16), outs[0][row].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 40, 1024, 5000])
def test_row_reductions(columns, dtype):
    x = random(40, columns, dtype=dtype)
    truth = {
        rows.softmax: x.double().softmax(-1),
        rows.log_softmax: x.double().log_softmax(-1),
        rows.mean: x.double().mean(-1),
    }
    for operation, exact in truth.items():
        assert ((operation(x).double() - exact).abs() <= 4 * torch.finfo(dtype).eps * (1 + exact.abs())).all()
        assert differing_rows(lambda part: operation(part).view(len(part), -1), x, (*SHORT, FAR))[0] == 0
        assert operation(x[:0]).shape[0] == 0
    x[3], x[5, 0] = torch.nan, torch.inf
    assert torch.equal(rows.softmax(x).isnan(), x.softmax(-1).isnan())


def test_a_model_under_the_invariant_kernels():
    torch.manual_seed(0)
    parts = [
        torch.nn.Linear(1024, 2048),
        torch.nn.SiLU(),
        torch.nn.Linear(2048, 1024),
        torch.nn.RMSNorm(1024),
        torch.nn.Linear(1024, 512),
    ]
    model = torch.nn.Sequential(*parts, torch.nn.LogSoftmax(-1)).bfloat16().cuda()
    x, used = random(64, 1024), InvariantKernels()

    def run(batch):
        with used:
            return model(batch)

    with torch.no_grad():
        assert differing_rows(run, x, (*SHORT, FAR))[0] == 0
        ours, default = run(x).double(), model(x).double()
        exact = model.double()(x.double())
    assert used.left_alone == [] and "replaced" in used.claim()
    assert (ours - exact).norm() <= 1.05 * (default - exact).norm()
    assert (ours - exact).abs().max() <= 1.5 * (default - exact).abs().max()


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_attention_of_every_backend_is_covered(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (random(5, 8, 129, 64, seed=seed) for seed in range(3))
    used, call = InvariantKernels(), torch.nn.functional.scaled_dot_product_attention

    def run(part, tokens=129):
        with torch.no_grad(), used:
            return call(*(t[part, :, :tokens] for t in (q, k, v)), is_causal=True).contiguous()

    with sdpa_kernel(getattr(SDPBackend, backend)):
        whole, theirs = run(slice(None)), call(q, k, v, is_causal=True)
        assert used.left_alone == [] and used.claim()
        for part in (slice(0, 1), slice(2, 4)):
            assert torch.equal(run(part).view(torch.int16), whole[part].contiguous().view(torch.int16))
        if backend != "MATH":  # whose products take all keys at once
            short = run(slice(None), 65).view(torch.int16)
            assert torch.equal(short, whole[:, :, :65].contiguous().view(torch.int16))
    exact = call(q.double(), k.double(), v.double(), is_causal=True)
    assert (whole.double() - exact).norm() <= 1.05 * (theirs.double() - exact).norm()
