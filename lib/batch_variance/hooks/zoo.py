"""Toy kernels with one planted fault each: what a probe must find, on that axis and no other, before it is believed
elsewhere.

All compute the same thing: out[i, n] = sum over j < lengths[i] of x[i, j, n], x [B, L, N]. The clean kernel adds in
chunks of fixed size by explicit multiplications and additions of whole tensors, each of which is exact IEEE
arithmetic an element, so its bits cannot depend on the batch. A fault changes the chunk size, or lets in something
from outside the row.
"""

import itertools
from dataclasses import dataclass, field
from typing import Callable

import torch

CHUNK = 16


def chunked_sum(x: torch.Tensor, lengths: torch.Tensor, chunk: int) -> torch.Tensor:
    """Sum of the first ``lengths[i]`` entries along dimension 1: halving trees within chunks, chunks folded left to
    right.
    """
    b, size, n = x.shape
    inside = torch.arange(size)[None, :, None] < lengths.view(-1, 1, 1)
    x = torch.where(inside, x, torch.zeros((), dtype=x.dtype))
    spare = -size % chunk
    if spare:
        x = torch.cat([x, x.new_zeros(b, spare, n)], dim=1)
    parts = x.view(b, -1, chunk, n)
    while parts.shape[2] > 1:
        half = parts.shape[2] // 2
        parts = parts[:, :, :half] + parts[:, :, half:]
    total = parts[:, 0, 0]
    for k in range(1, parts.shape[1]):
        total = total + parts[:, k, 0]
    return total


def clean(x, lengths):
    return chunked_sum(x, lengths, CHUNK)


@dataclass
class CountedOrder:
    """The order of additions comes from a counter outside the call, as atomics' does from the scheduler."""

    calls: itertools.count = field(default_factory=itertools.count)

    def __call__(self, x, lengths):
        return chunked_sum(x, lengths, (8, 16, 32)[next(self.calls) % 3])


def leaks_neighbour(x, lengths):
    """A row reads one value of the row before it."""
    return chunked_sum(x, lengths, CHUNK) + x[:, 0].roll(1, 0) * 0.5**10


def splits_by_total(x, lengths):
    """Split size from the whole batch's total length, as FlashMLA's decode scheduler has it."""
    total = int(lengths.sum())
    return chunked_sum(x, lengths, 4 << total.bit_length() % 3)


def alone_differs(x, lengths):
    """One path for a single row, another for more: a GEMV beside a GEMM."""
    return chunked_sum(x, lengths, 8 if x.shape[0] == 1 else 32)


def tile_by_position(x, lengths):
    """Rows at odd indices fall to a tile that adds in another order."""
    odd = (torch.arange(x.shape[0]) % 2 == 1).view(-1, 1)
    return torch.where(odd, chunked_sum(x, lengths, 8), chunked_sum(x, lengths, 32))


def chunks_by_padding(x, lengths):
    """Chunk size from the padded length, not from the row's own."""
    return chunked_sum(x, lengths, max(4, 1 << (x.shape[1].bit_length() - 3)))


def scale_of_batch(x, lengths):
    """Values rounded to a grid whose step is set by the largest magnitude in the whole batch."""
    inside = torch.arange(x.shape[1])[None, :, None] < lengths.view(-1, 1, 1)
    step = torch.where(inside, x.abs(), 0.0).amax() / 127
    return chunked_sum((x / step).to(torch.int32) * step, lengths, CHUNK)


def reads_tail(x, lengths):
    """Sums up to the next multiple of 8, so entries beyond the row's length get in."""
    return chunked_sum(x, (lengths + 7) // 8 * 8, CHUNK)


@dataclass(frozen=True)
class Planted:
    """A kernel of the zoo: ``make()`` gives a fresh one; ``axis`` is where its fault lies (None: clean; "tail": an
    input check).
    """

    name: str
    axis: str | None
    make: Callable[[], Callable]


ZOO = (
    Planted("clean", None, lambda: clean),
    Planted("counted order", "rerun", CountedOrder),
    Planted("neighbour leaks", "contents", lambda: leaks_neighbour),
    Planted("splits by batch total", "composition", lambda: splits_by_total),
    Planted("other path for one row", "solo", lambda: alone_differs),
    Planted("tile by position", "position", lambda: tile_by_position),
    Planted("chunks by padding", "padding", lambda: chunks_by_padding),
    Planted("batch-wide scale", "contents", lambda: scale_of_batch),
    Planted("tail read", "tail", lambda: reads_tail),
)


def instance(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A random batch: x [B, 64, N] with stale values beyond each length, lengths [B]. B 3 to 8, N 16 or 32, float32
    or float64.

    Lengths stay clear of multiples of 8, so that every row has a tail within its last group of 8, and of 64.
    """
    b = int(torch.randint(3, 9, (), generator=generator))
    n = 16 if torch.rand((), generator=generator) < 0.5 else 32
    dtype = torch.float32 if torch.rand((), generator=generator) < 0.8 else torch.float64
    lengths = torch.randint(5, 8, (b,), generator=generator) * 8 + torch.randint(1, 8, (b,), generator=generator)
    # Drawn in float64: float32 values would add up exactly in float64, in any order.
    return torch.randn(b, 64, n, generator=generator, dtype=torch.float64).to(dtype), lengths.to(torch.int32)
