"""y = x W^T + b on tensor cores with one tree over every number of rows, in two forms that share it.

The tree: K falls into fixed segments; a segment's products are added from zero in the order of k, as tensor cores add
them; the segments' float32 sums are added from left to right. `parallel` gives each segment a program of its own, and
the last one to arrive folds. `in_turn` lets one program run a tile's segments one after another and parks the running
sum in memory between them, so that only one accumulator is in registers, or holds it where there is room. Tile shapes,
stages, warps, which operand comes first and how tiles reach memory leave no trace in the bits; `classes` measures that
on the GPU at hand.
"""

import triton
import triton.language as tl


@triton.jit
def _product(
    x,
    w,
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
    TMA: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """total plus the products of one step of k; [BLOCK_M, BLOCK_N], or transposed under SWAP."""
    if TMA:
        a = x.load([m0, k])
        b = w.load([n0, k])
    else:
        # Rows beyond the end repeat row 0 and are never stored: no mask on the loads that matter.
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        m = tl.where(m < M, m, 0).to(tl.int64)
        n = tl.where(n < N, n, 0).to(tl.int64)
        ks = k + tl.arange(0, BLOCK_K)
        if EVEN:
            a = tl.load(x + m[:, None] * K + ks[None, :])
            b = tl.load(w + n[:, None] * K + ks[None, :])
        else:
            a = tl.load(x + m[:, None] * K + ks[None, :], mask=ks[None, :] < K, other=0.0)
            b = tl.load(w + n[:, None] * K + ks[None, :], mask=ks[None, :] < K, other=0.0)
    if SWAP:
        total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
    else:
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def _store(y, bias, total, m, n, M, N, BIAS: tl.constexpr):
    """total with bias, rounded once; m and n are the places of its elements, broadcast against each other."""
    if BIAS:
        total = total + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + m.to(tl.int64) * N + n, total.to(y.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles are gone through column by column, so that neighbours in time share
    what they read."""
    group = tile // (GROUP * tiles_n)
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["M", "segment", "segments"])  # one binary for every row count
def parallel(
    x,
    w,
    bias,
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
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Grid: (tiles of n, segments, tiles of m). parts: float32 [tiles, segments, BLOCK_M * BLOCK_N]; arrived: int32
    [tiles], zero before and after; segment counts steps of 128 (so that its multiples are known to be aligned)."""
    tiles_n = tl.num_programs(0)
    tile = tl.program_id(2) * tiles_n + tl.program_id(0)
    part = tl.program_id(1)
    tile_m, tile_n = _place(tile, tl.num_programs(2), tiles_n, GROUP)
    m0 = tile_m * BLOCK_M
    n0 = tile_n * BLOCK_N
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    begin = part * segment * 128
    for k in tl.range(begin, tl.minimum(begin + segment * 128, K), BLOCK_K):
        total = _product(x, w, m0, n0, k, total, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, TMA, SWAP, EVEN)
    if SWAP:
        m = m0 + tl.arange(0, BLOCK_M)[None, :]
        n = n0 + tl.arange(0, BLOCK_N)[:, None]
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    else:
        m = m0 + tl.arange(0, BLOCK_M)[:, None]
        n = n0 + tl.arange(0, BLOCK_N)[None, :]
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if SPLIT:
        mine = parts + tile.to(tl.int64) * segments * (BLOCK_M * BLOCK_N) + inside
        tl.store(mine + part * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()  # every thread's share is written before one thread says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == segments - 1:
            # .cg: from the cache that all multiprocessors share.
            total = tl.load(mine, cache_modifier=".cg")
            for other in range(1, segments):
                total = total + tl.load(mine + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            _store(y, bias, total, m, n, M, N, BIAS)
            tl.store(arrived + tile, 0)
    else:
        _store(y, bias, total, m, n, M, N, BIAS)


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's left and right half."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _finish_part(
    y,
    bias,
    parked,
    part,
    seg,
    m0,
    n0,
    M,
    N,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Add a part of a finished segment to the parked sum, and park it again or store the result."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    if SEGMENTS == 1:
        _store(y, bias, part, m0 + rows, n0 + columns, M, N, BIAS)
    else:
        # Parked and read back in one layout, so by the same thread: no barrier, which would end the load pipeline.
        place = parked + rows * WIDTH + columns
        if seg > 0:
            part = tl.load(place) + part
        if seg < SEGMENTS - 1:
            tl.store(place, part)
        else:
            _store(y, bias, part, m0 + rows, n0 + columns, M, N, BIAS)


@triton.jit
def _finish_segment(
    y,
    bias,
    here,
    total,
    seg,
    m0,
    n0,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """`_finish_part` for the four quarters of a tile."""
    QUARTER: tl.constexpr = BLOCK_M * BLOCK_N // 4
    WIDTH: tl.constexpr = BLOCK_N // 4
    left, right = _halves(total, BLOCK_M, BLOCK_N)
    a, b = _halves(left, BLOCK_M, BLOCK_N // 2)
    c, d = _halves(right, BLOCK_M, BLOCK_N // 2)
    _finish_part(y, bias, here, a, seg, m0, n0, M, N, BLOCK_M, WIDTH, SEGMENTS, BIAS)
    _finish_part(y, bias, here + QUARTER, b, seg, m0, n0 + WIDTH, M, N, BLOCK_M, WIDTH, SEGMENTS, BIAS)
    _finish_part(y, bias, here + 2 * QUARTER, c, seg, m0, n0 + 2 * WIDTH, M, N, BLOCK_M, WIDTH, SEGMENTS, BIAS)
    _finish_part(y, bias, here + 3 * QUARTER, d, seg, m0, n0 + 3 * WIDTH, M, N, BLOCK_M, WIDTH, SEGMENTS, BIAS)


@triton.jit(do_not_specialize=["M", "segment"])
def in_turn(
    x,
    w,
    bias,
    y,
    parked,
    M,
    N,
    K,
    segment,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    HOLD: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Grid: (programs). A program takes every programs-th tile; segment counts steps of 128. parked: float32
    [programs, BLOCK_M * BLOCK_N]; HOLD: the running sum stays in registers instead, where a tile leaves room for it."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    mine = tl.cdiv(tiles_m * tiles_n - program, programs)
    steps = segment * 128 // BLOCK_K
    here = parked + program.to(tl.int64) * (BLOCK_M * BLOCK_N)
    # One loop over all steps of all tiles, items ending inside it, so that the load pipeline never drains between them.
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    held = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    step = -1
    item = -1
    m0 = 0
    n0 = 0
    seg = 0
    for _ in tl.range(0, mine * SEGMENTS * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            item += 1
            tile = program + (item // SEGMENTS) * programs
            seg = item % SEGMENTS
            tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
            m0 = tile_m * BLOCK_M
            n0 = tile_n * BLOCK_N
        k = seg * segment * 128 + step * BLOCK_K
        total = _product(x, w, m0, n0, k, total, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, TMA, False, EVEN)
        if step == steps - 1:
            if HOLD:
                held = tl.where(seg > 0, held + total, total)
                if seg == SEGMENTS - 1:
                    rows = m0 + tl.arange(0, BLOCK_M)[:, None]
                    _store(y, bias, held, rows, n0 + tl.arange(0, BLOCK_N)[None, :], M, N, BIAS)
            else:
                _finish_segment(y, bias, here, total, seg, m0, n0, M, N, BLOCK_M, BLOCK_N, SEGMENTS, BIAS)
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
