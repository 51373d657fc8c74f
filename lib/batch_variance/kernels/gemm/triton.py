"""A float32 matmul for CUDA with one tile shape for any number of rows, so that a row's bits depend on that row alone.

It carries what the studies hold fixed (attention projections, router, logits) while an NVFP4 policy varies.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])  # one compilation for every row count
def _matmul(x, w, y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(w + n[:, None] * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
        total = tl.dot(a, tl.trans(b.to(tl.float32)), total, input_precision="ieee")
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] from float32 x [M, K] and weight [N, K] (float32 or bfloat16), no TF32. Raises ValueError on a misfit."""
    (M, K), (N, expected) = x.shape, weight.shape
    if K != expected or x.dtype != torch.float32:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: float32 [M, {expected}] is needed for this weight.")
    y = torch.empty(M, N, dtype=torch.float32, device=x.device)
    if M:
        grid = (triton.cdiv(N, 64), triton.cdiv(M, 16))
        _matmul[grid](x.contiguous(), weight.contiguous(), y, M, N, K, BLOCK_M=16, BLOCK_N=64, BLOCK_K=32, num_warps=4)
    return y
