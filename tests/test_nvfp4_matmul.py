"""The NVFP4 matmul: its accuracy, each of its four choices by itself, and which arithmetic runs for how many rows.

The expected values are built on ml_dtypes' float4, float8 and bfloat16 in numpy, which share no code with the library.
"""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch_variance.common import BadInput
from batch_variance.kernels.nvfp4 import GEMM, GEMV, POLICY_NAMES, Arithmetic, policy
from batch_variance.kernels.nvfp4.reference import emulated_matmul, matmul_float64, unpacked_weight
from batch_variance.kernels.sets import EmulatedKernels, PreparedNVFP4
from batch_variance.numerics import NVFP4Tensor, pack, quantize

EVERY = [Arithmetic("-".join(c), *c) for c in product(
    ("float32", "bfloat16"), ("float32", "bfloat16"), ("before", "after"), ("gemv", "gemm"))]
SHAPES = [(1, 5, 16), (17, 40, 48), (33, 96, 576), (3, 24, 1536)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_code_and_scale(tensor_scale: float) -> NVFP4Tensor:
    """254 rows of 16 columns: each finite e4m3 scale with each code."""
    codes = pack(torch.arange(16, dtype=torch.uint8)).expand(254, 8).contiguous()
    scales = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    return NVFP4Tensor(codes, scales.unsqueeze(1), torch.tensor(tensor_scale))


def numpy_weight(w: NVFP4Tensor, folded: bool, rounded: bool) -> np.ndarray:
    """float64 [N, K] of what the products see."""
    packed = w.codes.numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    values *= np.repeat(
        w.block_scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1
    )
    if folded:
        values = (values.astype(np.float32) * w.tensor_scale.numpy()).astype(np.float64)
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) if rounded else values


def numpy_matmul(x: torch.Tensor, w: NVFP4Tensor, a: Arithmetic) -> tuple[np.ndarray, np.ndarray]:
    """float64 result of the rounded operands, and the same of their magnitudes, which bounds float32's error."""
    inputs = (
        x.numpy().astype(ml_dtypes.bfloat16).astype(np.float64) if a.activations == "bfloat16" else x.double().numpy()
    )
    weight = numpy_weight(w, a.tensor_scale == "before", a.weights == "bfloat16")
    scale = float(w.tensor_scale) if a.tensor_scale == "after" else 1.0
    return inputs @ weight.T * scale, np.abs(inputs) @ np.abs(weight).T * scale


def run(x, w, arithmetic):
    return EmulatedKernels().nvfp4(x, PreparedNVFP4(w), arithmetic)


@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
@pytest.mark.parametrize("m,n,k", SHAPES)
def test_accuracy(m, n, k, arithmetic):
    x, w = random(m, k), quantize(random(n, k, seed=1))
    exact, magnitude = numpy_matmul(x, w, arithmetic)
    np.testing.assert_allclose(matmul_float64(x, w, arithmetic).numpy(), exact, rtol=0, atol=1e-13 * magnitude.max())
    found = run(x, w, arithmetic)
    assert found.dtype == torch.float32 and found.shape == (m, n)
    # K products and K additions, each rounded once in float32, and one product with the tensor scale.
    assert (np.abs(found.double().numpy() - exact) <= (k + 1) * 2.0**-24 * magnitude).all()


def test_the_reference_without_an_arithmetic_rounds_nothing():
    x, w = random(9, 48), quantize(random(40, 48, seed=1))
    exact = x.double().numpy() @ (numpy_weight(w, False, False) * float(w.tensor_scale)).T
    np.testing.assert_allclose(matmul_float64(x, w).numpy(), exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-12, 0.0123])
def test_every_code_and_scale(arithmetic, tensor_scale):
    """One-hot rows read the weight out: nothing is added, so the bits are known."""
    w = every_code_and_scale(tensor_scale)
    exact, _ = numpy_matmul(torch.eye(16), w, arithmetic)
    np.testing.assert_array_equal(run(torch.eye(16), w, arithmetic).numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
def test_no_rows(arithmetic):
    assert run(torch.zeros(0, 48), quantize(random(40, 48)), arithmetic).shape == (0, 40)


# --- each choice by itself

@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
def test_activations_are_rounded_first_and_nowhere_else(arithmetic):
    w, x = quantize(random(40, 64, seed=1)), random(20, 64)
    rounded = x.bfloat16().float()
    fine, coarse = (run(x, w, arithmetic.but("", activations=dtype)) for dtype in ("float32", "bfloat16"))
    assert not torch.equal(fine, coarse)
    assert torch.equal(coarse, run(rounded, w, arithmetic.but("", activations="float32")))


@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
def test_weight_rounding_acts_only_where_the_tensor_scale_is_folded_in(arithmetic):
    w, x = quantize(random(40, 64, seed=1)), random(20, 64)
    same = torch.equal(*(run(x, w, arithmetic.but("", weights=dtype)) for dtype in ("float32", "bfloat16")))
    assert same == (arithmetic.tensor_scale == "after")


@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
def test_a_power_of_two_as_tensor_scale_makes_its_place_indifferent(arithmetic):
    x, values = random(20, 64), random(40, 64, seed=1)
    for scale, expected in ((2.0**-9, True), (0.0019, False)):
        w = quantize(values, scale)
        same = torch.equal(*(run(x, w, arithmetic.but("", tensor_scale=place)) for place in ("before", "after")))
        assert same == expected


@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
def test_order_acts_only_where_sums_are_rounded(arithmetic):
    w = quantize(random(40, 576, seed=1), 2.0**-9)
    orders = [arithmetic.but("", order=order) for order in ("gemv", "gemm")]
    assert not torch.equal(*(run(random(20, 576), w, a) for a in orders))
    whole = torch.randint(-4, 5, (20, 576), generator=torch.Generator().manual_seed(2)).float()
    coarse = NVFP4Tensor(w.codes, torch.ones_like(w.block_scale.float()).to(torch.float8_e4m3fn), w.tensor_scale)
    assert torch.equal(*(run(whole, coarse, a) for a in orders))


def test_unscaled_weights_are_exact_in_bfloat16():
    w = every_code_and_scale(1.0)
    assert torch.equal(w.unscaled(), w.unscaled().bfloat16().float())


@pytest.mark.parametrize("arithmetic", EVERY, ids=lambda a: a.name)
def test_prepared_forms_are_the_unpacked_weights(arithmetic):
    w = quantize(random(40, 64, seed=1))
    prepared = PreparedNVFP4(w)
    for other in EVERY:
        prepared.form(other)
    assert torch.equal(prepared.form(arithmetic), unpacked_weight(w, arithmetic))
    assert prepared.form(arithmetic) is prepared.form(arithmetic) and len(prepared.unpacked) == 3


def test_the_two_paths_are_gllms():
    assert (GEMV.activations, GEMV.weights, GEMV.tensor_scale, GEMV.order) == ("float32", "float32", "after", "gemv")
    assert (GEMM.activations, GEMM.weights, GEMM.tensor_scale, GEMM.order) == ("bfloat16", "bfloat16", "before", "gemm")
    x, w = random(20, 576), quantize(random(96, 576, seed=1))
    exact = matmul_float64(x, w)
    size = exact.norm()
    assert (run(x, w, GEMV).double() - exact).norm() / size < 1e-6
    assert 2.0**-11 < (run(x, w, GEMM).double() - exact).norm() / size < 2.0**-8


# --- the policies

@pytest.mark.parametrize("rows,expected", [(1, "gemv"), (31, "gemv"), (32, "gemv"), (33, "gemm"), (4096, "gemm")])
def test_default_is_gllms_threshold(rows, expected):
    assert policy("default").choose(rows).name == expected
    assert policy("default").threshold == 32


@given(threshold=st.integers(0, 5000), rows=st.integers(1, 10000), name=st.sampled_from(POLICY_NAMES))
def test_every_policy_follows_its_table(threshold, rows, name):
    chosen = policy(name, threshold).choose(rows)
    low = rows <= threshold
    expected = {
        "default": GEMV if low else GEMM,
        "force-gemv": GEMV,
        "force-gemm": GEMM,
        "round-activations": GEMV.but("gemv-rounded", activations="bfloat16") if low else GEMM,
        "round-activations-exact-weights": GEMV.but("gemv-rounded", activations="bfloat16") if low
        else GEMM.but("gemm-exact-weights", tensor_scale="after"),
    }[name]
    assert chosen == expected


def test_threshold_0_always_takes_the_gemm():
    assert policy("default", 0).choose(1) is GEMM and policy("default", 0).threshold == 0


@pytest.mark.parametrize("name", ["force-gemv", "force-gemm"])
def test_one_path_has_no_threshold(name):
    assert policy(name).threshold is None and policy(name).choose(1) is policy(name).choose(10**6)


def test_the_last_policy_leaves_only_the_order_of_additions():
    x, w = random(40, 576), quantize(random(96, 576, seed=1))
    low, high = (policy("round-activations-exact-weights").choose(rows) for rows in (32, 33))
    assert torch.equal(run(x, w, low.but("", order="gemm")), run(x, w, high))
    assert not torch.equal(run(x, w, low), run(x, w, high))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_negative_threshold(name):
    with pytest.raises(BadInput, match="threshold -1 is negative"):
        policy(name, -1)


def test_unknown_policy():
    with pytest.raises(BadInput, match="policy 'fastest' is unknown: give one of default, force-gemv"):
        policy("fastest")


def test_emulated_matmul_takes_few_columns():
    """Fewer columns than the GEMV has ranges."""
    x, unpacked = random(3, 2), random(5, 2, seed=1)
    found = emulated_matmul(x, unpacked, torch.tensor(1.0), GEMV)
    torch.testing.assert_close(found.double(), x.double() @ unpacked.double().t(), rtol=0, atol=1e-6)
