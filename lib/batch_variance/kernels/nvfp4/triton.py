"""The two NVFP4 kernels of gllm's dispatch for CUDA, each parameterised by an Arithmetic.

Both are row-invariant by construction: the GEMV's programs read one row each, the GEMM has one tile shape and no
split-K. So whatever varies with the batch under a policy is the policy's doing.
"""

import torch
import triton
import triton.language as tl

from ...numerics import NVFP4Tensor
from .arithmetic import Arithmetic


@triton.jit
def _round_bf16(x):
    """float32 rounded to the nearest bfloat16, ties to even, kept as float32; NaN stays NaN.

    Done on the bits so that compiled code and the interpreter, whose cast truncates, agree.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def _e2m1(code):
    """float32 value of a 4-bit code held in an integer."""
    magnitude = (code & 7).to(tl.int32)
    exponent = magnitude >> 1
    mantissa = (magnitude & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * ((1 << exponent).to(tl.float32) * 0.5)
    value = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def _weight_tile(codes, scales, n, k_half, N, K, tensor_scale, FOLD: tl.constexpr, ROUND: tl.constexpr):
    """float32 [len(n), 2 * len(k_half)]: unpacked weights of rows n, byte columns k_half."""
    inside = (n[:, None] < N) & (k_half[None, :] < K // 2)
    byte = tl.load(codes + n[:, None] * (K // 2) + k_half[None, :], mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + n[:, None] * (K // 16) + k_half[None, :] // 8, mask=inside, other=0.0).to(tl.float32)
    low, high = _e2m1(byte & 15) * scale, _e2m1(byte >> 4) * scale
    if FOLD:
        low, high = low * tensor_scale, high * tensor_scale
    if ROUND:
        low, high = _round_bf16(low), _round_bf16(high)
    return tl.interleave(low, high)


@triton.jit(do_not_specialize=["M"])  # one compilation for every row count
def _gemv(x, codes, scales, tensor_scale_ptr, y, M, N, K,
          ROUND_X: tl.constexpr, ROUND_W: tl.constexpr, FOLD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tensor_scale = tl.load(tensor_scale_ptr)
    lanes = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_half = start // 2 + tl.arange(0, BLOCK_K // 2)
        activation = tl.load(x + row * K + k, mask=k < K, other=0.0)
        if ROUND_X:
            activation = _round_bf16(activation)
        w = _weight_tile(codes, scales, n, k_half, N, K, tensor_scale, FOLD, ROUND_W)
        lanes = tl.fma(w, tl.broadcast_to(activation[None, :], (BLOCK_N, BLOCK_K)), lanes)
    total = tl.sum(lanes, axis=1)
    if not FOLD:
        total = total * tensor_scale
    tl.store(y + row * N + n, total, mask=n < N)


@triton.jit(do_not_specialize=["M"])  # one compilation for every row count
def _gemm(x, codes, scales, tensor_scale_ptr, y, M, N, K,
          ROUND_X: tl.constexpr, ROUND_W: tl.constexpr, FOLD: tl.constexpr, OPERAND: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tensor_scale = tl.load(tensor_scale_ptr)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_half = start // 2 + tl.arange(0, BLOCK_K // 2)
        activation = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        if ROUND_X:
            activation = _round_bf16(activation)
        w = _weight_tile(codes, scales, n, k_half, N, K, tensor_scale, FOLD, ROUND_W)
        total = tl.dot(activation.to(OPERAND), tl.trans(w.to(OPERAND)), total, input_precision="ieee")
    if not FOLD:
        total = total * tensor_scale
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


def matmul(x: torch.Tensor, weight: NVFP4Tensor, arithmetic: Arithmetic, operand: tl.dtype | None = None) -> torch.Tensor:
    """float32 [M, N] from contiguous float32 x [M, K] and an NVFP4 weight [N, K] on the same device.

    The GEMM multiplies bfloat16 on tensor cores where both operands are bfloat16 and float32 (IEEE, no TF32)
    elsewhere. operand: override of that choice, for the interpreter, whose bfloat16 products are wrong.
    Raises ValueError when shapes do not fit.
    """
    (M, K), (N, expected) = x.shape, weight.shape
    if K != expected or x.dtype != torch.float32:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: float32 [M, {expected}] is needed for this weight.")
    y = torch.empty(M, N, dtype=torch.float32, device=x.device)
    if M == 0:
        return y
    rounds = dict(
        ROUND_X=arithmetic.activations == "bfloat16",
        ROUND_W=arithmetic.weights == "bfloat16",
        FOLD=arithmetic.tensor_scale == "before",
    )
    arguments = (x.contiguous(), weight.codes, weight.block_scale, weight.tensor_scale, y, M, N, K)
    if arithmetic.order == "gemv":
        _gemv[(triton.cdiv(N, 16), M)](*arguments, **rounds, BLOCK_N=16, BLOCK_K=128, num_warps=4)
    else:
        both = rounds["ROUND_X"] and rounds["ROUND_W"]
        operand = operand or (tl.bfloat16 if both else tl.float32)
        _gemm[(triton.cdiv(N, 64), triton.cdiv(M, 64))](
            *arguments, **rounds, OPERAND=operand, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4
        )
    return y
