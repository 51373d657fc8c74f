"""FlashMLA's decode schedule as plain integers: which SM part works on which blocks of which row.

Knows how FlashMLA (``get_decoding_sched_meta``) turns the whole batch's lengths into parts and split counts. Leaves
what a split does to a row's bits to the kernels, and other ways of cutting to ``rules`` and ``plan``.
"""

from dataclasses import dataclass
from typing import Iterable, NamedTuple, Sequence

from ..common import BadInput

BLOCK_SIZE = 64
FIXED_OVERHEAD_BLOCKS = 5
H200_SMS = 132


class Part(NamedTuple):
    """What one SM part does: rows ``begin_req_idx`` to ``end_req_idx`` (inclusive), in blocks of the KV cache.

    ``begin_block_idx`` (inclusive) counts in the first row, ``end_block_idx`` (exclusive) in the last. The two flags
    say that the first or last row is shared with another part, so that its result goes through the combine step.
    A part whose ``begin_req_idx`` equals the batch size is idle.
    """

    begin_req_idx: int
    end_req_idx: int
    begin_block_idx: int
    end_block_idx: int
    begin_split_idx: int
    is_first_req_splitted: int
    is_last_req_splitted: int


@dataclass(frozen=True)
class FlashMLASchedule:
    """FlashMLA's plan for one decode step. ``num_splits`` are prefix sums over rows, so row ``i`` has
    ``num_splits[i + 1] - num_splits[i]`` splits; ``payload`` is the block quota of one part."""

    lengths: tuple[int, ...]
    block_size: int
    fixed_overhead_blocks: int
    payload: int
    num_splits: list[int]
    parts: list[Part]

    @property
    def splits_per_row(self) -> list[int]:
        return [after - before for before, after in zip(self.num_splits, self.num_splits[1:])]


def whole_numbers(values: Sequence[int], name: str) -> list[int]:
    """The values as Python integers. Raises BadInput for an empty list, a negative value or one that is not whole."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    values = list(values) if isinstance(values, Iterable) else []
    if not values:
        raise BadInput(f"{name} is empty: give one whole number for each row of the batch.")
    for row, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
            raise BadInput(f"{name}[{row}] is {value!r}: a length is a whole number of tokens, 0 or more.")
    return [int(value) for value in values]


def at_least(value: int, lowest: int, name: str) -> int:
    """A whole number of at least ``lowest``, or BadInput."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < lowest:
        raise BadInput(f"{name} is {value!r}: give a whole number of {lowest} or more.")
    return int(value)


def num_sm_parts(num_heads: int, s_q: int = 1, num_sms: int = H200_SMS) -> int:
    """Parts that FlashMLA's sparse decode plans for on Hopper: one CTA serves 64 heads of one query position."""
    return max(num_sms // s_q // max(num_heads // 64, 1), 1)


def decode_lengths(
    topk: int,
    topk_length: Sequence[int] | None,
    extra_topk: int = 0,
    extra_topk_length: Sequence[int] | None = None,
    block_size: int = BLOCK_SIZE,
    batch: int | None = None,
) -> list[int]:
    """Lengths in tokens that FlashMLA's sparse decode plans on, one a row.

    topk: width of the index table; topk_length: valid leading indices a row, or None for ``topk`` in every row (then
    ``batch`` or ``extra_topk_length`` says how many rows). A zero counts as one token, so that the main loop is never
    empty. With a second cache (``extra_topk`` above 0) the first part is rounded up to whole blocks and the second
    part's length is added. Raises BadInput for lengths that are negative, too long or of different batch sizes.
    """
    topk = at_least(topk, 1, "topk")
    extra_topk = at_least(extra_topk, 0, "extra_topk")
    block_size = at_least(block_size, 1, "block_size")
    if extra_topk_length is not None and extra_topk == 0:
        raise BadInput("extra_topk_length was given without extra_topk: there is no second cache to count in.")
    rows = [
        whole_numbers(v, n)
        for v, n in ((topk_length, "topk_length"), (extra_topk_length, "extra_topk_length"))
        if v is not None
    ]
    sizes = {len(r) for r in rows} | ({at_least(batch, 1, "batch")} if batch is not None else set())
    if len(sizes) != 1:
        said = f"{sorted(sizes)} rows" if sizes else "no batch size"
        raise BadInput(f"topk_length, extra_topk_length and batch say {said}: they must agree on one batch size.")
    size = sizes.pop()
    first = whole_numbers(topk_length, "topk_length") if topk_length is not None else [topk] * size
    second = (
        whole_numbers(extra_topk_length, "extra_topk_length") if extra_topk_length is not None else [extra_topk] * size
    )
    for name, values, most in (("topk_length", first, topk), ("extra_topk_length", second, extra_topk)):
        if max(values) > most:
            raise BadInput(f"{name} holds {max(values)}, more than the {most} indices that a row has.")
    lengths = [max(value, 1) for value in first]
    if extra_topk:
        lengths = [-(-value // block_size) * block_size + more for value, more in zip(lengths, second)]
    return lengths


def flashmla_schedule(
    lengths: Sequence[int],
    num_sm_parts: int = H200_SMS,
    block_size: int = BLOCK_SIZE,
    fixed_overhead_blocks: int = FIXED_OVERHEAD_BLOCKS,
) -> FlashMLASchedule:
    """Plan a decode step as FlashMLA does.

    lengths: tokens in each row's KV cache (for sparse decode, see ``decode_lengths``); num_sm_parts: parts to fill;
    block_size: tokens in a block; fixed_overhead_blocks: what starting a row costs, in blocks.
    The quota of a part is the batch's block total over the parts, plus one overhead. Parts are filled row after row,
    and a row that does not fit is cut where the quota ends: hence a row's split count depends on all other rows.
    Method: FlashMLA's ``get_decoding_sched_meta`` (MIT licence), reproduced from its behaviour on an NVIDIA H200,
    the fields of idle parts included. Raises BadInput for an empty batch, a negative length, or counts below 1.
    """
    tokens = whole_numbers(lengths, "lengths")
    parts_wanted = at_least(num_sm_parts, 1, "num_sm_parts")
    size = at_least(block_size, 1, "block_size")
    overhead = at_least(fixed_overhead_blocks, 0, "fixed_overhead_blocks")
    batch = len(tokens)
    blocks = [max((value - 1) // size, 0) + 1 for value in tokens]  # an empty row still occupies one block of the plan
    payload = -(-(sum(blocks) + batch * overhead) // parts_wanted) + overhead

    num_splits = [0] * (batch + 1)
    parts = []
    row = block = split = 0
    for _ in range(parts_wanted):
        begin_row, begin_block, begin_split = row, block, split
        first = int(block != 0)
        if row == batch:
            begin_block = blocks[0] - 1  # the kernel reads one past its table here; the value is never used
        remain = payload
        while row < batch:
            cost = blocks[row] - block + overhead
            if remain >= cost:
                num_splits[row + 1] = num_splits[row] + split + 1
                remain -= cost
                row += 1
                block = split = 0
                continue
            if remain > overhead:
                block += remain - overhead
                split += 1
            break
        end_row = row if block else row - 1
        end_block = block if block else (blocks[end_row] if tokens[end_row] else 0)
        last = int(end_block != blocks[end_row] and tokens[end_row] != 0)
        if begin_row == end_row:
            first = last = int(first or last)
        parts.append(Part(begin_row, end_row, begin_block, end_block, begin_split, first, last))
    return FlashMLASchedule(tuple(tokens), size, overhead, payload, num_splits, parts)
