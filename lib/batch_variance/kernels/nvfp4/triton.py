"""The two NVFP4 kernels of gllm's dispatch for CUDA, each parameterised by an Arithmetic.

Both are row-invariant by construction: the GEMV's programs read one row each, the GEMM has one tile shape and no
split-K. So whatever varies with the batch under a policy is the policy's doing.
"""

from functools import lru_cache

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


@triton.jit
def _gemv(x, tiles, codes, scales, tensor_scales, y, N, K,
          ROUND_X: tl.constexpr, ROUND_W: tl.constexpr, FOLD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tile = tiles + tl.program_id(1)  # fields of all tiles, one after another: row, expert
    row = tl.load(tile).to(tl.int64)
    expert = tl.load(tile + tl.num_programs(1)).to(tl.int64)
    codes += expert * N * (K // 2)
    scales += expert * N * (K // 16)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tensor_scale = tl.load(tensor_scales + expert)
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


@triton.jit
def _gemm(x, tiles, codes, scales, tensor_scales, y, N, K,
          ROUND_X: tl.constexpr, ROUND_W: tl.constexpr, FOLD: tl.constexpr, OPERAND: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tile = tiles + tl.program_id(1)  # fields of all tiles, one after another: first row, row to stop at, expert
    m = tl.load(tile).to(tl.int64) + tl.arange(0, BLOCK_M)
    stop = tl.load(tile + tl.num_programs(1))
    expert = tl.load(tile + 2 * tl.num_programs(1)).to(tl.int64)
    codes += expert * N * (K // 2)
    scales += expert * N * (K // 16)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tensor_scale = tl.load(tensor_scales + expert)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_half = start // 2 + tl.arange(0, BLOCK_K // 2)
        activation = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < stop) & (k[None, :] < K), other=0.0)
        if ROUND_X:
            activation = _round_bf16(activation)
        w = _weight_tile(codes, scales, n, k_half, N, K, tensor_scale, FOLD, ROUND_W)
        total = tl.dot(activation.to(OPERAND), tl.trans(w.to(OPERAND)), total, input_precision="ieee")
    if not FOLD:
        total = total * tensor_scale
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m[:, None] < stop) & (n[None, :] < N))


BLOCK_M = 64


def matmul(x: torch.Tensor, weight: NVFP4Tensor, arithmetic: Arithmetic, operand: tl.dtype | None = None) -> torch.Tensor:
    """float32 [M, N] from float32 x [M, K] and an NVFP4 weight [N, K] on the same device.

    The GEMM multiplies bfloat16 on tensor cores where both operands are bfloat16 and float32 (IEEE, no TF32)
    elsewhere. operand: override of that choice, for the interpreter, whose bfloat16 products are wrong.
    Raises ValueError when shapes do not fit.
    """
    return grouped_matmul(x, weight, [x.shape[0]], [arithmetic], operand)


def grouped_matmul(
    x: torch.Tensor, weights: NVFP4Tensor, counts: list[int], arithmetics: list[Arithmetic], operand: tl.dtype | None = None
) -> torch.Tensor:
    """float32 [R, N]: the first counts[0] rows of x [R, K] times expert 0's weight, by arithmetics[0], and so on.

    weights: the experts' weights with the experts as the tensors' first dimension, or one expert's alone. One launch for all experts of an arithmetic,
    and a row's bits are those that ``matmul`` gives it. Raises ValueError when shapes do not fit.
    """
    (R, K), (N, half) = x.shape, weights.codes.shape[-2:]
    if K != 2 * half or x.dtype != torch.float32 or sum(counts) != R:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: float32 [{sum(counts)}, {2 * half}] is needed for this weight.")
    y = torch.empty(R, N, dtype=torch.float32, device=x.device)
    arrays = (weights.codes, weights.block_scale, weights.tensor_scale, y, N, K)
    x = x.contiguous()
    tiles_of = _tiles_kept if len(counts) == 1 else _tiles
    for arithmetic in dict.fromkeys(arithmetics):
        mine = tuple(n if other == arithmetic else -n for n, other in zip(counts, arithmetics))
        if max(mine, default=0) < 1:
            continue
        rounds = dict(
            ROUND_X=arithmetic.activations == "bfloat16",
            ROUND_W=arithmetic.weights == "bfloat16",
            FOLD=arithmetic.tensor_scale == "before",
        )
        if arithmetic.order == "gemv":
            tiles = tiles_of(mine, 1, x.device)
            _gemv[(triton.cdiv(N, 16), tiles.shape[1])](x, tiles, *arrays, **rounds, BLOCK_N=16, BLOCK_K=128, num_warps=4)
        else:
            both = rounds["ROUND_X"] and rounds["ROUND_W"]
            tiles = tiles_of(mine, BLOCK_M, x.device)
            _gemm[(triton.cdiv(N, 16), tiles.shape[1])](
                x, tiles, *arrays, **rounds, OPERAND=operand or (tl.bfloat16 if both else tl.float32),
                BLOCK_M=BLOCK_M, BLOCK_N=16, BLOCK_K=64, num_warps=4)
    return y


@lru_cache(maxsize=4096)
def _tiles(counts: tuple[int, ...], block: int, device: torch.device) -> torch.Tensor:
    """int32 [fields, tiles] for rows in the order of their experts; a negative count is rows to pass over.

    Fields: first row, row to stop at (unless the block is one row), expert.
    """
    found, start = [], 0
    for expert, count in enumerate(counts):
        stop = start + abs(count)
        if count > 0:
            found += [(row, expert) if block == 1 else (row, stop, expert) for row in range(start, stop, block)]
        start = stop
    return torch.tensor(list(zip(*found)), dtype=torch.int32, device=device)


# One expert's are few, and a captured graph reads them at every replay: they are never dropped.
_tiles_kept = lru_cache(maxsize=None)(_tiles.__wrapped__)
