"""What one prefill attention step is given: the queries of several requests in a row, and the paged KV cache that
already holds their keys and values.

Row i of a request attends to the tokens cached before it and to those of its own step up to itself. Written out, each
row is a decode step of its own length: that view is the reference.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ...common import BadInput
from ..decode.inputs import Cache, DecodeInputs


@dataclass(frozen=True)
class PrefillInputs:
    """One prefill step, whole prompts or chunks of them.

    q: ``[tokens, heads, d_qk]``, requests one after another; starts: ``batch + 1`` rising numbers, request b's rows are
    ``starts[b]`` to ``starts[b + 1]``; cached: ``batch`` numbers of tokens that lie in the cache before those rows;
    keys ``[pages, page_size, kv_heads, d_qk]`` and values ``[pages, page_size, kv_heads, d_v]`` of q's dtype, which hold
    the rows' own tokens too; block_table: ``[batch, pages_per_request]`` int32; scale: ``d_qk ** -0.5`` if None; sink:
    as in `DecodeInputs`. Raises BadInput for numbers and shapes that do not fit.
    """

    q: torch.Tensor
    starts: tuple[int, ...]
    cached: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    scale: float | None = None
    sink: torch.Tensor | None = None

    def __post_init__(self):
        starts, cached = (tuple(int(n) for n in numbers) for numbers in (self.starts, self.cached))
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "cached", cached)
        if self.q.dim() != 3 or 0 in self.q.shape[1:]:
            raise BadInput(f"q has shape {list(self.q.shape)}: give [tokens, heads, d_qk], heads and width not 0.")
        rising = all(a <= b for a, b in zip(starts, starts[1:]))
        if len(starts) != len(cached) + 1 or not cached or starts[0] != 0 or starts[-1] != len(self.q) or not rising:
            raise BadInput(
                f"starts {list(starts)} with {len(cached)} cached lengths do not cut {len(self.q)} rows: give one more"
                f" than requests, rising from 0 to {len(self.q)}."
            )
        if min(cached) < 0:
            raise BadInput(f"a cached length is {min(cached)}: give 0 or more.")
        if self.block_table.dim() != 2 or self.block_table.shape[0] != len(cached):
            raise BadInput(f"block_table has shape {list(self.block_table.shape)} for {len(cached)} requests.")
        longest = max(n + b - a for n, a, b in zip(cached, starts, starts[1:]))
        if longest > self.block_table.shape[1] * self.keys.shape[1]:
            raise BadInput(
                f"a request reaches {longest} tokens, its row of the block table {self.block_table.shape[1]} pages of"
                f" {self.keys.shape[1]}."
            )
        object.__setattr__(self, "scale", self.q.shape[2] ** -0.5 if self.scale is None else float(self.scale))
        if len(self.q):
            self.as_decode()  # checks the rest

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    def lengths(self) -> np.ndarray:
        """Tokens that each row attends to, int32 ``[tokens]``."""
        ranges = zip(self.cached, self.starts, self.starts[1:])
        return np.concatenate([np.arange(n + 1, n + 1 + b - a) for n, a, b in ranges]).astype(np.int32)

    def as_decode(self) -> DecodeInputs:
        """Every row as a decode row of its own length."""
        device = self.q.device
        counts = torch.tensor(np.diff(self.starts), device=device)
        cache = Cache(
            self.keys,
            self.values,
            torch.from_numpy(self.lengths()).to(device),
            block_table=self.block_table.repeat_interleave(counts, 0).contiguous(),
        )
        return DecodeInputs(self.q, (cache,), self.values.shape[3], self.scale, self.sink)
