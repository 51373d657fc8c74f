"""A mixture of experts' matmuls in plain torch: float64 to judge accuracy, row-invariant tiles for a CPU."""

import torch

from ..gemm.reference import tiled_matmul


def grouped_float64(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """float64 [T, top_k, N] from x [T, K], weights [E, N, K] and expert numbers [T, top_k]."""
    return torch.einsum("tk,tjnk->tjn", x.double(), weights.double()[experts.long()])


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[T, top_k, N] in x's dtype, an expert after another, each on tiles of a fixed number of rows."""
    out = x.new_zeros(*experts.shape, weights.shape[1])
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        out[token, place] = tiled_matmul(x[token], weights[expert])
    return out
