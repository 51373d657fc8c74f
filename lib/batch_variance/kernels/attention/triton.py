"""Causal attention over a paged KV cache for CUDA: one program a (query row, KV head), pages folded left to right."""

import torch
import triton
import triton.language as tl


@triton.jit
def _attend(q, k_pages, v_pages, tables, lengths, out, scale, table_width, KH,
            GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    g = tl.arange(0, PADDED_GROUP)
    d = tl.arange(0, D)
    t = tl.arange(0, PAGE)
    q_offset = (row * KH + head) * GROUP * D + g[:, None] * D + d[None, :]
    query = tl.load(q + q_offset, mask=g[:, None] < GROUP, other=0.0).to(tl.float32) * scale
    top = tl.full((PADDED_GROUP,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((PADDED_GROUP,), dtype=tl.float32)
    acc = tl.zeros((PADDED_GROUP, D), dtype=tl.float32)
    for start in range(0, length, PAGE):
        held = tl.load(tables + row * table_width + start // PAGE).to(tl.int64)
        offset = ((held * PAGE + t[:, None]) * KH + head) * D + d[None, :]
        valid = start + t < length
        key = tl.load(k_pages + offset, mask=valid[:, None], other=0.0).to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        value = tl.load(v_pages + offset, mask=valid[:, None], other=0.0).to(tl.float32)
        total = tl.fma(total, shrink, tl.sum(weights, axis=1))
        acc = tl.dot(weights, value, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + q_offset, result.to(out.dtype.element_ty), mask=g[:, None] < GROUP)


def attend_paged(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """As reference.attend_paged, on CUDA. D and the page size are powers of two, at least 16."""
    rows, heads, dim = q.shape
    _, page, kv_heads, _ = k_pages.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows:
        group = heads // kv_heads
        _attend[(rows, kv_heads)](
            q.contiguous(), k_pages, v_pages, tables.contiguous(), lengths.contiguous(), out, dim**-0.5, tables.shape[1],
            kv_heads, GROUP=group, PADDED_GROUP=max(16, triton.next_power_of_2(group)), D=dim, PAGE=page, num_warps=4,
        )
    return out
