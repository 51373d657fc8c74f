"""Prefill steps over shuffled pages, whole and in chunks, for tests on a CPU and on a GPU."""

import numpy as np
import torch

from batch_variance.kernels.prefill import PrefillInputs


def prefill_case(counts, cached, heads=8, kv_heads=2, d=16, page=16, dtype=torch.float16, device="cpu", seed=0, sink=False):
    """A step of ``counts`` new rows after ``cached`` tokens. What no row attends to, unused pages and the pages' ends,
    is NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    ends = [a + b for a, b in zip(counts, cached)]
    width = max(-(-end // page) for end in ends) + 1
    table = torch.randperm(width * len(counts) + 3, generator=generator, device=device)[: width * len(counts)]
    table = table.view(len(counts), width).int()
    keys, values = (torch.full((width * len(counts) + 3, page, kv_heads, d), torch.nan, device=device).to(dtype) for _ in "kv")
    for row, end in enumerate(ends):
        for pages in (keys, values):
            filled = torch.full((width * page, kv_heads, d), torch.nan, device=device).to(dtype)
            filled[:end] = make(end, kv_heads, d)
            pages[table[row].long()] = filled.view(width, page, kv_heads, d)
    return PrefillInputs(
        make(sum(counts), heads, d), tuple(np.cumsum([0, *counts])), tuple(cached), keys, values, table.contiguous(),
        sink=torch.randn(heads, generator=generator, device=device) if sink else None,
    )  # fmt: skip


def rows_of(inputs: PrefillInputs, request: int, first: int, last: int) -> PrefillInputs:
    """Rows first to last of one request as a step of their own: a chunk, or with its first row a decode step."""
    start, cached = inputs.starts[request], inputs.cached[request]
    return PrefillInputs(
        inputs.q[start + first : start + last].contiguous(),
        (0, last - first),
        (cached + first,),
        inputs.keys,
        inputs.values,
        inputs.block_table[request : request + 1].contiguous(),
        inputs.scale,
        inputs.sink,
    )


def same_bits(a, b) -> bool:
    """Whether two (out, lse) pairs are the same in raw bits."""
    view = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(x.view(view[x.element_size()]), y.view(view[y.element_size()])) for x, y in zip(a, b))
