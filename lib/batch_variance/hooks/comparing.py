"""What one replay says about the rows it was to keep: rows and elements whose bits differ, and by how much.

Distances follow numerics: ULP for floating dtypes, the difference itself for integers (the number of values between),
and row-scaled ULP over all of a row's elements. Bits decide; distances describe. +0 and -0 differ in bits at ULP
distance 0.
"""

from dataclasses import dataclass, field
from typing import Sequence

import torch

from ..numerics import row_scaled_ulp, ulp_distance
from .snapshots import bits

BUCKETS = 65  # ULP histogram: bucket k counts differing elements whose ULP distance has k binary digits


@dataclass
class Difference:
    """Counts over the rows compared; sums of Differences add them up."""

    rows: int = 0
    rows_differ: int = 0
    rows_unmoved: int = 0
    differ_unmoved: int = 0
    elements: int = 0
    elements_differ: int = 0
    max_ulp: int = 0
    max_row_scaled_ulp: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(
            self.rows + other.rows,
            self.rows_differ + other.rows_differ,
            self.rows_unmoved + other.rows_unmoved,
            self.differ_unmoved + other.differ_unmoved,
            self.elements + other.elements,
            self.elements_differ + other.elements_differ,
            max(self.max_ulp, other.max_ulp),
            max(self.max_row_scaled_ulp, other.max_row_scaled_ulp),
            [a + b for a, b in zip(self.histogram, other.histogram)],
        )


def compare_rows(
    before: Sequence[Sequence[torch.Tensor]], after: Sequence[Sequence[torch.Tensor]], moved: Sequence[bool]
) -> Difference:
    """Compare rows: ``before[k][r]`` is row r of result k in the real call, ``after[k][r]`` in the replay.

    ``moved[r]`` says whether the row's index changed. Raises ShapeChanged when a row's shape or dtype is another.
    """
    found = Difference(rows=len(moved), rows_unmoved=sum(not m for m in moved))
    differs = [False] * len(moved)
    for olds, news in zip(before, after, strict=True):
        for r, (old, new) in enumerate(zip(olds, news, strict=True)):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise ShapeChanged(
                    f"a row's result was {tuple(old.shape)} {old.dtype} and became {tuple(new.shape)} {new.dtype}"
                )
        found.elements += sum(old.numel() for old in olds)
        for r, old, new in _unequal(olds, news):
            differs[r] = True
            _measure(found, old, new)
            found.max_row_scaled_ulp = max(found.max_row_scaled_ulp, scaled(old, new))
    found.rows_differ = sum(differs)
    found.differ_unmoved = sum(d and not m for d, m in zip(differs, moved))
    return found


class ShapeChanged(Exception):
    """A replay gave a result of another shape, so its rows cannot be compared."""


def _unequal(olds: Sequence[torch.Tensor], news: Sequence[torch.Tensor]):
    """The pairs whose bits differ. One comparison for all where the rows have one shape: a device is asked once."""
    if len({o.shape for o in olds}) == 1:
        a = bits(torch.stack([o.detach() for o in olds])).reshape(len(olds), -1)
        b = bits(torch.stack([n.detach() for n in news])).reshape(len(news), -1)
        if torch.equal(a, b):
            return
        rows = (a != b).any(1).nonzero().flatten().tolist()
    else:
        rows = [r for r, (o, n) in enumerate(zip(olds, news)) if not torch.equal(bits(o), bits(n))]
    yield from ((r, olds[r], news[r]) for r in rows)


def _measure(found: Difference, old: torch.Tensor, new: torch.Tensor) -> None:
    old, new = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (old.detach(), new.detach()))
    old, new = old.flatten(), new.flatten()
    unequal = bits(old) != bits(new)
    old, new = old[unequal], new[unequal]
    distance = distances(old, new)
    found.elements_differ += len(distance)
    found.max_ulp = max(found.max_ulp, int(distance.max()))
    digits = torch.where(distance > 0, distance.clamp(min=1).to(torch.float64).log2().floor().to(torch.int64) + 1, 0)
    for bucket, count in zip(*(x.tolist() for x in digits.clamp(max=BUCKETS - 1).unique(return_counts=True))):
        found.histogram[bucket] += count


def scaled(old: torch.Tensor, new: torch.Tensor) -> float:
    """Largest row-scaled ULP of one row, all its elements taken together; 0 for dtypes without fractions."""
    if not old.dtype.is_floating_point:
        return 0.0
    wide = old.dtype if old.dtype.itemsize > 1 else torch.float16
    return float(row_scaled_ulp(old.detach().flatten().to(wide), new.detach().flatten().to(wide)).max())


def distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """ULP distance, int64; for integers and booleans the difference, which counts the values between as well."""
    if a.dtype.is_floating_point and a.dtype.itemsize == 1:
        x, y = (t.view(torch.uint8).to(torch.int64) for t in (a, b))
        x, y = (torch.where(t > 127, 128 - t, t) for t in (x, y))
        return (x - y).abs()
    if a.dtype.is_floating_point:
        return ulp_distance(a, b)
    return (a.to(torch.int64) - b.to(torch.int64)).abs()


def flipped(x: torch.Tensor) -> torch.Tensor:
    """A copy with the lowest bit of its last element flipped: what the comparison must be able to see."""
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    bits(copy).view(-1)[-1] ^= 1
    return copy
