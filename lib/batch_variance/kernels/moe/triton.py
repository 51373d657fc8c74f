"""The grouped matmul for CUDA: blocks of rows that share an expert, K in fixed segments folded in registers."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "segment"])  # one binary for every number of tokens
def grouped(
    x,
    weights,
    order,
    block_expert,
    block_start,
    block_stop,
    y,
    pairs,
    top_k,
    N,
    K,
    segment,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Grid: (tiles of n, blocks). A block holds places block_start to block_stop of ``order``, pairs of one expert;
    blocks left over have none."""
    block = tl.program_id(1)
    start = tl.load(block_start + block)
    stop = tl.load(block_stop + block)
    if start >= stop:
        return
    place = start + tl.arange(0, BLOCK_M)
    pair = tl.load(order + place, mask=place < stop, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.where(n < N, n, 0).to(tl.int64)
    rows = x + (pair // top_k)[:, None] * K
    columns = weights + tl.load(block_expert + block).to(tl.int64) * N * K + column[:, None] * K
    folded = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for part in tl.static_range(SEGMENTS):
        begin = part * segment * 128
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(begin, tl.minimum(begin + segment * 128, K), BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            if EVEN:
                a = tl.load(rows + ks[None, :])
                b = tl.load(columns + ks[None, :])
            else:
                a = tl.load(rows + ks[None, :], mask=ks[None, :] < K, other=0.0)
                b = tl.load(columns + ks[None, :], mask=ks[None, :] < K, other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        folded = folded + total
    wanted = (place < stop)[:, None] & (n < N)[None, :]
    tl.store(y + pair[:, None] * N + n[None, :], folded.to(y.dtype.element_ty), mask=wanted)
