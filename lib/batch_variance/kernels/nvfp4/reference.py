"""The NVFP4 matmul in plain torch: float64 to judge accuracy, float32 on row-invariant tiles to stand in for a GPU."""

import torch
import torch.nn.functional as F

from ...numerics import NVFP4Tensor
from ..tiles import by_tiles
from .arithmetic import Arithmetic

# The emulated GEMV adds this many K ranges separately and then folds them, as a GPU's warps would.
GEMV_RANGES = 2


def unpacked_weight(weight: NVFP4Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """float32 [N, K]: the values that the products see, rounded as ``arithmetic`` says."""
    values = weight.dequantize() if arithmetic.tensor_scale == "before" else weight.unscaled()
    return values.to(torch.bfloat16).float() if arithmetic.weights == "bfloat16" else values


def _activations(x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype) if arithmetic.activations == "bfloat16" else x


def matmul_float64(x: torch.Tensor, weight: NVFP4Tensor, arithmetic: Arithmetic | None = None) -> torch.Tensor:
    """float64 [M, N] from float32 x [M, K]: no rounding at all, or only the roundings of ``arithmetic``'s operands."""
    if arithmetic is None:
        return x.double() @ (weight.unscaled().double() * weight.tensor_scale.double()).t()
    y = _activations(x, arithmetic).double() @ unpacked_weight(weight, arithmetic).double().t()
    return y * weight.tensor_scale.double() if arithmetic.tensor_scale == "after" else y


def emulated_matmul(x: torch.Tensor, unpacked: torch.Tensor, tensor_scale: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """float32 [M, N] with the roundings of ``arithmetic`` and one of two orders of additions, row-invariant on a CPU.

    x: float32 [M, K]; unpacked: ``unpacked_weight(weight, arithmetic)``. The orders are a CPU's, not a GPU's: they
    differ from each other as two GPU kernels do, and the evidence tier of anything built on them is ``emulated``.
    """
    x = _activations(x, arithmetic)
    if arithmetic.order == "gemm":
        y = by_tiles(lambda tile: F.linear(tile, unpacked), x)
    else:
        ranges = [slice(k.start, k.stop) for k in _ranges(x.shape[1])]
        y = by_tiles(lambda tile: _tree([F.linear(tile[:, r], unpacked[:, r]) for r in ranges]), x)
    return y * tensor_scale if arithmetic.tensor_scale == "after" else y


def _ranges(length: int) -> list[range]:
    step = -(-length // GEMV_RANGES)
    return [range(start, min(start + step, length)) for start in range(0, length, step)]


def _tree(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]
