"""Work plans for a split-KV decode kernel: segments of rows, given to programs, with places for partial results.

A plan says everything a kernel needs that is not data: which program reads which blocks of which row, in what pieces,
and which partials the combine step folds. Both FlashMLA's batch-wide schedule and the own-length rules become plans,
so that one kernel runs them all and a difference in bits can only come from the cutting.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple, Sequence

import numpy as np

from ..common import BadInput
from .flashmla import BLOCK_SIZE, FIXED_OVERHEAD_BLOCKS, FlashMLASchedule, at_least, flashmla_schedule, whole_numbers
from .rules import Rule, own_length_rule

BATCH_WIDE = "flashmla"
ROW_OVERHEAD_BLOCKS = 3  # what another row costs a program of the Triton kernel, in blocks: the best of 0, 1, 3, 5 measured


class Segment(NamedTuple):
    """A run of blocks of one row, done by one program. ``slot`` is where its first partial goes, -1 where the segment
    is the whole row. A segment that starts the row folds its pieces into that one slot; a later one fills one slot
    a piece."""

    row: int
    begin_block: int
    end_block: int
    slot: int


@dataclass(frozen=True)
class Plan:
    """A decode step's work. All arrays are int32.

    rule: the rule's name; lengths: tokens a row; block_size: tokens a block; chunks: ``[batch]`` blocks a piece of
    the row, 0 where every segment is one piece; segments: ``[n, 4]`` (row, begin_block, end_block, slot), grouped by
    program; program_starts: ``[programs + 1]`` offsets into segments; slot_starts: ``[batch + 1]`` prefix sums of partials
    a row, a row that one program finishes alone having none; pieces: ``[batch]`` pieces of the row's reduction tree;
    spread: whether a segment that starts its row also fills one slot a piece, nothing being folded in place.
    """

    rule: str
    lengths: np.ndarray
    block_size: int
    chunks: np.ndarray
    segments: np.ndarray
    program_starts: np.ndarray
    slot_starts: np.ndarray
    pieces: np.ndarray
    spread: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def programs(self) -> int:
        return len(self.program_starts) - 1

    @property
    def num_slots(self) -> int:
        return int(self.slot_starts[-1])

    @property
    def folds(self) -> bool:
        """Whether a program folds neighbouring pieces of a row's start in place."""
        return bool(self.chunks[0])

    def segments_of(self, row: int) -> list[Segment]:
        """The row's segments from left to right."""
        mine = self.segments[self.segments[:, 0] == row]
        return [Segment(*map(int, s)) for s in mine[np.argsort(mine[:, 1], kind="stable")]]

    def bounds_of(self, row: int) -> list[int]:
        """Block indices at which the pieces of the row's reduction tree begin, and the row's end."""
        step = int(self.chunks[row])
        found = {0}
        for _, begin, end, _ in self.segments_of(row):
            found.update(range(begin, end, step) if step else (begin,))
            found.add(end)
        return sorted(found)


def block_counts(lengths: Sequence[int], block_size: int) -> list[int]:
    """Blocks that each length fills; an empty row has none."""
    return [-(-length // block_size) for length in lengths]


def plan_from_schedule(schedule: FlashMLASchedule) -> Plan:
    """FlashMLA's schedule as a plan: each part a program, each split a piece."""
    blocks = block_counts(schedule.lengths, schedule.block_size)
    counts = schedule.splits_per_row
    slots = np.cumsum([0] + [n if n > 1 else 0 for n in counts])
    segments, starts = [], [0]
    for part in schedule.parts:
        for row in range(part.begin_req_idx, min(part.end_req_idx, len(blocks) - 1) + 1):
            first, last = row == part.begin_req_idx, row == part.end_req_idx
            begin = part.begin_block_idx if first else 0
            end = part.end_block_idx if last else blocks[row]
            slot = int(slots[row]) + (part.begin_split_idx if first else 0) if counts[row] > 1 else -1
            segments.append((row, begin, end, slot))
        starts.append(len(segments))
    return _plan(BATCH_WIDE, schedule.lengths, schedule.block_size, 0, segments, starts, slots, counts)


def plan_by_rule(
    rule: Rule | str,
    lengths: Sequence[int],
    num_programs: int,
    block_size: int = BLOCK_SIZE,
    overhead_blocks: int = ROW_OVERHEAD_BLOCKS,
) -> Plan:
    """Cut each row by an own-length rule and balance the pieces over programs.

    The pieces of all rows stand in one line, each costing its blocks, plus ``overhead_blocks`` where a program has to
    start it afresh after another; the line is cut into at most ``num_programs`` stretches, the costliest of which costs
    as little as can be. That balance looks at the whole batch, as it may: it decides where pieces run, never how a row
    is cut. Raises BadInput as ``flashmla_schedule`` does.
    """
    rule = own_length_rule(rule) if isinstance(rule, str) else rule
    tokens = whole_numbers(lengths, "lengths")
    programs = at_least(num_programs, 1, "num_programs")
    size = at_least(block_size, 1, "block_size")
    overhead = at_least(overhead_blocks, 0, "overhead_blocks")
    blocks = block_counts(tokens, size)
    counts = np.asarray([rule.pieces(n) for n in blocks])
    row_of = np.repeat(np.arange(len(tokens)), counts)
    index = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]
    begin, end = (rule.edge(i, np.asarray(blocks)[row_of], counts[row_of]) for i in (index, index + 1))
    fresh = np.ones(len(row_of)) if not rule.folds else np.diff(row_of, prepend=-1) > 0
    program = _stretches(end - begin, overhead * np.asarray(fresh, dtype=int), programs)

    joined = np.ones(len(row_of), bool)
    if rule.folds:
        joined[1:] = (np.diff(row_of) != 0) | (np.diff(program) != 0)
    heads = np.flatnonzero(joined)
    tails = np.append(heads[1:], len(row_of)) - 1
    row, seg_begin, seg_end = row_of[heads], begin[heads], end[tails]
    places = np.where(seg_begin == 0, 1, tails - heads + 1)  # partials that the segment leaves
    whole = (seg_begin == 0) & (seg_end == np.asarray(blocks)[row])
    places = np.where(whole, 0, places)
    slots = np.cumsum(places) - places
    slot_starts = np.concatenate([[0], np.cumsum(np.bincount(row, places, len(tokens)))])
    segments = np.stack([row, seg_begin, seg_end, np.where(whole, -1, slots)], axis=1)
    starts = np.searchsorted(program[heads], np.arange(programs + 1))
    chunks = rule.chunk(np.asarray(blocks)) if rule.folds else 0
    return _plan(rule.name, tokens, size, chunks, segments, starts, slot_starts, counts)


def _stretches(blocks: np.ndarray, fresh: np.ndarray, programs: int) -> np.ndarray:
    """The program of each piece. blocks: its cost; fresh: what it costs more unless its program begins with it."""
    if not len(blocks):
        return np.zeros(0, dtype=int)
    ends = np.cumsum(blocks + fresh)
    line = ends.tolist()  # a number at a time is found faster in a list

    def starts(limit: int) -> list[int] | None:
        found, at, spent = [], 0, 0
        while at < len(line):
            if len(found) == programs:
                return None
            found.append(at)
            at = bisect_right(line, spent + int(fresh[at]) + limit, at)
            spent = line[at - 1]
        return found

    low = max(int(blocks.max()), -(-int(ends[-1] - fresh.sum()) // programs), 1)
    high = max(low, -(-int(ends[-1]) // programs) + int((blocks + fresh).max()))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if starts(middle) else (middle + 1, high)
    found = starts(low)
    return np.repeat(np.arange(len(found)), np.diff(found, append=len(ends)))


def make_plan(
    rule: str,
    lengths: Sequence[int],
    num_programs: int,
    block_size: int = BLOCK_SIZE,
    overhead_blocks: int | None = None,
) -> Plan:
    """The plan of a rule by name: ``flashmla`` for the batch-wide schedule, or an own-length rule. overhead_blocks: the
    schedule's own where None."""
    if rule == BATCH_WIDE:
        overhead = FIXED_OVERHEAD_BLOCKS if overhead_blocks is None else overhead_blocks
        return plan_from_schedule(flashmla_schedule(lengths, num_programs, block_size, overhead))
    overhead = ROW_OVERHEAD_BLOCKS if overhead_blocks is None else overhead_blocks
    return plan_by_rule(rule, lengths, num_programs, block_size, overhead)


def plan_room(rule: str, batch: int, longest: int, num_programs: int, block_size: int = BLOCK_SIZE) -> tuple[int, int]:
    """(segments, slots) that no plan of a rule exceeds for ``batch`` rows of at most ``longest`` tokens."""
    if rule == BATCH_WIDE:  # a part begins with a cut at most
        return batch + num_programs, batch + num_programs
    own = own_length_rule(rule)
    most = max(own.pieces(blocks) for blocks in range(-(-longest // block_size) + 1))
    pieces = batch * most
    return min(pieces, batch + num_programs) if own.folds else pieces, pieces if most > 1 else 0


def spread(plan: Plan) -> Plan:
    """The same segments with a slot for every piece of a row of several, for kernels that cannot fold in place: the same
    tree, all of it folded by the combine step. Plans of rules that do not fold in place are that already."""
    if not plan.folds or plan.spread:
        return plan
    row, begin, end, _ = plan.segments.T
    places = np.where(plan.pieces[row] > 1, -(-(end - begin) // plan.chunks[row]), 0)
    order = np.lexsort((begin, row))
    slots = np.empty_like(places)
    slots[order] = np.cumsum(places[order]) - places[order]
    segments = np.stack([row, begin, end, np.where(places > 0, slots, -1)], axis=1).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(np.bincount(row, places, plan.batch))]).astype(np.int32)
    return replace(plan, segments=np.ascontiguousarray(segments), slot_starts=starts, spread=True)


def one_program_a_row(plan: Plan) -> Plan:
    """The same rows and pieces, each row done from left to right by a program of its own.

    Only for rules whose pieces fold in place. The extreme schedule to compare any other with, bit for bit.
    """
    if not plan.folds:
        raise BadInput(f"rule {plan.rule!r} does not fold in place: only a free rule can run a row in one program.")
    rows = range(plan.batch)
    segments = [(row, 0, n, -1) for row, n in zip(rows, block_counts(plan.lengths, plan.block_size))]
    return _plan(
        plan.rule,
        plan.lengths,
        plan.block_size,
        plan.chunks,
        segments,
        range(plan.batch + 1),
        [0] * (plan.batch + 1),
        plan.pieces,
    )


def _plan(rule, lengths, size, chunks, segments, starts, slots, pieces) -> Plan:
    rows, work, starts, slots, pieces = (
        np.asarray(v, dtype=np.int32) for v in (lengths, segments, starts, slots, pieces)
    )
    chunks = np.array(np.broadcast_to(chunks, len(rows)), dtype=np.int32)
    return Plan(rule, rows, size, chunks, np.ascontiguousarray(work.reshape(-1, 4)), starts, slots, pieces)
