"""How an argument or an output carries the batch: which part of it is row i, and how a new batch is put together.

A *row* is one request of the step. It may be one index of a dimension (``Rows``), a range of a flattened token
dimension (``Flat``), or a step of prefix sums (``Prefix``). Taking rows keeps the strides and the alignment of the
original, so that a kernel that looks at them sees in a replay what it saw in the real call.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Iterable, Protocol, Sequence

import torch


def misplacement(t: torch.Tensor) -> int:
    """Bytes from the last address that any new tensor may have to where this one begins. torch allocates at multiples
    of 64 on the CPU and of 512 on CUDA, of which no access is wider than 256.
    """
    return t.data_ptr() % (64 if t.is_cpu else 256)


class CannotSlice(Exception):
    """An argument or output cannot be cut into rows; the message says which one and why."""


class Layout(Protocol):
    """What a layout answers. ``offsets`` maps the name of each prefix-sum argument to its B + 1 values.

    ``count`` is None where the value is shared by all rows.
    """

    def count(self, value: Any, offsets: dict[str, list[int]]) -> int | None: ...
    def take(self, value: Any, index: Sequence[int], offsets: dict[str, list[int]]) -> Any: ...
    def parts(self, value: Any, index: Sequence[int], offsets: dict[str, list[int]]) -> list[torch.Tensor]: ...


def as_layout(spec: Any) -> Layout:
    """A dimension number means ``Rows(dim)``; a layout is itself."""
    return Rows(spec) if isinstance(spec, int) and not isinstance(spec, bool) else spec


@dataclass(frozen=True)
class Rows:
    """Row i is index i of dimension ``dim``; on a list or tuple, its i-th item.

    ``or_one``: a dimension of size 1 is shared by all rows (a mask that is broadcast), and passed on as it is.
    """

    dim: int = 0
    or_one: bool = False

    def count(self, value: Any, offsets: dict) -> int | None:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                return len(value)
            raise CannotSlice(
                f"is a {type(value).__name__}, which has no rows: build it afresh (fresh=) or leave it whole"
            )
        if not -value.dim() <= self.dim < value.dim():
            raise CannotSlice(f"has shape {tuple(value.shape)} and so no dimension {self.dim}")
        return None if self._shared(value) else value.shape[self.dim]

    def _shared(self, value: torch.Tensor) -> bool:
        return self.or_one and value.shape[self.dim] == 1

    def take(self, value: Any, index: Sequence[int], offsets: dict) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(value[i] for i in index)
        if self._shared(value):
            return value
        return take_along(value, self.dim % value.dim(), index)

    def parts(self, value: torch.Tensor, index: Sequence[int], offsets: dict) -> list[torch.Tensor]:
        return [value.select(self.dim, i) for i in index]


@dataclass(frozen=True)
class Flat:
    """Rows follow one another along ``dim``; row i is the range that the prefix sums in argument ``by`` give it."""

    by: str
    dim: int = 0

    def count(self, value: Any, offsets: dict) -> int:
        if not isinstance(value, torch.Tensor):
            raise CannotSlice(f"is a {type(value).__name__}, not a tensor of flattened rows")
        if self.by not in offsets:
            raise CannotSlice(f"is cut by {self.by!r}, which batch_args does not name as Prefix()")
        ends = offsets[self.by]
        if value.shape[self.dim] < ends[-1]:
            raise CannotSlice(f"has {value.shape[self.dim]} tokens where {self.by!r} ends at {ends[-1]}")
        return len(ends) - 1

    def take(self, value: torch.Tensor, index: Sequence[int], offsets: dict) -> torch.Tensor:
        ends = offsets[self.by]
        return _take_runs(value, self.dim % value.dim(), _merged((ends[i], ends[i + 1]) for i in index))

    def parts(self, value: torch.Tensor, index: Sequence[int], offsets: dict) -> list[torch.Tensor]:
        ends = offsets[self.by]
        return [value.narrow(self.dim, ends[i], ends[i + 1] - ends[i]) for i in index]


@dataclass(frozen=True)
class Prefix:
    """Prefix sums of the rows' lengths, B + 1 of them (``cu_seqlens``, ``indptr``)."""

    def count(self, value: Any, offsets: dict) -> int:
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.numel() < 1:
            raise CannotSlice("is no 1-D tensor of prefix sums")
        return value.numel() - 1

    def take(self, value: torch.Tensor, index: Sequence[int], offsets: dict) -> torch.Tensor:
        sizes = value.diff()
        parts = [sizes.narrow(0, start, end - start) for start, end in _merged((i, i + 1) for i in index)]
        return torch.cat([value[:1], *parts]).cumsum(0, dtype=value.dtype)

    def parts(self, value: torch.Tensor, index: Sequence[int], offsets: dict) -> list[torch.Tensor]:
        return [value[i + 1] - value[i] for i in index]


def taken_offsets(ends: Sequence[int], index: Sequence[int]) -> list[int]:
    """Prefix sums of the batch that holds these rows, from the first batch's."""
    new = [ends[0]]
    for i in index:
        new.append(new[-1] + ends[i + 1] - ends[i])
    return new


def take_along(value: torch.Tensor, dim: int, index: Sequence[int]) -> torch.Tensor:
    """``value.index_select(dim, index)`` in fresh, aligned memory with the original's order and gaps of strides."""
    runs = [(index[0], index[0] + 1)] if len(index) == 1 else _merged((i, i + 1) for i in index)
    return _take_runs(value, dim, runs)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in their order, each that begins where the one before it ends joined to that, empty ones left out."""
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif end > start:
            merged.append((start, end))
    return merged


def _take_runs(value: torch.Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """These ranges along ``dim``, one after another. Slices, because an index would have to be sent to the device,
    which waits for it.
    """
    shape, strides = _resized(value.shape, value.stride(), dim, sum([end - start for start, end in runs]))
    source = value.detach() if value.requires_grad else value
    if len(runs) == 1:
        slice = source.narrow(dim, runs[0][0], runs[0][1] - runs[0][0])
        if slice.stride() == strides and slice.is_contiguous():
            return slice.clone()
    new = strided(shape, strides, value.dtype, value.device)
    if new.numel() == 0:
        return new
    # Dimensions expanded with stride 0 hold one copy: write that one.
    target = new
    for d in [d for d, step in enumerate(value.stride()) if step == 0 and value.shape[d] > 1]:
        source = source.narrow(d, 0, 1)
        target = target.narrow(d, 0, 1)
    if value.stride(dim) == 0 and value.shape[dim] > 1:
        target.copy_(source)
    else:
        slices = [source.narrow(dim, start, end - start) for start, end in runs]
        target.copy_(slices[0] if len(slices) == 1 else torch.cat(slices, dim))
    return new


def fresh_like(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Uninitialised tensor shaped like ``value`` but for ``size`` along ``dim``; strides outside that dimension
    scale.
    """
    return strided(*_resized(value.shape, value.stride(), dim, size), value.dtype, value.device)


@lru_cache(1024)
def _resized(shape: tuple[int, ...], strides: tuple[int, ...], dim: int, size: int) -> tuple[tuple, tuple]:
    shape, strides = list(shape), list(strides)
    old, step = shape[dim], strides[dim]
    shape[dim] = size
    for d in range(len(shape)):
        if d != dim and step and strides[d] >= step * max(old, 1) and shape[d] > 1:
            # Keep a gap between outer slices (a view into a wider buffer) as a gap.
            strides[d] = (
                step * size + (strides[d] - step * old)
                if strides[d] % (step * old or 1)
                else strides[d] // (old or 1) * size
            )
    return tuple(shape), tuple(strides)


def strided(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, place: int = 0
) -> torch.Tensor:
    """Uninitialised tensor of these strides, ``place`` bytes beyond an address that any new tensor may have."""
    if not place:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    skip = place // dtype.itemsize
    flat = torch.empty(skip + extent(tuple(shape), tuple(strides)), dtype=dtype, device=device)
    return flat.as_strided(shape, strides, skip)


@lru_cache(1024)
def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last of a tensor, both counted."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if all(shape) else 0
