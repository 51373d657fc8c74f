"""The NVFP4 matmul on tensor cores at every row count, in two forms that share one tree of additions.

The weight is unpacked in registers to code x block scale, which bfloat16 holds exactly; activations are rounded to
bfloat16; the tensor scale multiplies the finished sum. The tree is the plain GEMM's (see
``gemm/invariant_triton.py``): K in fixed segments, each summed from zero in the order of k, segments folded from
left to right.
"""

import triton
import triton.language as tl


# A code's exponent and mantissa in a float32's places stand for value x 2^-126. The block scale brings 2^116 of that
# back (448 x 2^116 is the largest that fits) and the tensor scale the rest: powers of two, so every step is exact.
BLOCK_FACTOR = tl.constexpr(2.0**116)
TENSOR_FACTOR = tl.constexpr(2.0**10)


@triton.jit
def _unpacked(nibble, raised_scale):
    """float32 code x block scale x 2^-10 of 4-bit codes (int32)."""
    return (((nibble & 8) << 28) | ((nibble & 7) << 22)).to(tl.float32, bitcast=True) * raised_scale


@triton.jit
def _product(
    x,
    codes,
    scales,
    m0,
    n0,
    k,
    total,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """total plus the products of one step of k; [BLOCK_M, BLOCK_N], or transposed under SWAP."""
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    m = tl.where(m < M, m, 0).to(tl.int64)  # rows beyond the end repeat row 0 and are never stored
    n = tl.where(n < N, n, 0).to(tl.int64)
    ks = k + tl.arange(0, BLOCK_K)
    halves = k // 2 + tl.arange(0, BLOCK_K // 2)
    blocks = k // 16 + tl.arange(0, BLOCK_K // 16)
    if EVEN:
        a = tl.load(x + m[:, None] * K + ks[None, :])
        byte = tl.load(codes + n[:, None] * (K // 2) + halves[None, :])
        scale = tl.load(scales + n[:, None] * (K // 16) + blocks[None, :])
    else:
        a = tl.load(x + m[:, None] * K + ks[None, :], mask=ks[None, :] < K, other=0.0)
        byte = tl.load(codes + n[:, None] * (K // 2) + halves[None, :], mask=halves[None, :] < K // 2, other=0)
        scale = tl.load(scales + n[:, None] * (K // 16) + blocks[None, :], mask=blocks[None, :] < K // 16, other=0.0)
    byte = byte.to(tl.int32)
    raised = scale.to(tl.float32) * BLOCK_FACTOR
    wide = tl.reshape(tl.broadcast_to(raised[:, :, None], (BLOCK_N, BLOCK_K // 16, 8)), (BLOCK_N, BLOCK_K // 2))
    low = _unpacked(byte, wide).to(OPERAND)
    high = _unpacked(byte >> 4, wide).to(OPERAND)
    w = tl.interleave(low, high)
    a = a.to(OPERAND)
    if SWAP:
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    else:
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M", "segment", "segments"])  # one binary for every row count
def parallel(
    x,
    codes,
    scales,
    tensor_scale,
    y,
    parts,
    arrived,
    M,
    N,
    K,
    segment,
    segments,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid: (tiles of n, segments, tiles of m); buffers as in the plain GEMM's `parallel`."""
    n0 = tl.program_id(0) * BLOCK_N
    part = tl.program_id(1)
    m0 = tl.program_id(2) * BLOCK_M
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        m = m0 + tl.arange(0, BLOCK_M)[None, :]
        n = n0 + tl.arange(0, BLOCK_N)[:, None]
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        m = m0 + tl.arange(0, BLOCK_M)[:, None]
        n = n0 + tl.arange(0, BLOCK_N)[None, :]
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    begin = part * segment * 128
    for k in tl.range(begin, tl.minimum(begin + segment * 128, K), BLOCK_K):
        total = _product(x, codes, scales, m0, n0, k, total, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, SWAP, OPERAND)
    place = y + m.to(tl.int64) * N + n
    wanted = (m < M) & (n < N)
    if SPLIT:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        mine = parts + tile.to(tl.int64) * segments * (BLOCK_M * BLOCK_N) + inside
        tl.store(mine + part * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()  # every thread's share is written before one thread says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == segments - 1:
            total = tl.load(mine, cache_modifier=".cg")
            for other in range(1, segments):
                total = total + tl.load(mine + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(place, total * (tl.load(tensor_scale) * TENSOR_FACTOR), mask=wanted)
            tl.store(arrived + tile, 0)
    else:
        tl.store(place, total * (tl.load(tensor_scale) * TENSOR_FACTOR), mask=wanted)


@triton.jit(do_not_specialize=["M", "segment"])
def in_turn(
    x,
    codes,
    scales,
    tensor_scale,
    y,
    M,
    N,
    K,
    segment,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid: (tiles of m, tiles of n). One program folds a tile's segments in registers."""
    m0 = tl.program_id(0) * BLOCK_M
    n0 = tl.program_id(1) * BLOCK_N
    if SWAP:
        folded = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        m = m0 + tl.arange(0, BLOCK_M)[None, :]
        n = n0 + tl.arange(0, BLOCK_N)[:, None]
    else:
        folded = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        m = m0 + tl.arange(0, BLOCK_M)[:, None]
        n = n0 + tl.arange(0, BLOCK_N)[None, :]
    for part in tl.static_range(SEGMENTS):
        begin = part * segment * 128
        total = tl.zeros_like(folded)
        for k in tl.range(begin, tl.minimum(begin + segment * 128, K), BLOCK_K):
            total = _product(
                x, codes, scales, m0, n0, k, total, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, SWAP, OPERAND
            )
        folded = folded + total
    tl.store(y + m.to(tl.int64) * N + n, folded * (tl.load(tensor_scale) * TENSOR_FACTOR), mask=(m < M) & (n < N))
