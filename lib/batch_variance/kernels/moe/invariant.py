"""A mixture of experts whose pairs of token and expert do not see each other, however many share an expert.

The grouped matmul has the GEMM's tree (``gemm/invariant.py``, by (N, K) alone) at every number of rows an expert
gets, and a token adds its experts in the order of their numbers. So a token's result depends on the token and its
routing.
"""

import torch

from ...common import BadInput
from ..gemm.invariant import segment_steps, segments
from . import reference


def _blocks(experts: torch.Tensor, count: int, size: int) -> tuple[torch.Tensor, ...]:
    """Pairs in the order of their experts, and blocks of up to ``size`` of them that share one: order, expert,
    start, stop, int32, on the device and without a word to the host; as many blocks as there may be, those left over
    empty."""
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    held = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    ends, blocks = held.cumsum(0), (held + size - 1) // size
    block_ends = blocks.cumsum(0)
    number = torch.arange(min(count, len(flat)) + len(flat) // size, device=flat.device)
    expert = torch.searchsorted(block_ends, number, right=True).clamp(max=count - 1)
    start = ends[expert] - held[expert] + (number - block_ends[expert] + blocks[expert]) * size
    stop = torch.minimum(start + size, ends[expert])
    stop = torch.where(number < block_ends[-1], stop, start)
    return tuple(t.int() for t in (order, expert, start, stop))


def grouped_matmul(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, block_m: int | None = None, count: int | None = None
) -> torch.Tensor:
    """[T, top_k, N] in x's dtype: each token times the weight of each of its experts.

    x: [T, K]; weights: [E, N, K]; experts: integers 0 to E - 1, [T, top_k]. block_m (16, 32, 64 or 128) is the
    tuner's, count the class's number of segments. Raises BadInput where shapes or dtypes do not fit. Expert numbers
    are not checked on CUDA.
    """
    fits = (
        x.dim() == 2
        and weights.dim() == 3
        and experts.dim() == 2
        and x.shape[1] == weights.shape[2]
        and len(x) == len(experts)
    )
    if not fits or x.dtype != weights.dtype or 0 in weights.shape or experts.is_floating_point():
        raise BadInput(
            f"x {list(x.shape)} {x.dtype}, weights {list(weights.shape)} {weights.dtype}, "
            f"experts {list(experts.shape)} "
            f"{experts.dtype}: give [T, K], [E, N, K] of one dtype and integers [T, top_k]."
        )
    if x.device.type != "cuda":
        if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < len(weights):
            raise BadInput(
                f"expert numbers run from {experts.min()} to {experts.max()}: "
                f"there are experts 0 to {len(weights) - 1}."
            )
        return reference.grouped_matmul(x, weights, experts)
    return launch(x, weights, experts, block_m, count)


def launch(x, weights, experts, block_m: int | None = None, count: int | None = None) -> torch.Tensor:
    """The Triton kernel behind `grouped_matmul`; arguments as there."""
    from . import triton as kernels

    (E, N, K), (T, top_k) = weights.shape, experts.shape
    y = torch.empty(T, top_k, N, dtype=x.dtype, device=x.device)
    if not experts.numel():
        return y
    count = segments(N, K) if count is None else count
    length = segment_steps(K, count)
    average = T * top_k / E
    block_m = block_m or (16 if average <= 16 else 32 if average <= 48 else 64 if average <= 128 else 128)
    order, expert, start, stop = _blocks(experts, E, block_m)
    grid = (-(-N // 64), len(expert))
    kernels.grouped[grid](
        x.contiguous(),
        weights.contiguous(),
        order,
        expert,
        start,
        stop,
        y,
        T * top_k,
        top_k,
        N,
        K,
        length,
        BLOCK_M=block_m,
        BLOCK_N=64,
        BLOCK_K=64,
        SEGMENTS=count,
        EVEN=K % 64 == 0,
        num_warps=4,
        num_stages=3,
    )
    return y


def expert_sum(y: torch.Tensor, gates: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[T, N] float32: sum over a token's experts of gate times result, in the order of the experts' numbers.

    y: [T, top_k, N]; gates: [T, top_k]; experts: [T, top_k]. Every step is a multiplication and an addition of their
    own.
    """
    order = experts.argsort(dim=1, stable=True)
    total = None
    for place in range(order.shape[1]):
        chosen = order[:, place]
        rows = torch.arange(len(y), device=y.device)
        part = y[rows, chosen].float() * gates[rows, chosen].float().unsqueeze(1)
        total = part if total is None else total + part
    return total
