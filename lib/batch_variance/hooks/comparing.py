"""What one replay says about the rows it was to keep: rows and elements whose bits differ, and by how much.

Distances follow numerics: ULP for floating dtypes, the difference itself for integers (the number of values between),
and row-scaled ULP over all of a row's elements. Bits decide; distances describe. +0 and -0 differ in bits at ULP
distance 0.
"""

from dataclasses import dataclass, field
from typing import Sequence

import torch

from ..numerics import row_scaled_ulp, ulp_distance
from .snapshots import Questions, bits, other_bits, values_of

BUCKETS = 65  # ULP histogram: bucket k counts differing elements whose ULP distance has k binary digits
AT_ONCE = 2**24  # bytes of rows that a comparison may keep until it is read, and that are measured on the host


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
            [a + b for a, b in zip(self.histogram, other.histogram)] if other.elements_differ else list(self.histogram),
        )


class ShapeChanged(Exception):
    """A replay gave a result of another shape, so its rows cannot be compared."""


class Comparison:
    """One replay's rows beside the real call's: which differ is asked at once, and read when it is wanted.

    before, after, moved: as for ``compare_rows``. The replay's rows are copied, since its result may lie in a buffer
    that the next replay writes over; rows of more than ``AT_ONCE`` bytes are measured at once and let go.
    Raises ShapeChanged when a row's shape or dtype is another.
    """

    def __init__(
        self,
        before: Sequence[Sequence[torch.Tensor]],
        after: Sequence[Sequence[torch.Tensor]],
        moved: Sequence[bool],
        questions: Questions,
    ):
        size = 0
        self._moved, self._questions, self._rows, self._numbers = moved, questions, [], []
        for olds, news in zip(before, after, strict=True):
            for old, new in zip(olds, news, strict=True):
                if old.shape != new.shape or old.dtype != new.dtype:
                    raise ShapeChanged(
                        f"a row's result was {tuple(old.shape)} {old.dtype} and became {tuple(new.shape)} {new.dtype}"
                    )
                size += old.nbytes
            news = _copied(news)
            self._rows.append((olds, news))
            self._numbers.append(questions.ask(_unequal(olds, news)))
        self._elements = sum([row.numel() for olds, _ in self._rows for row in olds])
        self._found: Difference | None = None
        if size > AT_ONCE:
            self.difference()

    def differing(self) -> list[bool]:
        """Which rows differ in any result."""
        answers = [self._questions.answer(number) for number in self._numbers]
        if len(answers) == 1:
            return answers[0]
        return [any(row) for row in zip(*answers)] if answers else [False] * len(self._moved)

    def difference(self) -> Difference:
        if self._found is None:
            differing = self.differing()
            found = Difference(
                rows=len(differing),
                rows_unmoved=len(differing) - sum(self._moved),
                elements=self._elements,
            )
            if any(differing):
                found.rows_differ = sum(differing)
                found.differ_unmoved = sum(d and not m for d, m in zip(differing, self._moved))
                for (olds, news), number in zip(self._rows, self._numbers):
                    for r, differs in enumerate(self._questions.answer(number)):
                        if differs:
                            _measure(found, olds[r], news[r])
            self._found, self._rows = found, []
        return self._found


def compare_rows(
    before: Sequence[Sequence[torch.Tensor]], after: Sequence[Sequence[torch.Tensor]], moved: Sequence[bool]
) -> Difference:
    """Compare rows: ``before[k][r]`` is row r of result k in the real call, ``after[k][r]`` in the replay.

    ``moved[r]`` says whether the row's index changed. Raises ShapeChanged when a row's shape or dtype is another.
    """
    return Comparison(before, after, moved, Questions()).difference()


def _copied(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A copy of the rows, in one tensor where they are several of one shape."""
    if _one(rows):
        return [values_of(rows[0]).clone()] * len(rows)
    if len({row.shape for row in rows}) == 1:
        return torch.stack([values_of(row) for row in rows])
    return [values_of(row).clone() for row in rows]


def _one(rows: Sequence[torch.Tensor]) -> bool:
    """Whether it is the same tensor for all: a single row, or what belongs to no row in particular."""
    return len(rows) == 1 or all(row is rows[0] for row in rows)


def _unequal(olds: Sequence[torch.Tensor], news: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which rows' bits differ, bool [rows] on their device ([] for a single row)."""
    if _one(olds):
        found = other_bits(olds[0], news[0])
        return found if len(olds) == 1 else found.expand(len(olds))
    if isinstance(news, torch.Tensor):
        olds = torch.stack([values_of(old) for old in olds])
        return (bits(olds) != bits(news)).reshape(len(olds), -1).any(1)
    return torch.stack([other_bits(old, new) for old, new in zip(olds, news)])


def _measure(found: Difference, old: torch.Tensor, new: torch.Tensor) -> None:
    if old.nbytes <= AT_ONCE:
        # Every step below would wait for the device; brought here, all of them together wait for two copies.
        old, new = old.cpu(), new.cpu()
    found.max_row_scaled_ulp = max(found.max_row_scaled_ulp, scaled(old, new))
    old, new = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (old.detach(), new.detach()))
    old, new = old.flatten(), new.flatten()
    unequal = bits(old) != bits(new)
    distance = distances(old[unequal], new[unequal])
    found.elements_differ += len(distance)
    found.max_ulp = max(found.max_ulp, int(distance.max()))
    # d = m * 2**k with m in [0.5, 1), so that k is the number of d's binary digits; 0 has k = 0.
    digits = torch.frexp(distance.to(torch.float64)).exponent.clamp(max=BUCKETS - 1)
    counts = torch.bincount(digits, minlength=BUCKETS).tolist()
    found.histogram = [a + b for a, b in zip(found.histogram, counts)]


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
