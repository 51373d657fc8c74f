"""Causal attention over a paged KV cache in plain torch, one query row at a time in effect.

Each row folds its own pages from left to right, a page being one fixed-size step, so neither the batch nor the way a
prompt was cut into prefill chunks changes a row's order of additions.
"""

import torch

from ..tiles import by_tiles


def attend_float64(q, k_pages, v_pages, tables, lengths) -> torch.Tensor:
    """float64 [R, H, D] by the textbook formula, a row at a time. Arguments as in attend_paged."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_pages.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if length:
            k = k_pages[tables[row]].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            v = v_pages[tables[row]].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,lhd->hl", q[row].double(), k) / q.shape[-1] ** 0.5
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out


def attend_paged(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Attention of each query row over the first ``lengths[row]`` cached tokens of its own page table.

    q: [R, H, D]; k_pages, v_pages: [pages, page, KH, D]; tables: int64 [R, pages a row]; lengths: int64 [R], a row's own
    position plus one, 0 giving zeros. Computed in float32; returns [R, H, D] in q's dtype.
    """
    rows, heads, dim = q.shape
    _, page, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    scale = dim**-0.5
    query = (q.float() * scale).view(rows, kv_heads, group, dim)
    top = torch.full((rows, kv_heads, group, 1), -torch.inf)
    total = torch.zeros(rows, kv_heads, group, 1)
    acc = torch.zeros(rows, kv_heads, group, dim)
    for index in range(-(-int(lengths.max()) // page) if rows else 0):
        active = (lengths > index * page).nonzero().squeeze(1)
        held = tables[active, index]
        key = k_pages[held].float().permute(0, 2, 3, 1)
        valid = torch.arange(page) < (lengths[active] - index * page).unsqueeze(1)
        # Behind a row's length lies what a later token or the page's last owner left: weight 0 would pass its NaN on.
        value = v_pages[held].float().masked_fill(~valid[:, :, None, None], 0.0).permute(0, 2, 1, 3)
        scores = by_tiles(torch.matmul, query[active], key)
        scores = scores.masked_fill(~valid[:, None, None, :], -torch.inf)
        new_top = torch.maximum(top[active], scores.amax(-1, keepdim=True))
        shrink = torch.exp(top[active] - new_top)
        weights = torch.exp(scores - new_top)
        total[active] = total[active] * shrink + weights.sum(-1, keepdim=True)
        acc[active] = acc[active] * shrink + by_tiles(torch.matmul, weights, value)
        top[active] = new_top
    return (acc / total.clamp(min=torch.finfo(torch.float32).tiny)).view(rows, heads, dim).to(q.dtype)
