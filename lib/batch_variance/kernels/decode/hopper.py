"""Latent split-KV decode for two warpgroups of a Hopper GPU, in Gluon: the arithmetic of ``triton.decode_kernel``, step
for step, under a schedule of its own.

While a block of keys is worked on, the next one is copied into the other of two buffers, and the places of the one
after that are on their way to registers; both may be another segment's. Each warpgroup computes half of a block's
scores and owns half of the accumulator's columns; in between, the scores are dealt out by rows, so that a row's maximum
and sum need no shared memory. Finished pieces are written out while the next scores are computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .reference import LOG2E

LN2 = gl.constexpr(0.6931471805599453)
NO_MAX = gl.constexpr(float("-inf"))

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # 8 lanes copy 128 bytes of a token
DEALT = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))  # 4 lanes hold a row of scores
Q_TAIL = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
OF_COPY = gl.constexpr(gl.SliceLayout(1, COPY.value))
OF_OUTPUT = gl.constexpr(gl.SliceLayout(1, OUTPUT.value))
OF_Q_TAIL = gl.constexpr(gl.SliceLayout(1, Q_TAIL.value))
OF_DEALT = gl.constexpr(gl.SliceLayout(1, DEALT.value))


@gluon.jit
def _finite(m):
    """The running maximum with an empty state's minus infinity replaced by 0."""
    return gl.where(m == NO_MAX, 0.0, m)


@gluon.jit
def _row_sum(p, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Sums of [HEIGHT, WIDTH] over columns by the tree of ``triton._row_sum``."""
    STEPS: gl.constexpr = WIDTH.bit_length() - 1
    for step in gl.static_range(STEPS):
        if WIDTH >> step > 32:
            p = gl.sum(gl.reshape(p, (HEIGHT, 2, WIDTH >> (step + 1))), 1)
        else:
            p = gl.sum(gl.reshape(p, (HEIGHT, WIDTH >> (step + 1), 2)), 2)
    return gl.convert_layout(gl.reshape(p, (HEIGHT,)), OF_DEALT, assert_trivial=True)


@gluon.jit
def _seek(segments_ptr, segment, last_segment):
    """From ``segment`` on the first one that has blocks: its number, its row, its first block and its end."""
    row = 0
    block = 0
    end = 0
    while (segment < last_segment) & (block >= end):
        row = gl.load(segments_ptr + segment * 4)
        block = gl.load(segments_ptr + segment * 4 + 1)
        end = gl.load(segments_ptr + segment * 4 + 2)
        segment += (block >= end).to(gl.int32)
    return segment, row, block, end


@gluon.jit
def _copy_queries(queries, q_head, segments_ptr, segment, last_segment, HEADS: gl.constexpr):
    """Begin to copy a segment's queries, what their tails are aside, if there is such a segment and it has blocks."""
    if segment < last_segment:
        row = gl.load(segments_ptr + segment * 4)
        if gl.load(segments_ptr + segment * 4 + 1) < gl.load(segments_ptr + segment * 4 + 2):
            rows = q_head + row.to(gl.int64) * (HEADS * 576) + gl.arange(0, 64, layout=OF_COPY)[:, None] * 576
            main = gl.arange(0, 512, layout=gl.SliceLayout(0, COPY))
            async_copy.async_copy_global_to_shared(queries, rows + main[None, :])
            async_copy.commit_group()


@gluon.jit
def _read_ahead(
    cache,
    cache2,
    segments_ptr,
    last_segment,
    segment,
    row,
    block,
    end,
    PAGE: gl.constexpr,
    SPARSE: gl.constexpr,
    SECOND: gl.constexpr,
):
    """From a block of a segment on to the program's next one: its segment (last_segment if there is none), row, number
    and segment's end; its number in its cache; whether that is the second one; int32 [64], what the table has for its
    tokens, places or pages, -1 past the row's end. Nothing is done with these entries yet: nothing waits for them."""
    block += 1
    if block >= end:
        segment, row, block, end = _seek(segments_ptr, segment + 1, last_segment)
    there = segment < last_segment
    length = gl.load(cache[3] + row, mask=there, other=0)
    table = cache[1] + row * cache[2]
    at = block
    second = 0
    if SECOND:
        first_blocks = (gl.maximum(length, 1) + 63) // 64
        if block >= first_blocks:
            length = gl.load(cache2[3] + row, mask=there, other=0)
            table = cache2[1] + row * cache2[2]
            at = block - first_blocks
            second = 1
    tokens = at * 64 + gl.arange(0, 64, layout=OF_COPY)
    if SPARSE:
        entries = gl.load(table + tokens, mask=tokens < length, other=-1)
    else:
        entries = gl.load(table + tokens // PAGE, mask=tokens < length, other=-1)
    return segment, row, block, end, at, second, entries


@gluon.jit
def _copy_block(
    keys,
    tails,
    seen,
    cache,
    cache2,
    at,
    second,
    entries,
    PAGE: gl.constexpr,
    SPARSE: gl.constexpr,
    SECOND: gl.constexpr,
):
    """Begin to copy a block of keys into a buffer, zeros for tokens that are not there, and note which are."""
    keys_ptr = cache[0]
    places = cache[4]
    if SECOND:
        if second:
            keys_ptr = cache2[0]
            places = cache2[4]
    place = entries
    if not SPARSE:
        place = entries * PAGE + (at * 64 + gl.arange(0, 64, layout=OF_COPY)) % PAGE
    valid = (place >= 0) & (place < places)
    seen.store(valid.to(gl.int32))
    start = keys_ptr + gl.where(valid, place, 0).to(gl.int64) * 576
    main = gl.arange(0, 512, layout=gl.SliceLayout(0, COPY))
    tail = gl.arange(512, 576, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(keys, start[:, None] + main[None, :], mask=valid[:, None])
    async_copy.async_copy_global_to_shared(tails, start[:, None] + tail[None, :], mask=valid[:, None])
    async_copy.commit_group()


@gluon.jit
def _store_rows(pointer, row, first_head, x, HEADS: gl.constexpr):
    """Write [64, 512] of a row's, or a slot's, heads from ``first_head`` on, as it lies in threads."""
    heads = first_head + gl.arange(0, 64, layout=OF_OUTPUT)
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, OUTPUT))
    into = row.to(gl.int64) * HEADS + heads
    gl.store(pointer + into[:, None] * 512 + columns[None, :], x.to(pointer.dtype.element_ty))


@gluon.jit
def _store_part(part_acc_ptr, part_ml_ptr, slot, first_head, heads, m, l, acc, HEADS: gl.constexpr):
    """Write a state to a slot."""
    into = slot.to(gl.int64) * HEADS + heads
    gl.store(part_ml_ptr + into * 2, m)
    gl.store(part_ml_ptr + into * 2 + 1, l)
    _store_rows(part_acc_ptr, slot, first_head, acc, HEADS)


@gluon.jit
def _end_row(
    m, l, acc, row, first_head, heads, sink_ptr, out_ptr, lse_ptr, HEADS: gl.constexpr, HAS_SINK: gl.constexpr
):
    """Write a row's normalised output and natural-log LSE; the sink joins the denominator only."""
    base = _finite(m)
    total = l
    if HAS_SINK:
        total = l + gl.exp2(gl.load(sink_ptr + heads) - base)
    inverse = gl.where(total == 0, 0.0, gl.div_rn(1.0, gl.where(total == 0, 1.0, total)))
    lse = gl.where(l == 0, NO_MAX, (base + gl.log2(gl.where(l == 0, 1.0, l))) * LN2)
    acc = acc * gl.convert_layout(inverse, OF_OUTPUT)[:, None] + 0.0  # + 0: a zero's sign would tell its sum
    _store_rows(out_ptr, row, first_head, acc, HEADS)
    gl.store(lse_ptr + row.to(gl.int64) * HEADS + heads, lse)


@gluon.jit(do_not_specialize=["table_stride", "table2_stride", "places", "places2"])
def decode_kernel(
    q_ptr,
    keys_ptr,
    table_ptr,
    length_ptr,
    keys2_ptr,
    table2_ptr,
    length2_ptr,
    sink_ptr,
    segments_ptr,
    starts_ptr,
    chunks_ptr,
    out_ptr,
    lse_ptr,
    part_acc_ptr,
    part_ml_ptr,
    scale_log2,
    table_stride,
    table2_stride,
    places,
    places2,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    FOLDS: gl.constexpr,
    SPARSE: gl.constexpr,
    SECOND: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Grid: (heads / 64, programs), 8 warps. Pointers and FOLDS as ``triton.decode_kernel`` has them under SPREAD."""
    dtype: gl.constexpr = keys_ptr.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [2, 64, 512], SHARED)
    tails = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    queries = gl.allocate_shared_memory(dtype, [64, 512], SHARED)
    seen = gl.allocate_shared_memory(gl.int32, [2, 64], PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [64], PLAIN)

    first_head = gl.program_id(0) * 64
    heads = first_head + gl.arange(0, 64, layout=OF_DEALT)
    q_head = q_ptr + first_head * 576
    program = gl.program_id(1)
    first_segment = gl.load(starts_ptr + program)
    last_segment = gl.load(starts_ptr + program + 1)

    cache = (keys_ptr, table_ptr, table_stride, length_ptr, places)
    cache2 = (keys2_ptr, table2_ptr, table2_stride, length2_ptr, places2)

    # The block that is copied next, of this segment or of a later one.
    ahead = first_segment - 1
    ahead_row = 0
    ahead_block = 0
    ahead_end = 0
    ahead, ahead_row, ahead_block, ahead_end, at, second, entries = _read_ahead(
        cache, cache2, segments_ptr, last_segment, ahead, ahead_row, ahead_block, ahead_end, PAGE, SPARSE, SECOND
    )
    now = 1  # the buffer of the block that is worked on
    _copy_queries(queries, q_head, segments_ptr, first_segment, last_segment, HEADS)
    if ahead < last_segment:
        _copy_block(
            keys.index(0),
            tails.index(0),
            seen.index(0),
            cache,
            cache2,
            at,
            second,
            entries,
            PAGE,
            SPARSE,
            SECOND,
        )
    ahead, ahead_row, ahead_block, ahead_end, at, second, entries = _read_ahead(
        cache, cache2, segments_ptr, last_segment, ahead, ahead_row, ahead_block, ahead_end, PAGE, SPARSE, SECOND
    )
    for segment in range(first_segment, last_segment):
        row = gl.load(segments_ptr + segment * 4)
        begin = gl.load(segments_ptr + segment * 4 + 1)
        end = gl.load(segments_ptr + segment * 4 + 2)
        slot = gl.load(segments_ptr + segment * 4 + 3)
        chunk = gl.load(chunks_ptr + row)
        q_tail_rows = q_head + row.to(gl.int64) * (HEADS * 576) + gl.arange(0, 64, layout=OF_Q_TAIL)[:, None] * 576
        q_tail = gl.load(q_tail_rows + gl.arange(512, 576, layout=gl.SliceLayout(0, Q_TAIL))[None, :])
        m = gl.full([64], NO_MAX, gl.float32, OF_DEALT)
        l = gl.zeros([64], gl.float32, OF_DEALT)
        acc = gl.zeros([64, 512], gl.float32, OUTPUT)
        edge = end
        if FOLDS:
            edge = gl.minimum(begin + chunk, end)
        for block in range(begin, end):
            async_copy.wait_group(0)
            hopper.fence_async_shared()  # the only one of a block: here it waits for no copy
            now ^= 1
            if ahead < last_segment:
                _copy_block(
                    keys.index(now ^ 1),
                    tails.index(now ^ 1),
                    seen.index(now ^ 1),
                    cache,
                    cache2,
                    at,
                    second,
                    entries,
                    PAGE,
                    SPARSE,
                    SECOND,
                )
            scores = gl.zeros([64, 64], gl.float32, SCORES)
            main, tail = keys.index(now), tails.index(now)
            scores = hopper.warpgroup_mma(queries, main.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = hopper.warpgroup_mma(q_tail, tail.permute((1, 0)), scores, is_async=True)
            ahead, ahead_row, ahead_block, ahead_end, at, second, entries = _read_ahead(
                cache,
                cache2,
                segments_ptr,
                last_segment,
                ahead,
                ahead_row,
                ahead_block,
                ahead_end,
                PAGE,
                SPARSE,
                SECOND,
            )
            opens = block == begin
            if FOLDS:
                if block == edge:  # the block before ended a piece: away with it while the scores are computed
                    _store_part(part_acc_ptr, part_ml_ptr, slot, first_head, heads, m, l, acc, HEADS)
                    slot += 1
                    m = gl.full([64], NO_MAX, gl.float32, OF_DEALT)
                    l = gl.zeros([64], gl.float32, OF_DEALT)
                    opens = True
                    edge = gl.minimum(edge + chunk, end)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])

            scores = gl.convert_layout(scores, DEALT)
            valid = seen.index(now).load(gl.SliceLayout(0, DEALT)) != 0
            scores = gl.where(valid[None, :], scores * scale_log2, NO_MAX)
            m_new = gl.maximum(m, gl.max(scores, 1))
            base = _finite(m_new)
            p = gl.exp2(scores - base[:, None])
            alpha = gl.exp2(m - base)
            tail.store(p.to(dtype))  # nothing reads the tail any more: the weights change hands there
            factors.store(alpha)
            acc = acc * factors.load(OF_OUTPUT)[:, None]
            acc = hopper.warpgroup_mma(tail.load(WEIGHTS), main, acc, use_acc=opens == 0, is_async=True)
            l = gl.fma(l, alpha, _row_sum(p, 64, 64))
            m = m_new
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])

        _copy_queries(queries, q_head, segments_ptr, segment + 1, last_segment, HEADS)
        if slot < 0:
            _end_row(m, l, acc, row, first_head, heads, sink_ptr, out_ptr, lse_ptr, HEADS, HAS_SINK)
        else:
            _store_part(part_acc_ptr, part_ml_ptr, slot, first_head, heads, m, l, acc, HEADS)


def decode(inputs, plan, workspace, sink, out, lse) -> None:
    """Launch the kernel, without the combine step, for inputs that ``launch.fits_hopper`` accepts and a spread plan.

    sink: float32 ``[heads]``, times log2(e) (any tensor if the inputs have none); out ``[batch, heads, 512]`` and lse
    ``[batch, heads]`` receive the rows that the plan does not split, the workspace the others' partials."""
    first, second = inputs.caches[0], inputs.caches[-1]
    grid = (inputs.heads // 64, plan.plan.programs)
    decode_kernel[grid](
        inputs.q,
        first.keys,
        first.table,
        first.lengths,
        second.keys,
        second.table,
        second.lengths,
        sink,
        plan.segments,
        plan.program_starts,
        plan.chunks,
        out,
        lse,
        workspace.accumulators,
        workspace.states,
        inputs.scale * LOG2E,
        first.table.stride(0),
        second.table.stride(0),
        first.places,
        second.places,
        HEADS=inputs.heads,
        PAGE=first.keys.shape[1],
        FOLDS=plan.plan.folds,
        SPARSE=inputs.sparse,
        SECOND=len(inputs.caches) == 2,
        HAS_SINK=inputs.sink is not None,
        num_warps=8,
    )
