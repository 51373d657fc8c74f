"""What one decode attention step is given: queries, one or two paged KV caches, valid lengths, an attention sink.

Knows shapes and addressing and checks them. A latent (MLA) cache has no value tensor: its values are the first ``d_v``
numbers of its keys, shared by all heads.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from ...common import BadInput
from ...schedules import decode_lengths
from ...schedules.flashmla import at_least


@dataclass(frozen=True)
class Cache:
    """One paged KV cache and what each row reads of it.

    keys: ``[pages, page_size, kv_heads, d_qk]``; values: ``[pages, page_size, kv_heads, d_v]``, or None for a latent
    cache; lengths: ``[batch]`` int32, tokens that the row attends to. Exactly one of
    block_table: ``[batch, pages_per_row]`` int32, token t of a row lies in page ``block_table[row, t // page_size]``;
    indices: ``[batch, topk]`` int32, token t lies at place ``indices[row, t]`` counted over pages and tokens; a
    negative place, or one past the end, is skipped.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    lengths: torch.Tensor
    block_table: torch.Tensor | None = None
    indices: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        return self.block_table if self.indices is None else self.indices

    @property
    def places(self) -> int:
        return self.keys.shape[0] * self.keys.shape[1]

    def longest(self) -> int:
        """Most tokens that the table can name for a row."""
        return self.table.shape[1] * (self.keys.shape[1] if self.indices is None else 1)

    def row(self, row: int) -> "Cache":
        one = slice(row, row + 1)
        table = self.table[one].contiguous()
        kind = {"block_table": table} if self.indices is None else {"indices": table}
        return Cache(self.keys, self.values, self.lengths[one].contiguous(), **kind)


@dataclass(frozen=True)
class DecodeInputs:
    """One decode step. q: ``[batch, heads, d_qk]``; caches: one, or two of one kind (the second is read after the
    first); d_v: width of an output head; scale: factor on the scores, ``d_qk ** -0.5`` if None; sink: ``[heads]``
    float32 logits that take probability without contributing a value (no effect on the LSE), or None.
    Raises BadInput for mismatched shapes, dtypes or devices, an empty batch, or lengths outside the table."""

    q: torch.Tensor
    caches: tuple[Cache, ...]
    d_v: int
    scale: float | None = None
    sink: torch.Tensor | None = None

    def __post_init__(self):
        if self.q.dim() != 3 or 0 in self.q.shape:
            raise BadInput(f"q has shape {list(self.q.shape)}: give [batch, heads, d_qk], none of them 0.")
        if len(self.caches) not in (1, 2):
            raise BadInput(f"{len(self.caches)} caches were given: a row reads one cache, or two.")
        object.__setattr__(self, "scale", self.q.shape[2] ** -0.5 if self.scale is None else float(self.scale))
        for number, cache in enumerate(self.caches):
            self._check_cache(f"caches[{number}]", cache)
        if self.sink is not None and (list(self.sink.shape) != [self.heads] or self.sink.dtype != torch.float32):
            raise BadInput(
                f"sink has shape {list(self.sink.shape)} and dtype {self.sink.dtype}: give [{self.heads}] float32."
            )

    def _check_cache(self, name: str, cache: Cache) -> None:
        batch, heads, d_qk = self.q.shape
        first = self.caches[0]
        if cache.keys.dim() != 4 or cache.keys.shape[3] != d_qk or 0 in cache.keys.shape:
            raise BadInput(
                f"{name}.keys has shape {list(cache.keys.shape)}: give [pages, page_size, kv_heads, {d_qk}]."
            )
        kv_heads = cache.keys.shape[2]
        if heads % kv_heads or kv_heads != first.keys.shape[2]:
            raise BadInput(f"{heads} query heads cannot share {kv_heads} key/value heads of {name} evenly.")
        if cache.values is None:
            if not (kv_heads == 1 and 0 < self.d_v <= d_qk):
                raise BadInput(
                    f"{name} is latent: it needs 1 key/value head and d_v up to {d_qk}, not {kv_heads} and {self.d_v}."
                )
        elif list(cache.values.shape) != [*cache.keys.shape[:3], self.d_v]:
            raise BadInput(
                f"{name}.values has shape {list(cache.values.shape)}: give {[*cache.keys.shape[:3], self.d_v]}."
            )
        if (cache.block_table is None) == (cache.indices is None):
            raise BadInput(f"{name} needs exactly one of block_table and indices.")
        if (cache.indices is None) != (first.indices is None) or (cache.values is None) != (first.values is None):
            raise BadInput(
                f"{name} is of another kind than caches[0]: both paged or both sparse, both latent or neither."
            )
        if cache.table.dim() != 2 or cache.table.shape[0] != batch or cache.lengths.shape != (batch,):
            raise BadInput(
                f"{name} has a table of shape {list(cache.table.shape)} and lengths of shape "
                f"{list(cache.lengths.shape)}: q has {batch} rows."
            )
        kinds = {t.dtype for t in (cache.table, cache.lengths)}
        if kinds != {torch.int32} or len({t.dtype for t in (self.q, cache.keys, cache.values) if t is not None}) != 1:
            raise BadInput(f"{name}: tables and lengths must be int32, keys and values of q's dtype {self.q.dtype}.")
        if (
            len({t.device for t in (self.q, cache.keys, cache.values, cache.table, cache.lengths) if t is not None})
            != 1
        ):
            raise BadInput(f"{name}: q, keys, values, table and lengths must lie on one device.")

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.caches[0].keys.shape[2]

    @property
    def latent(self) -> bool:
        return self.caches[0].values is None

    @property
    def sparse(self) -> bool:
        return self.caches[0].indices is not None

    def row(self, row: int) -> "DecodeInputs":
        """The row alone, over the same caches."""
        return DecodeInputs(
            self.q[row : row + 1].contiguous(), tuple(c.row(row) for c in self.caches), self.d_v, self.scale, self.sink
        )

    def lengths(self, block_size: int) -> list[int]:
        """Tokens a row that a schedule plans on (see ``schedules.decode_lengths``). Copies the lengths to the host.

        Raises BadInput for a length below 0 or beyond the table.
        """
        at_least(block_size, 1, "block_size")
        counts = [cache.lengths.tolist() for cache in self.caches]
        for cache, values in zip(self.caches, counts):
            if min(values) < 0 or max(values) > cache.longest():
                raise BadInput(
                    f"lengths run from {min(values)} to {max(values)}: the table holds 0 to {cache.longest()} tokens a row."
                )
        if len(counts) == 2:
            return decode_lengths(self.caches[0].longest(), counts[0], self.caches[1].longest(), counts[1], block_size)
        return [max(n, 1) for n in counts[0]] if self.sparse else counts[0]


def random_inputs(
    lengths: list[int],
    heads: int = 64,
    kv_heads: int | None = None,
    d_qk: int = 576,
    d_v: int = 512,
    page_size: int = 64,
    sparse: bool = False,
    extra_lengths: list[int] | None = None,
    sink: bool = False,
    invalid: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> DecodeInputs:
    """Random normal inputs of given lengths, pages shuffled over the pool; one a call, the same on every device.

    kv_heads None makes a latent cache. extra_lengths adds a second cache; invalid is the share of sparse indices set
    to -1.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffle = np.random.default_rng(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    def cache(counts):
        pages_each = max(math.ceil(max(counts) / page_size), 1)
        pages = len(counts) * pages_each
        table = torch.from_numpy(shuffle.permutation(pages).reshape(len(counts), pages_each)).int()
        kind = {"block_table": table.to(device)}
        if sparse:
            tokens = torch.arange(pages_each * page_size)
            indices = table[:, tokens // page_size] * page_size + tokens % page_size
            indices[torch.from_numpy(shuffle.random(indices.shape) < invalid)] = -1
            kind = {"indices": indices.int().contiguous().to(device)}
        keys = normal(pages, page_size, kv_heads or 1, d_qk)
        values = normal(pages, page_size, kv_heads, d_v) if kv_heads else None
        return Cache(keys, values, torch.tensor(counts, dtype=torch.int32, device=device), **kind)

    q = normal(len(lengths), heads, d_qk)
    caches = tuple(cache(counts) for counts in (lengths, extra_lengths) if counts is not None)
    sinks = torch.randn(heads, generator=generator).to(device) if sink else None
    return DecodeInputs(q, caches, d_v, None, sinks)
