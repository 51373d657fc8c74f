"""Of a pool of KV pages, those that a call's page table names: all that a replay needs of it, under new numbers."""

from typing import Mapping

import torch

from .calls import Call
from .layouts import misplacement, strided
from .snapshots import WORD, values_of


def with_own_pages(call: Call, pages: Mapping[str, str], limit: int) -> tuple[Call, list[torch.Tensor]]:
    """The call with pools of just the pages that it names, and the tensors made for it, which are nobody else's.

    pages: path of a pool [P, ...] -> path of the integer tensor, of any shape, whose entries are numbers of its pages.
    Entries below 0 and from P on name none and stay as they are. Pools and tables keep their strides and alignment.
    Left as they are: pools whose table is no tensor or lies over itself, pools of one table that differ in P, and
    where the pages would take more than ``limit`` bytes or no less than the pools. Waits for a CUDA device only where
    the table has no fewer entries than the pool has pages.
    """
    changes = {}
    for table_path in dict.fromkeys(pages.values()):
        table = call.find(table_path)
        pools = {path: call.find(path) for path, of in pages.items() if of == table_path}
        pools = {path: pool for path, pool in pools.items() if isinstance(pool, torch.Tensor) and pool.dim()}
        if not pools or not _numbers_pages(table) or len({pool.shape[0] for pool in pools.values()}) != 1:
            continue
        size = sum([pool[:1].nbytes for pool in pools.values()])
        count = next(iter(pools.values())).shape[0]
        named, renumbered = _renumbered(table, count)
        if named.numel() >= count or named.numel() * size > limit:
            continue
        limit -= named.numel() * size
        changes[table_path] = renumbered
        changes.update({path: _gathered(pool, named.to(pool.device)) for path, pool in pools.items()})
    return call.replace(changes), list(changes.values())


def _numbers_pages(table: object) -> bool:
    return (
        isinstance(table, torch.Tensor)
        and table.dtype in (torch.int32, torch.int64)
        and table.numel() > 0
        and not any(step == 0 and size > 1 for size, step in zip(table.shape, table.stride()))
    )


def _renumbered(table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the pages to keep, int64 [N], and the table with their places among them in their stead."""
    numbers = table.flatten()
    valid, kept = (numbers >= 0) & (numbers < count), numbers.clamp(0, count - 1)
    if table.is_cuda and table.numel() < count:  # pages named twice are kept twice: counting them would wait
        places = torch.arange(table.numel(), dtype=table.dtype, device=table.device)
    else:
        kept, places = kept.unique(return_inverse=True)
    renumbered = strided(table.shape, table.stride(), table.dtype, table.device, misplacement(table))
    renumbered.copy_(torch.where(valid, places.to(table.dtype), numbers).view(table.shape))
    return kept.long(), renumbered


def _gathered(pool: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """pool[kept], its bits moved as integers, with the pool's strides and alignment."""
    new = strided((kept.numel(), *pool.shape[1:]), pool.stride(), pool.dtype, pool.device, misplacement(pool))
    word = WORD.get(pool.element_size(), pool.dtype)
    torch.index_select(values_of(pool).view(word), 0, kept, out=new.view(word))
    return new
