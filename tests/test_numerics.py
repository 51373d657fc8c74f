"""ULP distances against numpy's own neighbours, and NVFP4 against ml_dtypes over every code and scale."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_variance.numerics import (
    BLOCK, NVFP4Tensor, decode_e2m1, encode_e2m1, pack, quantize, row_scaled_ulp, spacing, ulp_distance, unpack,
)

INT64_MAX = 2**63 - 1
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WIDTH = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def steps_up(x: torch.Tensor, count: int) -> torch.Tensor:
    """The value ``count`` steps above, found one neighbour at a time."""
    for _ in range(count):
        x = torch.nextafter(x, torch.full_like(x, torch.inf))
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 65504.0 / 2, 2.0**-14, -(2.0**-13)])
def test_distance_counts_neighbours(dtype, start):
    a = torch.tensor([start], dtype=dtype)
    for count in (0, 1, 2, 7):
        b = steps_up(a, count)
        assert ulp_distance(a, b).item() == count
        assert ulp_distance(b, a).item() == count


@pytest.mark.parametrize("dtype", FLOATS)
def test_distance_special_values(dtype):
    zero, nan, inf = (torch.tensor([v], dtype=dtype) for v in (0.0, float("nan"), float("inf")))
    smallest = steps_up(zero, 1)
    assert ulp_distance(zero, -zero).item() == 0
    assert ulp_distance(smallest, -smallest).item() == 2
    assert ulp_distance(nan, nan).item() == 0
    assert ulp_distance(nan, zero).item() == INT64_MAX == ulp_distance(inf, nan).item()
    assert ulp_distance(inf, inf).item() == 0
    assert ulp_distance(torch.tensor([torch.finfo(dtype).max], dtype=dtype), inf).item() == 1
    assert ulp_distance(inf, zero).dtype == torch.int64


def test_distance_saturates_only_past_int64():
    top = torch.finfo(torch.float64).max
    a = torch.tensor([top, 1.0, -1.0], dtype=torch.float64)
    b = torch.tensor([-top, -1.0, -top], dtype=torch.float64)
    found = ulp_distance(a, b)
    ones = int(torch.tensor([1.0], dtype=torch.float64).view(torch.int64))
    tops = int(torch.tensor([top], dtype=torch.float64).view(torch.int64))
    assert found.tolist() == [INT64_MAX, min(2 * ones, INT64_MAX), tops - ones]
    half = torch.tensor([2.0**-1000], dtype=torch.float64)
    assert ulp_distance(half, -half).item() == 2 * int(half.view(torch.int64))


@given(st.integers(-32768, 32767), st.integers(-32768, 32767))
@settings(max_examples=300, deadline=None)
def test_distance_is_a_metric_on_sixteen_bits(i, j):
    for dtype in (torch.float16, torch.bfloat16):
        a, b = (torch.tensor([k], dtype=torch.int16).view(dtype) for k in (i, j))
        if a.isnan().item() or b.isnan().item():
            continue
        between = ulp_distance(a, b).item()
        zero = torch.zeros(1, dtype=dtype)
        assert between <= ulp_distance(a, zero).item() + ulp_distance(zero, b).item()
        assert (between == 0) == (a.item() == b.item())


def test_distance_refuses_mixed_and_integer_dtypes():
    with pytest.raises(TypeError, match="bfloat16.*float32|float32.*bfloat16"):
        ulp_distance(torch.ones(1), torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="int64"):
        ulp_distance(torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))


def test_distance_takes_views_and_empty():
    a = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(ulp_distance(a, a), torch.zeros(4, 3, dtype=torch.int64))
    assert ulp_distance(torch.empty(0), torch.empty(0)).shape == (0,)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_spacing_agrees_with_numpy(dtype):
    values = np.array([0.0, 1.0, 1.5, 2.0, 3.9, 2.0**-14, 1e-7, 60000.0], dtype=dtype)
    ours = spacing(torch.from_numpy(values.astype(np.float64)), torch.from_numpy(values).dtype)
    assert np.array_equal(ours.numpy(), np.spacing(values).astype(np.float64))


def test_row_scaled_is_in_units_of_the_row():
    a = torch.tensor([[1.0, 256.0], [1.0, 2.0]], dtype=torch.bfloat16)
    b = a.clone()
    b[:, 0] = steps_up(b[:, 0], 1)
    # One step at 1 is 2**-7. The first row's spacing (at 256) is 2, the second's (at 2) is 2**-6.
    assert row_scaled_ulp(a, b).tolist() == [[2.0**-8, 0.0], [0.5, 0.0]]


def test_row_scaled_special_values():
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([[nan, inf, 1.0, nan], [0.0, 0.0, 0.0, 0.0]])
    b = torch.tensor([[nan, inf, inf, 2.0], [0.0, -0.0, 0.0, 0.0]])
    assert row_scaled_ulp(a, b).tolist() == [[0.0, 0.0, inf, inf], [0.0] * 4]
    huge = torch.tensor([[torch.finfo(torch.float64).max]], dtype=torch.float64)
    assert row_scaled_ulp(huge, -huge).item() == 2.0 * (2.0**53 - 1)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        row_scaled_ulp(torch.ones(2), torch.ones(3))


# --- NVFP4 -------------------------------------------------------------------------------------------------------


def ml_e2m1(values: torch.Tensor) -> np.ndarray:
    return values.numpy().astype(ml_dtypes.float4_e2m1fn)


def test_every_code_decodes_as_ml_dtypes():
    codes = torch.arange(16, dtype=torch.uint8)
    theirs = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ours = decode_e2m1(codes).numpy()
    assert np.array_equal(ours.view(np.int32), theirs.view(np.int32))


def test_encoding_agrees_with_ml_dtypes_on_ties_neighbours_and_overflow():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([ties, torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(ties, torch.tensor(0.0))])
    exact = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 1e-30, 7.0, 1e30])
    values = torch.cat([near, exact, torch.linspace(0, 8, 4001)])
    values = torch.cat([values, -values])
    assert np.array_equal(encode_e2m1(values).numpy(), ml_e2m1(values).view(np.uint8))


def test_encoding_saturates_infinities_and_refuses_nan():
    assert encode_e2m1(torch.tensor([torch.inf, -torch.inf])).tolist() == [7, 15]
    with pytest.raises(ValueError, match="1 values are NaN"):
        encode_e2m1(torch.tensor([1.0, torch.nan]))


def test_pack_and_unpack_are_inverse_over_every_pair():
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8).reshape(1, -1)
    assert pack(pairs).unique().numel() == 256
    assert torch.equal(unpack(pack(pairs)), pairs)
    assert pack(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x21


def test_every_scale_times_every_code_is_exact():
    """16 codes x 256 block scales: our product has the bits of ml_dtypes' values multiplied in float64."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = pack(torch.arange(16, dtype=torch.uint8).reshape(1, 16)).expand(256, 8).contiguous()
    ours = NVFP4Tensor(codes, scales.reshape(256, 1), torch.tensor(1.0)).unscaled().numpy()
    s = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    c = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    theirs = s[:, None] * c[None, :]
    assert np.array_equal(ours.astype(np.float64), theirs, equal_nan=True)
    assert np.isnan(ours).all(axis=1).sum() == 2
    finite = ours[~np.isnan(ours).any(axis=1)]
    assert np.array_equal(finite, torch.from_numpy(finite).to(torch.bfloat16).float().numpy())


def test_quantize_agrees_with_a_second_implementation():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 64, generator=generator) * torch.logspace(-4, 2, 7).unsqueeze(1)
    weight[2, :16] = 0.0
    ours = quantize(weight)
    w = weight.numpy().astype(np.float32).reshape(7, 4, BLOCK)
    tensor_scale = np.float32(np.abs(w).max() / (6.0 * 448.0))
    block = (np.abs(w).max(-1) / np.float32(6) / tensor_scale).astype(np.float32)
    block = np.where(block > 0, np.clip(block, 2.0**-9, 448), 0).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    unit = block.astype(np.float32) * tensor_scale
    scaled = np.divide(w, unit[..., None], out=np.zeros_like(w), where=unit[..., None] > 0)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn)
    theirs = codes.astype(np.float32) * block.astype(np.float32)[..., None] * tensor_scale
    assert np.array_equal(ours.dequantize().numpy(), theirs.reshape(7, 64))
    assert np.array_equal(ours.block_scale.view(torch.uint8).numpy(), block.view(np.uint8))


def test_quantize_error_is_within_half_a_step():
    weight = torch.randn(33, 48, generator=torch.Generator().manual_seed(0))
    found = quantize(weight)
    error = (found.dequantize() - weight).abs().reshape(33, 3, BLOCK)
    largest = weight.abs().reshape(33, 3, BLOCK).amax(-1, keepdim=True)
    # The widest gap between e2m1 values is 2 of 6, half of it is a sixth; the block scale itself is off by at most 1/16.
    assert (error <= largest * (1 / 6 + 1 / 12)).all()


def test_quantize_edges():
    zeros = quantize(torch.zeros(2, 16))
    assert torch.equal(zeros.dequantize(), torch.zeros(2, 16)) and zeros.tensor_scale.item() == 1.0
    assert quantize(torch.empty(0, 32)).shape == (0, 32)
    small = quantize(torch.tensor([[1.0] * 16 + [1e-9] * 16]))
    assert small.dequantize()[0, :16].eq(1.0).all() and small.dequantize()[0, 16:].eq(0.0).all()
    overflow = quantize(torch.full((1, 16), 1e4), tensor_scale=1.0)
    assert overflow.dequantize().unique().tolist() == [6.0 * 448.0]
    for bad, words in ((torch.ones(2, 15), "multiple of 16"), (torch.full((1, 16), torch.nan), "16 values")):
        with pytest.raises(ValueError, match=words):
            quantize(bad)
    with pytest.raises(ValueError, match="positive"):
        quantize(torch.ones(1, 16), tensor_scale=-1.0)


def test_negative_zero_survives():
    weight = torch.tensor([[-0.0, 1.0] * 8])
    assert torch.signbit(quantize(weight).dequantize())[0, 0]
