"""Split-KV decode attention in plain torch: the answer in float64, and a kernel's float32 arithmetic along a plan.

``exact`` says what is right. ``emulate`` adds in the order that a plan prescribes, with the roundings of a tensor-core
kernel (probabilities rounded to the cache's dtype, float32 sums, one rounding for a multiply-add), so that the effect
of the order can be seen without a GPU. Each row's arithmetic has the same shapes whatever the batch, so nothing but the
plan can change a row's bits; the tests hold that as a control.
"""

import torch

from ...common import BadInput
from ...schedules import Plan
from .inputs import DecodeInputs

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
FOLDS = ("left", "flashmla", "pairwise", "compensated")


def block_tokens(inputs: DecodeInputs, block: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where block ``block`` of every row lies: places ``[batch, block_size]``, which are valid, and the cache's number
    ``[batch]``. Rows without that block have no valid place."""
    device = inputs.q.device
    first = inputs.caches[0]
    blocks_first = (first.lengths.clamp(min=1).long() + block_size - 1) // block_size
    second = (
        (block >= blocks_first)
        if len(inputs.caches) == 2
        else torch.zeros(inputs.batch, dtype=torch.bool, device=device)
    )
    places = torch.zeros(inputs.batch, block_size, dtype=torch.long, device=device)
    valid = torch.zeros(inputs.batch, block_size, dtype=torch.bool, device=device)
    for number, cache in enumerate(inputs.caches):
        start = block - (blocks_first if number else 0) * torch.ones_like(blocks_first)
        tokens = start[:, None] * block_size + torch.arange(block_size, device=device)
        mine = (second == bool(number))[:, None] & (tokens >= 0) & (tokens < cache.lengths[:, None])
        safe = tokens.clamp(0, cache.longest() - 1)
        if inputs.sparse:
            found = cache.table.long().gather(1, safe)
        else:
            page = cache.keys.shape[1]
            found = cache.table.long().gather(1, safe // page) * page + safe % page
        mine &= (found >= 0) & (found < cache.places)
        places = torch.where(mine, found, places)
        valid |= mine
    return places, valid, second.long()


def _gather(inputs: DecodeInputs, places, second, what: str) -> torch.Tensor:
    """``[batch, block_size, kv_heads, d]`` of keys or values."""
    tensors = [getattr(cache, what) for cache in inputs.caches]
    rows = tensors[0].flatten(0, 1)[places.clamp(max=inputs.caches[0].places - 1)]
    if len(tensors) == 2:
        other = tensors[1].flatten(0, 1)[places.clamp(max=inputs.caches[1].places - 1)]
        rows = torch.where(second.bool()[:, None, None, None], other, rows)
    return rows


def _keys_values(inputs: DecodeInputs, block: int, block_size: int):
    places, valid, second = block_tokens(inputs, block, block_size)
    keys = _gather(inputs, places, second, "keys")
    values = keys[..., : inputs.d_v] if inputs.latent else _gather(inputs, places, second, "values")
    # What lies in unread places must not matter, NaN included.
    return keys.masked_fill(~valid[..., None, None], 0), values.masked_fill(~valid[..., None, None], 0), valid


def exact(inputs: DecodeInputs, block_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64. Returns out ``[batch, heads, d_v]`` and LSE ``[batch, heads]`` (natural log), both float64.

    A row without a valid token has output 0 and LSE minus infinity.
    """
    blocks = max(-(-n // block_size) for n in inputs.lengths(block_size))
    parts = [_keys_values(inputs, block, block_size) for block in range(max(blocks, 1))]
    keys, values, valid = (torch.cat(p, dim=1) for p in zip(*parts))
    group = inputs.heads // inputs.kv_heads
    q = inputs.q.double().unflatten(1, (inputs.kv_heads, group))
    scores = torch.einsum("bkgd,btkd->bkgt", q, keys.double()) * inputs.scale
    scores = scores.masked_fill(~valid[:, None, None], -torch.inf).flatten(1, 2)
    lse = torch.logsumexp(scores, dim=2)
    total = lse if inputs.sink is None else torch.logaddexp(lse, inputs.sink.double())
    weights = torch.exp(scores - torch.where(total.isneginf(), 0.0, total)[..., None])
    weights = weights.unflatten(1, (inputs.kv_heads, group))
    return torch.einsum("bkgt,btkd->bkgd", weights, values.double()).flatten(1, 2), lse


def fma(a, b, c) -> torch.Tensor:
    """``a * b + c`` in float32 rounded once: the product is exact in float64 (the sum is rounded twice, rarely to
    effect)."""
    return (a.double() * b.double() + c.double()).float()


def exp2(x) -> torch.Tensor:
    """Through float64, because torch's float32 exp2 has other bits at the end of a vector than inside it."""
    return torch.exp2(x.double()).float()


def _sum_tree(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension (a power of two), two terms at a time: halves above 32, then neighbours."""
    while x.shape[-1] > 32:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def _finite(m: torch.Tensor) -> torch.Tensor:
    """The running maximum with minus infinity, an empty state's, replaced by 0."""
    return torch.where(m.isneginf(), torch.zeros_like(m), m)


def merge(left, right):
    """One state (m, l, acc) after ``left`` followed by ``right``. m is a base-2 maximum, l and acc sums scaled by
    it."""
    m = torch.maximum(left[0], right[0])
    a, b = exp2(left[0] - _finite(m)), exp2(right[0] - _finite(m))
    l = fma(left[1], a, right[1] * b)
    return m, l, fma(left[2], a[..., None], right[2] * b[..., None])


ROW_TILE = 8


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix products of each row and head, always of ``ROW_TILE`` rows a call, the last call filled up with zeros.

    A batched call picks its kernel by the number of matrices, which would make this emulation itself batch-dependent.
    """
    rows = left.shape[0]
    missing = -rows % ROW_TILE
    if missing:
        left, right = (torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in (left, right))
    tiles = zip(left.contiguous().split(ROW_TILE), right.contiguous().split(ROW_TILE))
    products = [torch.bmm(x.flatten(0, 1), y.flatten(0, 1)) for x, y in tiles]
    return torch.cat(products).unflatten(0, left.shape[:2])[:rows]


def _attend(state, q, keys, values, valid, scale_log2: float, dtype):
    """One block of the online softmax on ``[rows, kv_heads, group, ...]`` tensors."""
    m, l, acc = state
    scores = _products(q, keys.permute(0, 2, 3, 1).float()) * scale_log2
    scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
    m_new = torch.maximum(m, scores.amax(-1))
    p = exp2(scores - _finite(m_new)[..., None])
    alpha = exp2(m - _finite(m_new))
    l = fma(l, alpha, _sum_tree(p))
    weighted = _products(p.to(dtype).float(), values.permute(0, 2, 1, 3).float())
    return m_new, l, acc * alpha[..., None] + weighted


def _empty(rows: int, shape: tuple[int, int], d_v: int, device):
    full = (rows, *shape)
    return (
        torch.full(full, -torch.inf, device=device),
        torch.zeros(full, device=device),
        torch.zeros(*full, d_v, device=device),
    )


def partials(inputs: DecodeInputs, plan: Plan) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The state (m, l, acc) of each piece: entry ``i`` of the list holds piece ``i`` of all rows, empty where a row
    has fewer.

    m, l: ``[batch, kv_heads, group]``; acc: ``[batch, kv_heads, group, d_v]``, float32. Each piece starts from the
    empty state.
    """
    if plan.batch != inputs.batch:
        raise BadInput(f"the plan is for {plan.batch} rows, the inputs have {inputs.batch}: plan this batch.")
    device, group = inputs.q.device, inputs.heads // inputs.kv_heads
    q = inputs.q.float().unflatten(1, (inputs.kv_heads, group))
    edges = [plan.bounds_of(row) for row in range(plan.batch)]
    blocks = [e[-1] for e in edges]
    ends: dict[int, list[tuple[int, int]]] = {}  # block after which pieces end: (piece, row) each
    for row, bounds in enumerate(edges):
        for piece, end in enumerate(bounds[1:]):
            ends.setdefault(end, []).append((piece, row))
    shape = (inputs.kv_heads, group)
    most = max(max(len(e) - 1 for e in edges), 1)
    empty = _empty(plan.batch * most, shape, inputs.d_v, device)
    found = tuple(t.unflatten(0, (most, plan.batch)) for t in empty)
    state = _empty(plan.batch, shape, inputs.d_v, device)
    for block in range(max(blocks)):
        rows = torch.tensor([row for row, n in enumerate(blocks) if block < n], device=device)
        keys, values, valid = (t[rows] for t in _keys_values(inputs, block, plan.block_size))
        old = tuple(t[rows] for t in state)
        new = _attend(old, q[rows], keys, values, valid, inputs.scale * LOG2E, inputs.q.dtype)
        for whole, part in zip(state, new):
            whole[rows] = part
        if block + 1 in ends:
            piece, row = torch.tensor(ends[block + 1], device=device).T
            for place, whole, start in zip(found, state, (-torch.inf, 0.0, 0.0)):
                place[piece, row] = whole[row]
                whole[row] = start
    return list(zip(*found))


def fold_left(states):
    """The left fold: one merge a piece, in the row's order. An absent piece changes nothing."""
    total = states[0]
    for state in states[1:]:
        absent = state[0].isneginf()
        merged = merge(total, state)
        total = tuple(
            torch.where(absent[..., None] if new.dim() > absent.dim() else absent, old, new)
            for old, new in zip(total, merged)
        )
    return total


def fold_pairwise(states):
    """A balanced tree of merges over the pieces' indices."""
    while len(states) > 1:
        pairs = [merge(a, b) for a, b in zip(states[::2], states[1::2])]
        states = pairs + (states[-1:] if len(states) % 2 else [])
    return states[0]


def fold_compensated(states):
    """All pieces scaled by one common maximum and added left to right with Kahan's correction."""
    m = torch.stack([s[0] for s in states]).amax(0)
    weights = [exp2(s[0] - _finite(m)) for s in states]
    present = [~s[0].isneginf() for s in states]
    return (
        m,
        _kahan([s[1] for s in states], weights, present),
        _kahan([s[2] for s in states], [w[..., None] for w in weights], [p[..., None] for p in present]),
    )


def _kahan(terms, weights, present):
    """Compensated sum of weighted terms; an absent term must not even apply the correction that is due."""
    total, lost = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    for term, weight, there in zip(terms, weights, present):
        step = fma(term, weight, -lost)
        new = total + step
        total, lost = torch.where(there, new, total), torch.where(there, (new - total) - step, lost)
    return total


def fold_flashmla(states):
    """FlashMLA's combine: normalised pieces, weighted by ``exp2(lse_i - lse)``, added in order without compensation."""
    present = [s[1] > 0 for s in states]
    lses = torch.stack(
        [torch.where(p, s[0] + torch.log2(s[1].double()).float(), -torch.inf) for p, s in zip(present, states)]
    )
    m = _finite(lses.amax(0))
    lse = m + torch.log2(sum(exp2(one - m) for one in lses).double()).float()
    out = torch.zeros_like(states[0][2])
    for (_, l, acc), one in zip(states, lses):
        normal = torch.where((l > 0)[..., None], acc / l[..., None], 0.0)
        out = fma(exp2(one - _finite(lse))[..., None].expand_as(out), normal, out)
    return lse, (lse > -torch.inf).float(), out


_FOLDS = {"left": fold_left, "flashmla": fold_flashmla, "pairwise": fold_pairwise, "compensated": fold_compensated}


def finish(inputs: DecodeInputs, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in q's dtype and natural-log LSE (float32) of a row's whole state; the sink enters here, once."""
    m, l, acc = (t.flatten(1, 2) for t in state)
    total = l
    if inputs.sink is not None:
        total = l + exp2(inputs.sink * LOG2E - _finite(m))
    inverse = torch.where(total == 0, 0.0, 1.0 / total)
    out = (acc * inverse[..., None] + 0.0).to(inputs.q.dtype)  # + 0: zeros have one sign
    lse = torch.where(l == 0, -torch.inf, (_finite(m) + torch.log2(l.double()).float()) * LN2)
    return out, lse


def check_fold(fold: str, known: tuple[str, ...], plan: Plan) -> None:
    """BadInput for an unknown fold, and for another fold than ``left`` on a plan that folds in registers."""
    if fold not in known:
        raise BadInput(f"fold {fold!r} is unknown: give one of {', '.join(known)}.")
    if fold != "left" and plan.folds:
        raise BadInput(
            f"fold {fold!r} cannot be used with rule {plan.rule}: a program folds a row's first pieces from left to "
            "right, so another fold after it would depend on the schedule; use fixed-chunk instead."
        )


def emulate(inputs: DecodeInputs, plan: Plan, fold: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Decode along a plan in float32. Returns out ``[batch, heads, d_v]`` in q's dtype and LSE ``[batch, heads]``
    float32.

    fold: ``left`` (merge by merge, as the Triton kernels), ``flashmla`` (its combine step), ``pairwise``,
    ``compensated``.
    An empty row has output 0 and LSE minus infinity (FlashMLA itself returns plus infinity there). Raises BadInput for
    a plan of another batch size, an unknown fold, or another fold than ``left`` under a free rule.
    """
    check_fold(fold, FOLDS, plan)
    return finish(inputs, _FOLDS[fold](partials(inputs, plan)))
