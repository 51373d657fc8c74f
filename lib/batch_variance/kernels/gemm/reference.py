"""y = x W^T in plain torch: float64 to judge accuracy, and float32 on fixed tiles, whose rows are independent."""

import torch
import torch.nn.functional as F

from ..tiles import by_tiles


def matmul_float64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 [M, N] from x [M, K] and weight [N, K]."""
    return x.double() @ weight.double().t()


def tiled_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[M, N] in the operands' dtype, row-invariant on a CPU."""
    # MKL orders the sums of some rows of a tile differently where K is not a multiple of 4; zeros add nothing.
    short = -x.shape[1] % 4
    if short:
        x, weight = F.pad(x, (0, short)), F.pad(weight, (0, short))
    return by_tiles(lambda tile: F.linear(tile, weight), x)
