"""Ways to cut a row that look at the row's own length only, by name. Each is a function from a block count to pieces.

Because nothing else of the batch enters, a row keeps its pieces, and with them its order of additions, whoever its
batchmates are. Where the pieces run is not decided here.
"""

import re
from dataclasses import dataclass

import numpy as np

from ..common import BadInput

KINDS = {
    "never-split": "one piece a row",
    "fixed-count-N": "N pieces of near-equal length (fewer where the row has fewer blocks)",
    "fixed-chunk-N": "pieces of N blocks, each handed to the combine step",
    "free-N": "pieces of N blocks folded left to right, in place where one program does a row's start",
    "free-most-N": "as free, in pieces of the fewest blocks, a power of two, that leave a row N pieces at most",
    "root-length": "as many pieces as the rounded square root of the row's blocks",
    "by-length-A-B-...": "one piece up to A blocks, two up to B, and so on, doubling at each threshold",
}


@dataclass(frozen=True)
class Rule:
    """A named own-length rule. ``folds``: a program may fold neighbouring pieces of a row before the combine step."""

    name: str
    kind: str
    values: tuple[int, ...] = ()

    @property
    def folds(self) -> bool:
        return self.kind in ("free", "free-most")

    @property
    def chunk_blocks(self) -> int:
        """Length of a piece in blocks where the rule fixes one for all rows, else 0."""
        return self.values[0] if self.kind in ("fixed-chunk", "free") else 0

    @property
    def chunked(self) -> bool:
        """Whether a row's pieces are of one length, the last one shorter."""
        return self.kind in ("fixed-chunk", "free", "free-most")

    def chunk(self, blocks):
        """Length of a piece of a row of so many blocks, for a rule that is ``chunked``; integers or arrays."""
        if self.kind != "free-most":
            return self.chunk_blocks
        fewest = np.maximum(-(-np.asarray(blocks) // self.values[0]), 1)
        return 1 << np.ceil(np.log2(fewest)).astype(int)

    def pieces(self, blocks: int) -> int:
        """How many pieces a row of so many blocks has (at least 1)."""
        if self.chunked:
            return int(max(-(-blocks // self.chunk(blocks)), 1))
        if self.kind == "never-split":
            return 1
        if self.kind == "root-length":
            return max(round(blocks**0.5), 1)
        wanted = self.values[0] if self.kind == "fixed-count" else 2 ** sum(blocks > limit for limit in self.values)
        return max(min(wanted, blocks), 1)

    def edge(self, index, blocks, count):
        """Block index at which piece ``index`` of ``count`` begins (or, at ``index + 1``, ends); integers or arrays."""
        return np.minimum(index * self.chunk(blocks), blocks) if self.chunked else index * blocks // count

    def bounds(self, blocks: int) -> list[int]:
        """Block indices at which the row's pieces begin, and its end: rising numbers from 0 to ``blocks``."""
        count = self.pieces(blocks)
        return [int(self.edge(index, blocks, count)) for index in range(count + 1)]


def own_length_rule(name: str) -> Rule:
    """The rule of that name, such as ``never-split``, ``fixed-count-4``, ``fixed-chunk-8``, ``free-4``,
    ``free-most-16``, ``by-length-4-16``.

    Numbers are pieces (fixed-count, free-most) or blocks (the others). Raises BadInput for an unknown name, a zero, or
    by-length thresholds that do not rise.
    """
    found = re.fullmatch(
        r"(never-split|root-length)|(fixed-count|fixed-chunk|free-most|free)-(\d+)|(by-length)((?:-\d+)+)", str(name)
    )
    if not found:
        raise BadInput(f"rule {name!r} is unknown: give one of {', '.join(KINDS)} with numbers for the capitals.")
    plain, counted, number, by_length, limits = found.groups()
    if plain:
        return Rule(name, plain)
    values = (int(number),) if counted else tuple(int(v) for v in limits[1:].split("-"))
    if min(values) < 1 or list(values) != sorted(set(values)):
        raise BadInput(f"rule {name!r} cannot be used: its numbers must be 1 or more and rise from left to right.")
    return Rule(name, counted or by_length, values)
