"""Split-KV decode and its combine step as Triton kernels that take any plan.

A program walks its segments. A segment's pieces each start from the empty state and cover fixed blocks of the row; the
segment that starts a row folds its pieces in registers, a later one writes each piece out, and the combine step goes on
folding from left to right. Both places merge with the same explicit fused multiply-adds, so where a piece ran leaves no
trace in the bits. ``reference.emulate`` is the same arithmetic in plain torch.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
NO_MAX = tl.constexpr(float("-inf"))


@triton.jit
def _finite(m):
    """The running maximum with an empty state's minus infinity replaced by 0."""
    return tl.where(m == NO_MAX, 0.0, m)


@triton.jit
def _merge(m1, l1, acc1, m2, l2, acc2):
    """State 1 followed by state 2; m in base 2. An empty state 2 changes nothing, a zero's sign included."""
    m = tl.maximum(m1, m2)
    base = _finite(m)
    a = tl.exp2(m1 - base)
    b = tl.exp2(m2 - base)
    l = tl.fma(l1, a, l2 * b)
    acc = tl.fma(acc1, tl.broadcast_to(a[:, None], acc1.shape), acc2 * b[:, None])
    return m, tl.where(m2 == NO_MAX, l1, l), tl.where((m2 == NO_MAX)[:, None], acc1, acc)


@triton.jit
def _finish(m, l, acc, sink_ptr, heads, head_mask, HAS_SINK: tl.constexpr):
    """Normalised output and natural-log LSE; the sink joins the denominator only."""
    base = _finite(m)
    total = l
    if HAS_SINK:
        total = l + tl.exp2(tl.load(sink_ptr + heads, mask=head_mask, other=NO_MAX) - base)
    inverse = tl.where(total == 0, 0.0, tl.div_rn(1.0, tl.where(total == 0, 1.0, total)))
    lse = tl.where(l == 0, NO_MAX, (base + tl.log2(tl.where(l == 0, 1.0, l))) * LN2)
    return acc * inverse[:, None] + 0.0, lse  # + 0: a zero's sign would tell what it was summed from


@triton.jit
def _row_sum(p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of [ROWS, COLUMNS] over columns, a power of two, two at a time: halves above 32 columns, then neighbours.
    The compiler orders a longer sum by how a tile lies in threads; two terms have one order, so this tree is the same
    in every tile. Its own order is the one that takes tensor cores' layouts the fewest exchanges."""
    STEPS: tl.constexpr = COLUMNS.bit_length() - 1
    for step in tl.static_range(STEPS):
        if COLUMNS >> step > 32:
            p = tl.sum(tl.reshape(p, (ROWS, 2, COLUMNS >> (step + 1))), 1)
        else:
            p = tl.sum(tl.reshape(p, (ROWS, COLUMNS >> (step + 1), 2)), 2)
    return tl.reshape(p, (ROWS,))


@triton.jit
def _block(
    m,
    l,
    acc,
    q,
    q_tail,
    scale_log2,
    keys_ptr,
    values_ptr,
    table_ptr,
    table_row,
    length,
    places,
    kv_head,
    block,
    own_length,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    D_MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    SPARSE: tl.constexpr,
    UPCAST: tl.constexpr,
    OWN: tl.constexpr,
):
    """One block of the online softmax. OWN: lane i attends to own_length[i] of the length tokens."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    valid = tokens < length
    if SPARSE:
        place = tl.load(table_ptr + table_row + tokens, mask=valid, other=-1)
        valid = (place >= 0) & (place < places)
    else:
        page = tl.load(table_ptr + table_row + tokens // PAGE, mask=valid, other=0)
        place = page * PAGE + tokens % PAGE
        valid = valid & (place >= 0) & (place < places)
    offset = (place.to(tl.int64) * KV_HEADS + kv_head) * D_QK
    main = tl.arange(0, D_MAIN)
    keys = tl.load(keys_ptr + offset[:, None] + main[None, :], mask=valid[:, None], other=0.0)
    if UPCAST:
        keys = keys.to(tl.float32)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if TAIL > 0:
        tail = tl.load(
            keys_ptr + offset[:, None] + D_MAIN + tl.arange(0, TAIL)[None, :], mask=valid[:, None], other=0.0
        )
        if UPCAST:
            tail = tail.to(tl.float32)
        scores = tl.dot(q_tail, tl.trans(tail), scores, input_precision="ieee")
    if LATENT:
        values = keys
    else:
        offset_v = (place.to(tl.int64) * KV_HEADS + kv_head) * D_V
        values = tl.load(values_ptr + offset_v[:, None] + tl.arange(0, D_V)[None, :], mask=valid[:, None], other=0.0)
        if UPCAST:
            values = values.to(tl.float32)
    seen = valid[None, :]
    if OWN:
        seen = seen & (tokens[None, :] < own_length[:, None])
    scores = tl.where(seen, scores * scale_log2, NO_MAX)
    m_new = tl.maximum(m, tl.max(scores, 1))
    base = _finite(m_new)
    p = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(m - base)
    l = tl.fma(l, alpha, _row_sum(p, q.shape[0], BLOCK))
    acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision="ieee")
    return m_new, l, acc


@triton.jit
def _put(place, value, there, DIRECT: tl.constexpr):
    """tl.store of float32. DIRECT: each thread writes the values that it holds, one by one; tl.store would first trade
    them between threads for wider writes, which takes longer than a small tile's writes. The interpreter has no such
    thing."""
    if DIRECT:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r",
            [place.to(tl.int64), value, there.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(place, value, mask=there)


@triton.jit
def _store_parts(
    part_acc_ptr, part_ml_ptr, slot, heads, head_mask, m, l, acc, HEADS: tl.constexpr, D_V: tl.constexpr, DIRECT: tl.constexpr
):
    """Write the partial state of a program's heads to a slot."""
    into = slot.to(tl.int64) * HEADS + heads
    _put(part_ml_ptr + into * 2, m, head_mask, DIRECT)
    _put(part_ml_ptr + into * 2 + 1, l, head_mask, DIRECT)
    _put(part_acc_ptr + into[:, None] * D_V + tl.arange(0, D_V)[None, :], acc, head_mask[:, None], DIRECT)


@triton.jit
def _end_piece(
    m,
    l,
    acc,
    run_m,
    run_l,
    run_acc,
    place,
    edge,
    block,
    begin,
    end,
    slot,
    part_acc_ptr,
    part_ml_ptr,
    heads,
    head_mask,
    chunk,
    HEADS: tl.constexpr,
    D_V: tl.constexpr,
    SPREAD: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Where a piece ends, at ``edge``, fold it into the row's start or write it out, and begin the next, of ``chunk``
    blocks, from the empty state. SPREAD: all pieces are written out, but the one of a row that has no other."""
    if (block + 1 == edge) & ((slot >= 0) | (not SPREAD)):
        if (begin == 0) & (not SPREAD):
            run_m, run_l, run_acc = _merge(run_m, run_l, run_acc, m, l, acc)
        else:
            _store_parts(part_acc_ptr, part_ml_ptr, place, heads, head_mask, m, l, acc, HEADS, D_V, DIRECT)
            place += 1
        m = tl.full(m.shape, NO_MAX, tl.float32)
        l = tl.zeros(l.shape, tl.float32)
        acc = tl.zeros(acc.shape, tl.float32)
        edge = tl.minimum(edge + chunk, end)
    return m, l, acc, run_m, run_l, run_acc, place, edge


@triton.jit(
    do_not_specialize=["table_stride", "table2_stride", "places", "places2"]
)  # one binary for a row alone and in a batch
def decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    length_ptr,
    keys2_ptr,
    values2_ptr,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE2: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    D_MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FOLDS: tl.constexpr,
    LATENT: tl.constexpr,
    SPARSE: tl.constexpr,
    SECOND: tl.constexpr,
    HAS_SINK: tl.constexpr,
    UPCAST: tl.constexpr,
    SPREAD: tl.constexpr,
    DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (kv_heads * tiles of a group's heads, programs). FOLDS: a row is cut into pieces of as many blocks as
    chunks_ptr has for it; otherwise a segment is one piece. SPREAD: every piece of a row of several has a slot, for
    accumulators too wide to have two of them in registers."""
    tiles: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // tiles
    in_group = (tl.program_id(0) % tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = in_group < GROUP
    heads = kv_head * GROUP + in_group
    main = tl.arange(0, D_MAIN)
    program = tl.program_id(1)
    first_segment = tl.load(starts_ptr + program)
    last_segment = tl.load(starts_ptr + program + 1)
    for segment in range(first_segment, last_segment):
        row = tl.load(segments_ptr + segment * 4)
        begin = tl.load(segments_ptr + segment * 4 + 1)
        end = tl.load(segments_ptr + segment * 4 + 2)
        slot = tl.load(segments_ptr + segment * 4 + 3)
        chunk = tl.load(chunks_ptr + row)
        length = tl.load(length_ptr + row)
        length2 = 0
        first_blocks = end
        if SECOND:
            length2 = tl.load(length2_ptr + row)
            first_blocks = (tl.maximum(length, 1) + BLOCK - 1) // BLOCK
        q_row = q_ptr + (row.to(tl.int64) * HEADS + heads[:, None]) * D_QK
        q = tl.load(q_row + main[None, :], mask=head_mask[:, None], other=0.0)
        q_tail = q
        if TAIL > 0:
            q_tail = tl.load(q_row + D_MAIN + tl.arange(0, TAIL)[None, :], mask=head_mask[:, None], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
            q_tail = q_tail.to(tl.float32)
        run_m = tl.full([BLOCK_H], NO_MAX, tl.float32)
        run_l = tl.zeros([BLOCK_H], tl.float32)
        run_acc = tl.zeros([BLOCK_H, D_V], tl.float32)
        m = tl.full([BLOCK_H], NO_MAX, tl.float32)
        l = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, D_V], tl.float32)
        place = slot
        edge = tl.minimum(begin + chunk, end)
        # One loop over all blocks, pieces ending inside it, so that the load pipeline never drains between pieces.
        for block in tl.range(begin, tl.minimum(end, first_blocks), num_stages=STAGES):
            m, l, acc = _block(
                m,
                l,
                acc,
                q,
                q_tail,
                scale_log2,
                keys_ptr,
                values_ptr,
                table_ptr,
                row * table_stride,
                length,
                places,
                kv_head,
                block,
                length,
                PAGE,
                KV_HEADS,
                D_QK,
                D_V,
                D_MAIN,
                TAIL,
                BLOCK,
                LATENT,
                SPARSE,
                UPCAST,
                False,
            )
            if FOLDS:
                m, l, acc, run_m, run_l, run_acc, place, edge = _end_piece(
                    m,
                    l,
                    acc,
                    run_m,
                    run_l,
                    run_acc,
                    place,
                    edge,
                    block,
                    begin,
                    end,
                    slot,
                    part_acc_ptr,
                    part_ml_ptr,
                    heads,
                    head_mask,
                    chunk,
                    HEADS,
                    D_V,
                    SPREAD,
                    DIRECT,
                )
        if SECOND:
            for block in tl.range(tl.maximum(begin, first_blocks), end, num_stages=STAGES):
                m, l, acc = _block(
                    m,
                    l,
                    acc,
                    q,
                    q_tail,
                    scale_log2,
                    keys2_ptr,
                    values2_ptr,
                    table2_ptr,
                    row * table2_stride,
                    length2,
                    places2,
                    kv_head,
                    block - first_blocks,
                    length2,
                    PAGE2,
                    KV_HEADS,
                    D_QK,
                    D_V,
                    D_MAIN,
                    TAIL,
                    BLOCK,
                    LATENT,
                    SPARSE,
                    UPCAST,
                    False,
                )
                if FOLDS:
                    m, l, acc, run_m, run_l, run_acc, place, edge = _end_piece(
                        m,
                        l,
                        acc,
                        run_m,
                        run_l,
                        run_acc,
                        place,
                        edge,
                        block,
                        begin,
                        end,
                        slot,
                        part_acc_ptr,
                        part_ml_ptr,
                        heads,
                        head_mask,
                        chunk,
                        HEADS,
                        D_V,
                        SPREAD,
                        DIRECT,
                    )
        if SPREAD or (not FOLDS):
            run_m, run_l, run_acc = m, l, acc
        if slot < 0:
            out, lse = _finish(run_m, run_l, run_acc, sink_ptr, heads, head_mask, HAS_SINK)
            into = row.to(tl.int64) * HEADS + heads
            target = out_ptr + into[:, None] * D_V + tl.arange(0, D_V)[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=head_mask[:, None])
            tl.store(lse_ptr + into, lse, mask=head_mask)
        else:
            if (not FOLDS) or ((begin == 0) & (not SPREAD)):
                _store_parts(part_acc_ptr, part_ml_ptr, slot, heads, head_mask, run_m, run_l, run_acc, HEADS, D_V, DIRECT)


@triton.jit
def _load_part(part_acc_ptr, part_ml_ptr, slot, head, there, HEADS: tl.constexpr, D_V: tl.constexpr):
    """One head's partials in the slots, [N], [N], [N, D_V]; the empty state where ``there`` is false."""
    into = slot.to(tl.int64) * HEADS + head
    m = tl.load(part_ml_ptr + into * 2, mask=there, other=NO_MAX)
    l = tl.load(part_ml_ptr + into * 2 + 1, mask=there, other=0.0)
    acc = tl.load(part_acc_ptr + into[:, None] * D_V + tl.arange(0, D_V)[None, :], mask=there[:, None], other=0.0)
    return m, l, acc


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _chain(total, weights, terms, N: tl.constexpr, D_V: tl.constexpr):
    """total = fma(total, weight, term) N times in turn, all [N, D_V], which are told apart by halving what each thread
    holds of them; total is [1, D_V]."""
    if N == 1:
        total = tl.fma(total, weights, terms)
    else:
        HALF: tl.constexpr = N // 2
        weights, later_weights = tl.split(tl.permute(tl.reshape(weights, (2, HALF, D_V)), (1, 2, 0)))
        terms, later_terms = tl.split(tl.permute(tl.reshape(terms, (2, HALF, D_V)), (1, 2, 0)))
        total = _chain(total, weights, terms, HALF, D_V)
        total = _chain(total, later_weights, later_terms, HALF, D_V)
    return total


@triton.jit
def _fold_in_turn(m, l, acc, slots, end, part_acc_ptr, part_ml_ptr, head, HEADS: tl.constexpr, D_V: tl.constexpr):
    """A state [1], [1], [1, D_V] followed by those in the slots before ``end``, from left to right, as `_merge` does it
    one by one. The maxima are exact in any order, so all weights are known at once and only the sums wait for each other;
    an empty state has weight 0."""
    N: tl.constexpr = slots.shape[0]
    ms, ls, accs = _load_part(part_acc_ptr, part_ml_ptr, slots, head, slots < end, HEADS, D_V)
    earlier = (slots <= end) & (tl.arange(0, N) > 0)
    before = tl.load(part_ml_ptr + ((slots - 1).to(tl.int64) * HEADS + head) * 2, mask=earlier, other=NO_MAX)
    before = tl.maximum(tl.associative_scan(before, 0, _larger), m)
    after = tl.maximum(before, ms)
    base = _finite(after)
    a = tl.broadcast_to(tl.exp2(before - base)[:, None], accs.shape)
    b = tl.exp2(ms - base)
    acc = _chain(acc, a, accs * b[:, None], N, D_V)
    sums = _chain(tl.broadcast_to(l[:, None], acc.shape), a, tl.broadcast_to((ls * b)[:, None], accs.shape), N, D_V)
    return tl.maximum(m, tl.max(ms, 0)), tl.max(sums, 1), acc


@triton.jit
def _store_part(part_acc_ptr, part_ml_ptr, slot, head, m, l, acc, HEADS: tl.constexpr, D_V: tl.constexpr):
    into = (slot.to(tl.int64) * HEADS + head) + tl.arange(0, 1)
    tl.store(part_ml_ptr + into * 2, m)
    tl.store(part_ml_ptr + into * 2 + 1, l)
    tl.store(part_acc_ptr + into[:, None] * D_V + tl.arange(0, D_V)[None, :], acc)


@triton.jit
def combine_kernel(
    slot_starts_ptr,
    part_acc_ptr,
    part_ml_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    HEADS: tl.constexpr,
    D_V: tl.constexpr,
    HAS_SINK: tl.constexpr,
    FOLD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Grid: (batch, heads). Rows without slots were finished by the decode kernel. FOLD: left, pairwise (overwrites
    the partials) or compensated. AHEAD: partials read before they are merged, to hide the memory's latency."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(slot_starts_ptr + row)
    count = tl.load(slot_starts_ptr + row + 1) - first
    if count == 0:
        return
    here = tl.arange(0, 1)
    m, l, acc = _load_part(part_acc_ptr, part_ml_ptr, first + here, head, here == 0, HEADS, D_V)
    if FOLD == "left":
        for start in range(1, count, AHEAD):
            slots = first + start + tl.arange(0, AHEAD)
            m, l, acc = _fold_in_turn(m, l, acc, slots, first + count, part_acc_ptr, part_ml_ptr, head, HEADS, D_V)
    if FOLD == "pairwise":
        stride = 1
        while stride < count:
            for left in range(0, count - stride, 2 * stride):
                m1, l1, acc1 = _load_part(part_acc_ptr, part_ml_ptr, first + left + here, head, here == 0, HEADS, D_V)
                right = first + left + stride + here
                m2, l2, acc2 = _load_part(part_acc_ptr, part_ml_ptr, right, head, here == 0, HEADS, D_V)
                m1, l1, acc1 = _merge(m1, l1, acc1, m2, l2, acc2)
                _store_part(part_acc_ptr, part_ml_ptr, first + left, head, m1, l1, acc1, HEADS, D_V)
                tl.debug_barrier()
            stride *= 2
        m, l, acc = _load_part(part_acc_ptr, part_ml_ptr, first + here, head, here == 0, HEADS, D_V)
    if FOLD == "compensated":
        for slot in range(1, count):
            m = tl.maximum(m, tl.load(part_ml_ptr + ((first + slot).to(tl.int64) * HEADS + head + here) * 2))
        l = tl.zeros([1], tl.float32)
        lost_l = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, D_V], tl.float32)
        lost = tl.zeros([1, D_V], tl.float32)
        for slot in range(0, count):
            m2, l2, acc2 = _load_part(part_acc_ptr, part_ml_ptr, first + slot + here, head, here == 0, HEADS, D_V)
            weight = tl.exp2(m2 - _finite(m))
            there = m2 > NO_MAX
            step_l = tl.fma(l2, weight, -lost_l)
            new_l = l + step_l
            lost_l = tl.where(there, (new_l - l) - step_l, lost_l)
            l = tl.where(there, new_l, l)
            step = tl.fma(acc2, tl.broadcast_to(weight[:, None], acc2.shape), -lost)
            new = acc + step
            lost = tl.where(there[:, None], (new - acc) - step, lost)
            acc = tl.where(there[:, None], new, acc)
    out, lse = _finish(m, l, acc, sink_ptr, head + here, here == 0, HAS_SINK)
    into = row.to(tl.int64) * HEADS + head + here
    tl.store(out_ptr + into[:, None] * D_V + tl.arange(0, D_V)[None, :], out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + into, lse)
