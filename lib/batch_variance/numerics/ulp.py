"""How far apart two floating-point tensors are, counted in representable values or in units of a row's own spacing."""

import torch

INT64_MAX = torch.iinfo(torch.int64).max

# dtype -> integer type of the same width, bits of the stored significand, smallest normal exponent
_LAYOUT = {
    torch.float64: (torch.int64, 52, -1022),
    torch.float32: (torch.int32, 23, -126),
    torch.float16: (torch.int16, 10, -14),
    torch.bfloat16: (torch.int16, 7, -126),
}


def _layout(a: torch.Tensor, b: torch.Tensor):
    if a.dtype != b.dtype:
        raise TypeError(f"the tensors have dtypes {a.dtype} and {b.dtype}: ULPs are counted within one dtype, so cast one first.")
    if a.dtype not in _LAYOUT:
        raise TypeError(f"dtype {a.dtype} has no ULP here: give float64, float32, float16 or bfloat16.")
    return _LAYOUT[a.dtype]


def _ordered(x: torch.Tensor, integer: torch.dtype) -> torch.Tensor:
    """Sign-magnitude bits as int64 that grow with the value; both zeros become 0."""
    bits = x.contiguous().view(integer).to(torch.int64)
    magnitude = bits & torch.iinfo(integer).max
    return torch.where(bits < 0, -magnitude, magnitude)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values lie between ``a`` and ``b``, elementwise, counting the step into ``b``.

    a, b: float64, float32, float16 or bfloat16, of one dtype; shapes broadcast.
    Returns int64. +0 equals -0; an infinity is one step beyond the largest finite value; NaN to NaN is 0, NaN to a
    number is int64's maximum; a distance over that (float64 of opposite signs only) saturates there.
    Raises TypeError when the dtypes differ or are not floating.
    """
    integer, _, _ = _layout(a, b)
    a, b = torch.broadcast_tensors(a, b)
    i, j = _ordered(a, integer), _ordered(b, integer)
    high, low = torch.maximum(i, j), torch.minimum(i, j)
    overflow = (low < 0) & (high > INT64_MAX + torch.clamp(low, max=0))
    distance = torch.where(overflow, INT64_MAX, high - low)
    a_nan, b_nan = a.isnan(), b.isnan()
    distance = torch.where(a_nan ^ b_nan, INT64_MAX, distance)
    return torch.where(a_nan & b_nan, 0, distance)


def spacing(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gap between neighbouring values of ``dtype`` at ``magnitude`` (float64, finite, not negative), as float64.

    Below the normal range the gap is the smallest subnormal, so the result is never 0.
    """
    _, significand_bits, minimum_exponent = _LAYOUT[dtype]
    _, exponent = torch.frexp(magnitude)
    exponent = torch.where(magnitude == 0, minimum_exponent, exponent.to(torch.int64) - 1)
    exponent = exponent.clamp(min=minimum_exponent) - significand_bits
    return torch.ldexp(torch.ones_like(magnitude), exponent)


def row_scaled_ulp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b| over the spacing of the dtype at the largest finite magnitude of the row in either tensor.

    a, b: [..., row] of one dtype and shape; a row is the last dimension.
    Returns float64 of that shape. Equal infinities and NaN to NaN are 0; a non-finite value against another is infinite.
    Raises TypeError when dtypes differ, ValueError when shapes differ.
    """
    _layout(a, b)
    if a.shape != b.shape:
        raise ValueError(f"the tensors have shapes {tuple(a.shape)} and {tuple(b.shape)}: rows are compared one to one.")
    x, y = a.to(torch.float64), b.to(torch.float64)
    if x.numel() == 0:
        return torch.zeros(a.shape, dtype=torch.float64, device=a.device)
    largest = torch.zeros_like(x[..., :1])
    for side in (x, y):
        finite = torch.where(side.isfinite(), side.abs(), 0.0)
        largest = torch.maximum(largest, finite.amax(dim=-1, keepdim=True))
    # Divide first: halved spacings stay finite where a difference of two huge float64 values would not.
    unit = spacing(largest, a.dtype)
    difference = (x / unit - y / unit).abs()
    same = (x == y) | (x.isnan() & y.isnan())
    finite = x.isfinite() & y.isfinite()
    return torch.where(same, 0.0, torch.where(finite, difference, torch.inf))
