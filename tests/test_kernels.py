"""Rows of the emulated kernels do not see each other: alone, in shuffled batches, beside NaN, at tile boundaries.

The control that says so is itself tested: planted faults must show in it.
"""

import pytest
import torch
import torch.nn.functional as F

from batch_variance.engine.model import _gated
from batch_variance.kernels.attention.reference import attend_float64, attend_paged
from batch_variance.kernels.gemm.reference import matmul_float64, tiled_matmul
from batch_variance.kernels.norm.reference import rms_norm
from batch_variance.kernels.nvfp4 import GEMM, GEMV, policy
from batch_variance.kernels.sets import EmulatedKernels, NativeKernels, PreparedNVFP4, kernel_set
from batch_variance.kernels.tiles import TILE, by_tiles, differing_rows
from batch_variance.numerics import quantize

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
NONE = (0, sum(SIZES))
KERNELS = EmulatedKernels()
ARITHMETICS = [
    GEMV,
    GEMM,
    GEMV.but("rounded", activations="bfloat16"),
    GEMV.but("rounded weights", weights="bfloat16", tensor_scale="before"),
    GEMM.but("exact weights", tensor_scale="after"),
    GEMM.but("float32 activations", activations="float32"),
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(rows: int, columns: int) -> torch.Tensor:
    """Random rows, one of NaN, one with a NaN, one with an infinity, one of zeros."""
    x = random(rows, columns)
    x[3], x[5, 0], x[7, -1], x[11] = torch.nan, torch.nan, torch.inf, 0.0
    return x


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    """Thread counts that divide the rows of a step and ones that do not: a thread's share may end within a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("n,k", [(960, 576), (576, 1536), (192, 576), (576, 96), (1000, 64), (7, 33), (24, 17), (1, 5)])
def test_linear_rows_are_independent(threads, n, k):
    w = random(n, k, seed=1)
    assert differing_rows(lambda x: KERNELS.linear(x, w), poisoned(24, k), SIZES) == NONE


def test_linear_rows_are_independent_at_the_vocabulary(threads):
    w = random(49152, 576, seed=1)
    assert differing_rows(lambda x: KERNELS.linear(x, w), poisoned(12, 576), (2, 17, 33)) == (0, 52)


def test_linear_rows_are_independent_in_bfloat16():
    w = random(576, 576, seed=1).bfloat16()
    assert differing_rows(lambda x: KERNELS.linear(x, w), poisoned(24, 576).bfloat16(), SIZES) == NONE


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: a.name)
@pytest.mark.parametrize("n,k", [(192, 576), (576, 96), (40, 48), (5, 16)])
def test_nvfp4_rows_are_independent(threads, n, k, arithmetic):
    w = PreparedNVFP4(quantize(random(n, k, seed=1)))
    assert differing_rows(lambda x: KERNELS.nvfp4(x, w, arithmetic), poisoned(24, k), SIZES) == NONE


@pytest.mark.parametrize("k", [576, 64, 33])
def test_rms_norm_rows_are_independent(threads, k):
    w = random(k, seed=1)
    assert differing_rows(lambda x: KERNELS.rms_norm(x, w, 1e-5), poisoned(24, k), SIZES) == NONE


@pytest.mark.parametrize("neurons", [1536, 96, 33])
def test_gated_activation_rows_are_independent(threads, neurons):
    assert differing_rows(_gated, poisoned(24, 2 * neurons), SIZES) == NONE


def test_a_strided_batch_gives_the_same_bits():
    """A whole number of tiles needs no padding, and would hand its own strides to the operation."""
    w, wide = random(40, 36, seed=1), random(TILE, 100)
    strided = wide[:, 7:43]
    assert torch.equal(tiled_matmul(strided, w), tiled_matmul(strided.contiguous(), w))
    assert torch.equal(
        tiled_matmul(wide.t()[:48, :16], w[:, :16]), tiled_matmul(wide.t()[:48, :16].contiguous(), w[:, :16])
    )


@pytest.mark.parametrize("count", [0, 1, TILE - 1, TILE, TILE + 1, 5 * TILE])
def test_by_tiles_keeps_rows_and_calls_one_shape(count):
    shapes = set()

    def operation(a, b):
        shapes.add((tuple(a.shape), tuple(b.shape)))
        return a * b[:, :1]

    a, b = random(count, 3), random(count, 2, seed=1)
    assert torch.equal(by_tiles(operation, a, b), a * b[:, :1])
    assert shapes == {((TILE, 3), (TILE, 2))}


# --- attention

SHAPES = [(9, 3, 64, 16), (4, 2, 16, 16), (2, 1, 16, 16), (8, 8, 32, 8), (6, 2, 10, 5)]


def cached(heads, kv_heads, dim, page, rows=24, widest=5):
    """q, pages, tables, lengths: lengths at each boundary, NaN behind every length, in unused pages, in two rows."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, widest * page + 1, (rows,), generator=generator)
    lengths[:6] = torch.tensor([0, 1, page, page + 1, widest * page, widest * page - 1])
    tables = torch.randperm(rows * widest + 1, generator=generator)[: rows * widest].view(rows, widest)
    k, v = random(rows * widest + 1, page, kv_heads, dim), random(rows * widest + 1, page, kv_heads, dim, seed=1)
    for row, length in enumerate(lengths.tolist()):
        for pages in (k, v):
            held = pages[tables[row]].flatten(0, 1)
            held[length:] = torch.nan
            pages[tables[row]] = held.view(widest, page, kv_heads, dim)
    q = random(rows, heads, dim, seed=3)
    q[6], q[7, 0, 0] = torch.nan, torch.inf
    return q, k, v, tables, lengths


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_rows_are_independent(threads, shape):
    q, k, v, tables, lengths = cached(*shape)
    v[tables[8, 0], 0] = torch.inf
    lengths[8] = shape[-1] + 1
    rows = torch.arange(len(q))
    assert differing_rows(lambda i: KERNELS.attend(q[i], k, v, tables[i], lengths[i]), rows, SIZES) == NONE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_accuracy(shape):
    q, k, v, tables, lengths = cached(*shape)
    found, exact = attend_paged(q, k, v, tables, lengths), attend_float64(q, k, v, tables, lengths)
    assert found[0].eq(0).all() and exact[0].eq(0).all()  # zero length
    sound = [row for row in range(len(q)) if row not in (6, 7)]
    assert found[sound].isfinite().all()
    # Scores of a few units in float32, then a convex combination of values of a few units.
    torch.testing.assert_close(found[sound].double(), exact[sound], rtol=0, atol=5e-6)


def test_attention_against_torch():
    """attend_float64 itself, against torch's attention on the gathered keys."""
    q, k, v, tables, lengths = cached(9, 3, 64, 16)
    exact = attend_float64(q, k, v, tables, lengths)
    for row in (1, 3, 4, 12):
        keys, values = (pages[tables[row]].flatten(0, 1)[: lengths[row]].double().transpose(0, 1) for pages in (k, v))
        expected = F.scaled_dot_product_attention(q[row].double()[:, None], keys, values, enable_gqa=True)[:, 0]
        torch.testing.assert_close(exact[row], expected, rtol=0, atol=1e-12)


def test_attention_does_not_read_behind_a_length():
    """The rest of a row's last page holds later tokens, or what the page's last owner left."""
    q, k, v, tables, lengths = cached(4, 2, 16, 16)
    clean = [pages.nan_to_num(0.5) for pages in (k, v)]
    sound = torch.tensor([row for row in range(len(q)) if row not in (6, 7)])
    dirty = attend_paged(q[sound], k, v, tables[sound], lengths[sound])
    assert torch.equal(dirty, attend_paged(q[sound], *clean, tables[sound], lengths[sound]))


# --- accuracy of the plain references

@pytest.mark.parametrize("n,k", [(40, 576), (7, 33), (1, 1)])
def test_linear_accuracy(n, k):
    x, w = random(35, k), random(n, k, seed=1)
    exact = x.double().numpy() @ w.double().numpy().T
    torch.testing.assert_close(matmul_float64(x, w), torch.from_numpy(exact), rtol=1e-13, atol=1e-13)
    bound = k * 2.0**-23 * (x.abs().double() @ w.abs().double().t())
    assert ((tiled_matmul(x, w).double() - torch.from_numpy(exact)).abs() <= bound).all()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)])
def test_rms_norm_accuracy(dtype, tolerance):
    x, w = random(20, 576).to(dtype) * 3, random(576, seed=1).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    found = rms_norm(x, w, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=0)


# --- the control can fail

def test_the_control_catches_torchs_own_matmul():
    caught = 0
    for n, k in ((576, 576), (192, 576), (576, 1536)):
        w = random(n, k, seed=1)
        caught += differing_rows(lambda x: NativeKernels().linear(x, w), random(24, k), SIZES)[0]
    assert caught > 0


def _switches_by_size(x, w):
    return F.linear(x, w) if x.shape[0] <= 32 else sum(F.linear(x[:, i::2], w[:, i::2]) for i in (0, 1))


def _leaks_a_neighbour(x, w):
    return tiled_matmul(x, w) + 1e-6 * x.sum(0, keepdim=True)[:, :1]


def _depends_on_position(x, w):
    y = tiled_matmul(x, w)
    y[8::16] *= 1 + 2.0**-22
    return y


def _spreads_nan(x, w):
    return tiled_matmul(x, w) + 0 * x.max()


@pytest.mark.parametrize("fault", [_switches_by_size, _leaks_a_neighbour, _depends_on_position, _spreads_nan])
def test_the_control_catches_planted_faults(fault):
    w, x = random(40, 64, seed=1), random(24, 64)
    if fault is _spreads_nan:
        x[3] = torch.nan
    differ, compared = differing_rows(lambda rows: fault(rows, w), x, SIZES)
    assert compared == sum(SIZES) and differ > 0


@pytest.mark.parametrize(
    "value,change", [(1.0, 2.0**-23), (1.0, -(2.0**-24)), (0.0, torch.nan), (torch.nan, -torch.inf), (0.0, -0.0)]
)
def test_the_control_counts_what_differs(value, change):
    """One value of each odd row, in batches of 4: one ULP up or down, a NaN gained or lost, the sign of zero."""
    rows = torch.arange(40.0)[:, None].expand(40, 3)

    def operation(x):
        y = torch.full_like(x, value)
        if len(x) == 4:
            y[x[:, 0] % 2 == 1, 2] = torch.tensor(change) if value != 1 else 1 + torch.tensor(change)
        return y

    picks = [torch.randint(40, (size,), generator=g) for g in [torch.Generator().manual_seed(7)] for size in (3, 4, 4)]
    odd = sum(int((pick % 2).sum()) for pick in picks[1:])
    assert 0 < odd < 8
    assert differing_rows(operation, rows, (3, 4, 4), seed=7) == (odd, 11)
    assert differing_rows(operation, rows, (3, 5), seed=7) == (0, 8)


def test_the_control_places_the_threshold():
    """The dispatch itself as a fault: no row differs up to 32 rows, nearly all do above."""
    w, x, rule = PreparedNVFP4(quantize(random(40, 64, seed=1))), random(24, 64), policy("default")

    def dispatch(rows):
        return KERNELS.nvfp4(rows, w, rule.choose(len(rows)))

    assert differing_rows(dispatch, x, (1, 31, 32)) == (0, 64)
    differ, compared = differing_rows(dispatch, x, (33, 64))
    assert differ == compared == 97


def test_kernel_sets_name_their_tier():
    assert kernel_set(torch.device("cpu")).tier == "emulated"
    assert (NativeKernels.tier, KERNELS.device) == ("cpu-native", torch.device("cpu"))
