"""What is varied around a row: each axis as a list of replays, each replay as a list of rows that make up its batch.

Every batch is put together from the real call's own rows, by index, so that one mechanism serves all axes: a row
alone, fewer rows, rows twice, rows in another order. Contents and padding also overwrite values, at named positions
of the new batch.
"""

import random
from dataclasses import dataclass, field
from typing import Sequence

import torch

AXES = ("rerun", "contents", "composition", "solo", "position", "padding")

# An axis whose difference is already explained by a narrower one is not variant in its own right: a kernel that mixes
# rows (contents) also differs when a row is alone. `position` is left out here: rows that kept their index are judged
# without it.
EXPLAINED_BY = {
    "rerun": (),
    "contents": ("rerun",),
    "position": ("rerun", "contents"),
    "composition": ("rerun", "contents"),
    "solo": ("rerun", "contents", "composition"),
    "padding": ("rerun", "contents", "composition"),
}


@dataclass(frozen=True)
class Replay:
    """One batch to run: ``index[p]`` is the real call's row at position p; ``watched`` are positions to compare."""

    index: tuple[int, ...]
    watched: tuple[int, ...]
    overwritten: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()
    widened: bool = False

    @property
    def rows(self) -> list[int]:
        return [self.index[p] for p in self.watched]

    @property
    def moved(self) -> list[bool]:
        return [self.index[p] != p for p in self.watched]


@dataclass
class Planner:
    """Makes the replays of each axis for a batch of ``count`` rows, of which ``watched`` are looked at."""

    count: int
    watched: Sequence[int]
    lengths: Sequence[int] | None = None  # a row's size, to find the longest and the shortest
    widen: bool = False  # pad named dimensions instead of adding rows
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def replays(self, axis: str) -> list[Replay]:
        """Replays of an axis; an empty list where the batch allows none (nothing to leave out of a batch of one)."""
        return getattr(self, f"_{axis}")()

    def everything_overwritten(self) -> Replay:
        """The positive control: each row's own values replaced, so that each row's result must change."""
        every = tuple(range(self.count))
        return Replay(every, tuple(self.watched), overwritten=every)

    def _rerun(self) -> list[Replay]:
        return [Replay(tuple(range(self.count)), tuple(self.watched))]

    def _contents(self) -> list[Replay]:
        every = tuple(range(self.count))
        if self.count == 1:
            return []
        return [Replay(every, (i,), overwritten=tuple(j for j in every if j != i)) for i in self.watched]

    def _solo(self) -> list[Replay]:
        return [] if self.count == 1 else [Replay((i,), (0,)) for i in self.watched]

    def _composition(self) -> list[Replay]:
        """Half the batch left out, from either end; the batch twice; every other row replaced by the longest or
        shortest.
        """
        n, every = self.count, tuple(range(self.count))
        batches = [every + every]
        if n >= 3:
            half = (n + 1) // 2
            batches += [every[:half], every[-half:]]
        if n >= 2:
            for mate in self._extremes():
                for parity in (0, 1):
                    batches.append(tuple(i if i % 2 == parity else mate for i in every))
        replays = []
        for index in batches:
            seen, watched = set(), []
            for position, row in enumerate(index):
                stays = row in self.watched and row not in seen and (len(index) != n or position == row)
                if stays:
                    seen.add(row)
                    watched.append(position)
            if watched and index != every:
                replays.append(Replay(index, tuple(watched)))
        return replays

    def _position(self) -> list[Replay]:
        if self.count == 1:
            return []
        every = list(range(self.count))
        shuffled = every[:]
        self.draw.shuffle(shuffled)
        # Turned by one and swapped in pairs: each row changes between odd and even; reversed: between the batch's ends.
        swapped = [row ^ 1 if row ^ 1 < self.count else row for row in every]
        orders = {tuple(every[1:] + every[:1]), tuple(swapped), tuple(every[::-1]), tuple(shuffled)} - {tuple(every)}
        replays = []
        for index in sorted(orders):
            watched = tuple(p for p, row in enumerate(index) if row in self.watched and row != p)
            if watched:
                replays.append(Replay(index, watched))
        return replays

    def _padding(self) -> list[Replay]:
        """Rows added up to the next power of two beyond the batch, as captured batch sizes do; or dimensions
        widened.
        """
        every = tuple(range(self.count))
        if self.widen:
            return [Replay(every, tuple(self.watched), widened=True)]
        size = 1 << self.count.bit_length()
        shortest = self._extremes()[-1]
        index = every + (shortest,) * (size - self.count)
        return [Replay(index, tuple(self.watched), padded=tuple(range(self.count, size)))]

    def _extremes(self) -> list[int]:
        """The longest row and the shortest; without lengths, the last and the first."""
        if self.lengths is None:
            return [self.count - 1, 0]
        order = sorted(range(self.count), key=lambda i: self.lengths[i])
        return [order[-1], order[0]]


def other_values(rows: torch.Tensor) -> torch.Tensor:
    """Values [R, ...] for rows [R, ...] whose contents are to be others: each row's own in another order and size.

    Sizes change by a power of two, so that what is finite stays finite in all but extreme rows; zeros become ones.
    Floating values keep their sign, since scales must stay positive; integers and booleans are only reordered.
    """
    narrow = rows.dtype.is_floating_point and rows.dtype.itemsize < 4
    values = rows.to(torch.float32) if narrow else rows
    values = values.reshape(len(rows), -1).flip(1).roll(1, 1).view(rows.shape)
    if rows.dtype.is_floating_point:
        # Eight-bit floats have no room above, so they shrink.
        values = torch.where(values == 0, 1.0, values * (4.0 if rows.dtype.itemsize > 1 else 0.25))
    return values.to(rows.dtype)
