"""Where a row's part lies in a tensor of a batch, found by setting it beside the tensor that the row had alone.

A dimension N times as long as alone holds the rows, also where tokens, heads or pages were folded into it: row after
row, or token after token with the rows inside (what a model with its tokens outermost makes of it). Shapes cannot tell
these two apart; values can, and so can memory that an earlier operation laid out.
"""

from dataclasses import dataclass
from typing import Sequence

import torch

from .dispatched import copied
from .layouts import fresh_like, strided
from .snapshots import same_bits

_CLOSE = 2**-4  # of a part's norm: far above rounding, far below what other rows' values are apart


class Unaligned(Exception):
    """A tensor of the batch that does not line up with the one of the row alone."""


@dataclass(frozen=True)
class Place:
    """The dimension that holds the rows, and whether they are inside what was folded into it."""

    dim: int
    inner: bool = False

    def part(self, batched: torch.Tensor, alone: torch.Tensor, position: int, n: int) -> torch.Tensor:
        """The row's part, a view of the same shape as the tensor it had alone. Raises Unaligned."""
        if n > 1 and carried(batched, alone, n) != self.dim:
            raise Unaligned(f"{tuple(batched.shape)} in a batch of {n} against {tuple(alone.shape)} alone")
        size = alone.shape[self.dim]
        if self.inner:
            return batched.unflatten(self.dim, (size, n)).select(self.dim + 1, position)
        return batched.narrow(self.dim, position * size, size)

    def step(self, batched: torch.Tensor, n: int) -> int:
        """Elements of memory from a row to the next."""
        stride = batched.stride(self.dim)
        return stride if self.inner else stride * (batched.shape[self.dim] // n)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A batch of these parts, with the strides of the first; where those would overlap, the rows are outermost."""
        if self.inner:
            return torch.stack(list(parts), self.dim + 1).flatten(self.dim, self.dim + 1)
        return _joined(parts, self.dim)


def carried(batched: torch.Tensor, alone: torch.Tensor, n: int) -> int | None:
    """The dimension that holds n rows, or None where the tensor is the same for every batch. Raises Unaligned
    otherwise.
    """
    if batched.shape == alone.shape:
        return None
    if batched.dim() == alone.dim():
        unequal = [d for d in range(alone.dim()) if batched.shape[d] != alone.shape[d]]
        if len(unequal) == 1 and batched.shape[unequal[0]] == n * alone.shape[unequal[0]]:
            return unequal[0]
    raise Unaligned(f"{tuple(batched.shape)} in a batch of {n} against {tuple(alone.shape)} alone")


def place_of(
    batched: torch.Tensor,
    alone: Sequence[torch.Tensor],
    positions: Sequence[int],
    n: int,
    step: int | None = None,
    likely: bool | None = None,
) -> Place | None:
    """Where the rows lie, or None where the tensor is the same for every batch. Raises Unaligned.

    alone: the tensor of each watched row, whose positions in the batch of n are given. step: elements of memory from a
    row to the next, where it is known. likely: whether they are inside, believed where values leave it open.
    """
    dim = carried(batched, alone[0], n)
    if dim is None:
        return None
    size = alone[0].shape[dim]
    if size == 1:
        return Place(dim)
    places = Place(dim), Place(dim, inner=True)
    pairs = [[(p.part(batched, one, at, n), one) for one, at in zip(alone, positions)] for p in places]
    for place, compared in zip(places, pairs):
        if all(same_bits(a, b) for a, b in compared):
            return place
    for place in places:
        if step is not None and place.step(batched, n) == step:
            return place
    apart = [max(_apart(a, b) for a, b in compared) for compared in pairs]
    if min(apart) <= _CLOSE:
        return places[apart[1] < apart[0]]
    if likely is not None and batched.dtype.is_floating_point:
        return places[likely]
    raise Unaligned("which of its entries are the row's is not known: they lie in no order that could be recognised")


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far apart two parts are, over the norm of the second; for dtypes without fractions, the share of entries
    that differ.
    """
    if not b.dtype.is_floating_point:
        return float((a != b).double().mean())
    a, b = a.double(), b.double()
    found = float((a - b).norm() / b.norm())
    return found if found == found else float("inf")


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    size = sum(part.shape[dim] for part in parts)
    new = fresh_like(parts[0], dim, size)
    reach = 1
    for stride, n in sorted(zip(new.stride(), new.shape)):
        if n > 1 and stride < reach:
            one = copied(parts[0].narrow(dim, 0, 1))
            strides, shape = list(one.stride()), list(one.shape)
            span = 1 + sum((m - 1) * s for m, s in zip(shape, strides))
            strides[dim], shape[dim] = -(-span // 16) * 16, size
            new = strided(shape, strides, one.dtype, one.device)
            break
        reach = max(reach, stride * n)
    start = 0
    for part in parts:
        new.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return new
