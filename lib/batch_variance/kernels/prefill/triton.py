"""Causal prefill attention as a Triton kernel that gives each row the bits of a decode step of that row's length.

A tile holds some query rows of a request, times the query heads of one key/value head; how many, leaves no trace. Blocks
are computed for all lanes at once, each lane under its own row's mask, which gives a hidden token the weight 0, as if
it were not there. That holds for finite values only: 0 times NaN is NaN. So a tile looks first at the values that some
of its rows must not see, and where one is not finite it takes the last blocks row by row, each under its own mask as
decode takes them, and drops the other lanes' results. Pieces end for each lane where its own row's do, and fold from
left to right by decode's merge.
"""

import triton
import triton.language as tl

from ..decode.triton import NO_MAX, _block, _finish, _merge


@triton.jit
def _end_pieces(m, l, acc, run_m, run_l, run_acc, block, ends, chunk):
    """Fold the pieces of the lanes where one ends, and begin the next there from the empty state."""
    done = ((block + 1) % chunk == 0) | (block + 1 == ends)
    done = done & (block < ends)
    if tl.max(done.to(tl.int32), 0) > 0:
        m2, l2, acc2 = _merge(run_m, run_l, run_acc, m, l, acc)
        run_m = tl.where(done, m2, run_m)
        run_l = tl.where(done, l2, run_l)
        run_acc = tl.where(done[:, None], acc2, run_acc)
        m = tl.where(done, NO_MAX, m)
        l = tl.where(done, 0.0, l)
        acc = tl.where(done[:, None], 0.0, acc)
    return m, l, acc, run_m, run_l, run_acc


@triton.jit(do_not_specialize=["table_stride", "places"])
def prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    tiles_ptr,
    chunks_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    table_stride,
    places,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (kv_heads, tiles). tiles_ptr: first row, rows, request and the first row's length of each tile; ROWS: a power
    of two that a tile's rows do not exceed. CHUNK: as in the decode kernel; chunks_ptr: each row's."""
    kv_head = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(1) * 4
    first_row = tl.load(tile)
    count = tl.load(tile + 1)
    request = tl.load(tile + 2)
    first_length = tl.load(tile + 3)
    lane = tl.arange(0, LANES)
    mine = lane // GROUP
    there = mine < count
    heads = kv_head * GROUP + lane % GROUP
    into = (first_row + mine).to(tl.int64) * HEADS + heads
    ends = tl.where(there, (first_length + mine + BLOCK - 1) // BLOCK, 0)
    chunk = tl.full([LANES], CHUNK, tl.int32)
    if CHUNK < 0:
        chunk = tl.load(chunks_ptr + first_row + mine, mask=there, other=1)
    q = tl.load(q_ptr + into[:, None] * D_QK + tl.arange(0, D_QK)[None, :], mask=there[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    run_m = tl.full([LANES], NO_MAX, tl.float32)
    run_l = tl.zeros([LANES], tl.float32)
    run_acc = tl.zeros([LANES, D_V], tl.float32)
    m = tl.full([LANES], NO_MAX, tl.float32)
    l = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, D_V], tl.float32)
    table_row = request * table_stride
    last_length = first_length + count - 1
    last = (last_length + BLOCK - 1) // BLOCK
    hidden = first_length + tl.arange(0, ROWS)
    page = tl.load(table_ptr + table_row + hidden // PAGE, mask=hidden < last_length, other=-1)
    place = page * PAGE + hidden % PAGE
    there_too = (hidden < last_length) & (page >= 0) & (place < places)
    offset = (place.to(tl.int64) * KV_HEADS + kv_head) * D_V
    values = tl.load(values_ptr + offset[:, None] + tl.arange(0, D_V)[None, :], mask=there_too[:, None], other=0.0)
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    whole = first_length // BLOCK
    at_once = tl.where(tl.min(tl.min(finite.to(tl.int32), 1), 0) > 0, last, whole)
    own_length = first_length + mine
    for block in tl.range(0, at_once, num_stages=STAGES):
        m, l, acc = _block(
            m,
            l,
            acc,
            q,
            q,
            scale_log2,
            keys_ptr,
            values_ptr,
            table_ptr,
            table_row,
            last_length,
            places,
            kv_head,
            block,
            own_length,
            PAGE,
            KV_HEADS,
            D_QK,
            D_V,
            D_QK,
            0,
            BLOCK,
            False,
            False,
            UPCAST,
            True,
        )
        if CHUNK != 0:
            m, l, acc, run_m, run_l, run_acc = _end_pieces(m, l, acc, run_m, run_l, run_acc, block, ends, chunk)
    for block in range(at_once, last):
        for row in range(0, count):
            length = first_length + row
            if block * BLOCK < length:
                m2, l2, acc2 = _block(
                    m,
                    l,
                    acc,
                    q,
                    q,
                    scale_log2,
                    keys_ptr,
                    values_ptr,
                    table_ptr,
                    table_row,
                    length,
                    places,
                    kv_head,
                    block,
                    length,
                    PAGE,
                    KV_HEADS,
                    D_QK,
                    D_V,
                    D_QK,
                    0,
                    BLOCK,
                    False,
                    False,
                    UPCAST,
                    False,
                )
                m = tl.where(mine == row, m2, m)
                l = tl.where(mine == row, l2, l)
                acc = tl.where((mine == row)[:, None], acc2, acc)
        if CHUNK != 0:
            m, l, acc, run_m, run_l, run_acc = _end_pieces(m, l, acc, run_m, run_l, run_acc, block, ends, chunk)
    if CHUNK == 0:
        run_m, run_l, run_acc = m, l, acc
    out, lse = _finish(run_m, run_l, run_acc, sink_ptr, heads, there, HAS_SINK)
    wide = tl.arange(0, D_V)
    tl.store(out_ptr + into[:, None] * D_V + wide[None, :], out.to(out_ptr.dtype.element_ty), mask=there[:, None])
    tl.store(lse_ptr + into, lse, mask=there)
