"""Own-length rules written in FlashMLA's own schedule format, as one or several kernel calls.

The format allows a part to finish one row's last piece, then do whole rows, then begin another row's first piece; a
middle piece needs a part to itself. The split buffer of a call holds its rows plus its parts. Where a batch needs
more, it is served in several calls: rows are independent, so that changes no bits.
"""

from dataclasses import dataclass
from typing import Sequence

from ..common import BadInput
from .flashmla import BLOCK_SIZE, FIXED_OVERHEAD_BLOCKS, Part, at_least, whole_numbers
from .plan import block_counts
from .rules import Rule, own_length_rule


@dataclass(frozen=True)
class FlashMLACall:
    """One call's share: rows ``first_row`` to ``end_row`` (exclusive), numbered from 0 inside the call."""

    first_row: int
    end_row: int
    parts: list[Part]
    num_splits: list[int]


def flashmla_calls(
    rule: Rule | str,
    lengths: Sequence[int],
    num_sm_parts: int,
    block_size: int = BLOCK_SIZE,
    overhead_blocks: int = FIXED_OVERHEAD_BLOCKS,
) -> list[FlashMLACall]:
    """Schedules that make the unmodified FlashMLA cut every row by the own-length rule.

    lengths: tokens a row as FlashMLA plans on them (``decode_lengths``), each at least 1. Rows are spread over as few
    calls as the parts and the split buffer allow, evenly. Raises BadInput as ``flashmla_schedule`` does, for an empty
    row, and for a row that needs more pieces than there are parts.
    """
    rule = own_length_rule(rule) if isinstance(rule, str) else rule
    tokens = whole_numbers(lengths, "lengths")
    parts = at_least(num_sm_parts, 1, "num_sm_parts")
    blocks = block_counts(tokens, at_least(block_size, 1, "block_size"))
    if 0 in blocks:
        raise BadInput(f"lengths[{blocks.index(0)}] is 0: FlashMLA's sparse decode plans an empty row as one token.")
    bounds = [rule.bounds(n) for n in blocks]
    most = max(len(edges) - 1 for edges in bounds)
    if most > parts:
        raise BadInput(
            f"rule {rule.name} cuts a row into {most} pieces, more than the {parts} SM parts that a call has."
        )
    middles = [max(len(edges) - 2, 0) for edges in bounds]  # parts, and buffer places, that a row adds to a call
    calls = _shares(middles, parts - 1)
    return [_call(first, end, bounds[first:end], parts, overhead_blocks) for first, end in calls]


def _shares(weights: list[int], room: int) -> list[tuple[int, int]]:
    """Cut rows into the fewest runs whose weights fit ``room``, then even the runs out."""

    def runs(limit):
        found, first, held = [], 0, 0
        for row, weight in enumerate(weights):
            if held + weight > limit:
                found.append((first, row))
                first, held = row, 0
            held += weight
        return found + [(first, len(weights))]

    fewest = len(runs(room))
    low, high = max(weights), room
    while low < high:
        middle = (low + high) // 2
        if len(runs(middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    return runs(low)


def _call(first_row: int, end_row: int, bounds: list[list[int]], parts: int, overhead: int) -> FlashMLACall:
    """Fill parts up to the smallest quota with which the rows fit, searched upwards from the least conceivable."""
    costs = [[b - a + overhead for a, b in zip(edges, edges[1:])] for edges in bounds]
    low = max(max(map(max, costs)), -(-sum(map(sum, costs)) // parts))
    high, step = low, 1
    while _parts_needed(costs, high) > parts:
        low, high, step = high + 1, high + step, 2 * step
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(costs, middle) > parts:
            low = middle + 1
        else:
            high = middle
    filled = _fill(bounds, high, overhead)
    batch = len(bounds)
    idle = Part(batch, batch - 1, 0, bounds[-1][-1], 0, 0, 0)
    num_splits = [0]
    for edges in bounds:
        num_splits.append(num_splits[-1] + len(edges) - 1)
    return FlashMLACall(first_row, end_row, filled + [idle] * (parts - len(filled)), num_splits)


def _parts_needed(costs: list[list[int]], quota: int) -> int:
    """How many parts ``_fill`` would use, without building them."""
    count, left = 0, -1
    for pieces in costs:
        if pieces[0] <= left:
            left -= pieces[0]
        else:
            count, left = count + 1, quota - pieces[0]
        if len(pieces) > 1:
            count, left = count + len(pieces) - 1, quota - pieces[-1]
    return count


def _fill(bounds: list[list[int]], quota: int, overhead: int) -> list[Part]:
    """Give pieces to parts in order; a part closes when its quota is full or the format lets nothing follow."""
    found: list[list[tuple[int, int]]] = []
    open_for_more = False
    spent = 0
    for row, edges in enumerate(bounds):
        last = len(edges) - 2
        for piece in range(last + 1):
            cost = edges[piece + 1] - edges[piece] + overhead
            if not (open_for_more and piece == 0 and spent + cost <= quota):
                found.append([])
                spent = 0
            found[-1].append((row, piece))
            spent += cost
            open_for_more = piece == last  # only after a row's end may another row begin in the same part
    parts = []
    for items in found:
        (row, piece), (end_row, end_piece) = items[0], items[-1]
        first = int(len(bounds[row]) > 2)
        last = int(len(bounds[end_row]) > 2)
        parts.append(Part(row, end_row, bounds[row][piece], bounds[end_row][end_piece + 1], piece, first, last))
    return parts
