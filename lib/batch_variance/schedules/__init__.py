"""Split plans as plain integers: FlashMLA's batch-wide schedule, and rules that look at a row's own length only."""

from .flashmla import FlashMLASchedule, Part, decode_lengths, flashmla_schedule, num_sm_parts
from .flashmla_calls import FlashMLACall, flashmla_calls
from .plan import (
    BATCH_WIDE,
    Plan,
    Segment,
    make_plan,
    one_program_a_row,
    plan_by_rule,
    plan_from_schedule,
    plan_room,
    spread,
)
from .rules import KINDS, Rule, own_length_rule

__all__ = [
    "BATCH_WIDE",
    "FlashMLACall",
    "FlashMLASchedule",
    "KINDS",
    "Part",
    "Plan",
    "Rule",
    "Segment",
    "decode_lengths",
    "flashmla_calls",
    "flashmla_schedule",
    "make_plan",
    "num_sm_parts",
    "one_program_a_row",
    "own_length_rule",
    "plan_by_rule",
    "plan_from_schedule",
    "plan_room",
    "spread",
]
