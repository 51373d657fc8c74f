"""Input checks beside the probe: is what the engine gave the call well formed, before any kernel is blamed?

FlashMLA issue 212 could only speak of arithmetic because its author had shown that the indices, the lengths and the
cache were right. A check looks at one call's arguments (copies, as they were before it ran) and answers with a
``Finding``. Ours are the classes here; a user's is any function of the arguments' dict that returns a Finding or a
bool.

A check says ``ok`` only if it could have failed: each has its occurred proof (two rows at one position, a slot seen
twice, an index beyond the valid length). Without it the verdict is ``inconclusive``.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

import pandas as pd
import torch

from .calls import Call
from .comparing import Difference
from .snapshots import bits


@dataclass(frozen=True)
class Finding:
    """rows looked at, rows that fail, whether the check could have failed on this call, and a sentence on the first
    failure.
    """

    rows: int
    failed: int
    controlled: bool = True
    detail: str = ""


@dataclass(frozen=True)
class CheckContext:
    """What a check is given: the call before it ran, its number and rows, whether the identical call gave the same
    bits, and a way to run it again with changes."""

    call: Call
    number: int
    rows: int
    repeatable: bool
    replay: Callable[[Callable[[Call], Call]], Difference]


def run_check(check: Any, context: CheckContext) -> dict:
    """One record: check, call, rows, failed, controlled, detail. A check that raises says so and decides nothing."""
    name = getattr(check, "name", None) or getattr(check, "__name__", type(check).__name__)
    try:
        found = check.look(context) if hasattr(check, "look") else check(context.call.flat())
        if not isinstance(found, Finding):  # a bool, or what numpy or torch has for one
            found = Finding(context.rows, 0 if bool(found) else context.rows)
    except Exception as error:  # a user's check must not reach the engine
        found = Finding(0, 0, False, f"the check raised {type(error).__name__}: {error}")
    return {
        "check": name,
        "call": context.number,
        "rows": found.rows,
        "failed": found.failed,
        "controlled": found.controlled,
        "detail": found.detail,
    }


def summarise(records: pd.DataFrame) -> pd.DataFrame:
    """The well-formedness table: check, calls, rows, failed, occurred (calls that could have failed), verdict,
    detail.
    """
    columns = ["check", "calls", "rows", "failed", "occurred", "verdict", "detail"]
    if records.empty:
        return pd.DataFrame(columns=columns)
    table = []
    for name, part in records.groupby("check", sort=False):
        failed, occurred = int(part["failed"].sum()), int(part["controlled"].astype(bool).sum())
        verdict = "fails" if failed else "ok" if occurred else "inconclusive"
        details = [detail for detail in part["detail"] if detail]
        table.append(
            [
                name,
                part["call"].nunique(),
                int(part["rows"].sum()),
                failed,
                occurred,
                verdict,
                details[0] if details else "",
            ]
        )
    return pd.DataFrame(table, columns=columns)


@dataclass
class SelectionsAgree:
    """Rows at equal positions of the same request text choose the same indices (the top-k of a sparse-attention
    indexer).

    selection: path of the indices [B, ...]; group: path of what makes two rows comparable [B, ...] (the position), or
    a function of the arguments that gives one hashable key a row. ``normalise(indices, row, arguments)`` may turn
    slots into logical tokens.
    """

    selection: str
    group: str | Callable[[Mapping], list]
    normalise: Callable[[torch.Tensor, int, Mapping], torch.Tensor] | None = None
    name: str = "selections equal at equal positions"

    def look(self, context: CheckContext) -> Finding:
        arguments = context.call.flat()
        chosen = context.call.get(self.selection)
        keys = (
            self.group(arguments)
            if callable(self.group)
            else [tuple(bits(r).flatten().tolist()) for r in context.call.get(self.group)]
        )
        first: dict[Any, torch.Tensor] = {}
        compared = failed = 0
        detail = ""
        for row, key in enumerate(keys):
            mine = chosen[row] if self.normalise is None else self.normalise(chosen[row], row, arguments)
            if key not in first:
                first[key] = mine
                continue
            compared += 1
            if not torch.equal(first[key], mine):
                failed += 1
                detail = (
                    detail or f"call {context.number}: row {row} selects other indices than an earlier row of its group"
                )
        return Finding(compared, failed, compared > 0, detail)


@dataclass
class SlotsStable:
    """The bytes behind cache slots that are fetched again are those fetched before: nothing overwrote a live slot.

    cache: path of the cache, slots along its first ``slot_dims`` dimensions flattened; slots: path of the slot
    numbers fetched (negative: none). ``epoch(arguments)`` names a period in which slots keep their owners; a new
    value forgets the old bytes.
    """

    cache: str
    slots: str
    slot_dims: int = 1
    epoch: Callable[[Mapping], Any] | None = None
    name: str = "bytes behind fetched slots stable"
    _seen: dict = field(default_factory=dict, repr=False)
    _epoch: Any = field(default=None, repr=False)

    def look(self, context: CheckContext) -> Finding:
        epoch = self.epoch(context.call.flat()) if self.epoch else None
        if epoch != self._epoch:
            self._seen, self._epoch = {}, epoch
        cache = context.call.get(self.cache).flatten(0, self.slot_dims - 1)
        slots = context.call.get(self.slots).flatten().unique()
        again = failed = 0
        detail = ""
        for slot in slots[slots >= 0].tolist():
            digest = hashlib.blake2b(bits(cache[slot]).cpu().numpy().tobytes(), digest_size=16).digest()
            if slot in self._seen:
                again += 1
                if self._seen[slot] != digest:
                    failed += 1
                    detail = (
                        detail
                        or f"call {context.number}: slot {slot} holds other bytes than when it was fetched before"
                    )
            self._seen[slot] = digest
        return Finding(again, failed, again > 0, detail)


@dataclass
class LengthsMatch:
    """Each row's valid length is the number of valid indices in it, and those come first.

    lengths: path [B]; indices: path [B, ..., K]; an index below 0 is no entry.
    """

    lengths: str
    indices: str
    name: str = "valid lengths equal the count of valid indices"

    def look(self, context: CheckContext) -> Finding:
        lengths = context.call.get(self.lengths).flatten().to(torch.int64)
        valid = context.call.get(self.indices).reshape(len(lengths), -1) >= 0
        wide = valid.shape[1]
        expected = torch.arange(wide, device=valid.device)[None] < lengths[:, None]
        wrong = (valid != expected).any(1) | (lengths > wide) | (lengths < 0)
        rows = wrong.nonzero().flatten().tolist()
        detail = (
            f"call {context.number}: row {rows[0]} says {int(lengths[rows[0]])} and holds {int(valid[rows[0]].sum())} valid indices"
            if rows
            else ""
        )
        # Full rows alone could not tell a length that is always the width from one that is right.
        return Finding(len(lengths), len(rows), bool((~valid).any()) or bool(rows), detail)


@dataclass
class TailUnread:
    """What lies beyond each row's valid length is not read: poisoned with NaN, and with a large number, no bit changes.

    argument: path of a floating tensor [B, ..., L, ...]; lengths: path [B] of valid entries along ``dim``. Its
    negative control is the identical call; its positive control poisons the last valid entry, which must.
    """

    argument: str
    lengths: str
    dim: int = 1
    name: str = "uninitialised tails not read"

    def look(self, context: CheckContext) -> Finding:
        lengths = [int(n) for n in context.call.get(self.lengths)]
        size = context.call.get(self.argument).shape[self.dim]
        rows = sum(n < size for n in lengths)
        if not rows:
            return Finding(0, 0, False, "no row has a tail")
        if not context.repeatable:
            return Finding(rows, 0, False, "the identical call already gives other bits")
        control = context.replay(lambda call: self._poisoned(call, torch.nan, [(max(n - 1, 0), n) for n in lengths]))
        tails = [(n, size) for n in lengths]
        read = [
            context.replay(lambda call, value=value: self._poisoned(call, value, tails)) for value in (torch.nan, 1e4)
        ]
        failed = max(difference.rows_differ for difference in read)
        detail = (
            f"call {context.number}: {failed} rows change when the entries beyond their length do" if failed else ""
        )
        return Finding(rows, failed, control.rows_differ > 0, detail)

    def _poisoned(self, call: Call, value: float, ranges: list[tuple[int, int]]) -> Call:
        poisoned = call.get(self.argument).clone(memory_format=torch.preserve_format)
        for row, (start, end) in enumerate(ranges):
            if end > start:
                poisoned[row].narrow(self.dim % poisoned.dim() - 1, start, end - start).fill_(value)
        return call.replace({self.argument: poisoned})


@dataclass
class ScalesPerRow:
    """No scale is computed over rows that merely share the batch.

    A scale with one value for several rows is fine while it is a constant of the model. It fails when its bits change
    from call to call: then it depends on what is in the batch, and removing a batchmate changes a row's rounding.

    scale: path of the scale; of: path of the tensor whose rows it scales, rows in its first dimension.
    """

    scale: str
    of: str
    name: str = "scales do not span co-batched rows"
    _first: bytes | None = field(default=None, repr=False)
    _calls: int = field(default=0, repr=False)

    def look(self, context: CheckContext) -> Finding:
        scale, rows = context.call.get(self.scale), context.call.get(self.of).shape[0]
        if rows == 1 or (scale.dim() and scale.shape[0] == rows):
            return Finding(rows, 0, rows > 1, "")
        found = bits(scale).cpu().numpy().tobytes()
        self._calls += 1
        if self._first is None:
            self._first = found
        changed = found != self._first
        detail = (
            f"call {context.number}: one scale spans {rows} rows and is not the one of an earlier call"
            if changed
            else ""
        )
        return Finding(rows, rows if changed else 0, self._calls > 1, detail)
