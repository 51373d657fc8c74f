"""Which operations of a model depend on the batch, which of them bring a difference in, and at which batch sizes.

Every operation that torch dispatches is seen (TorchDispatchMode), with the module it ran in. A row is run alone and
its inputs and outputs are kept; then batches that hold it are run, and at each operation the row's part is compared,
bit by bit.

An operation *introduces* a difference if, given for the row exactly what it had alone, within the batch, it returns
other bits. Where its inputs in the batch already differ, the inputs it had alone are put in and the operation is run
once more; if the difference is then gone it was only *propagated*. This tells correlation from cause one operation at
a time.

What a batch makes of one row for all (``x + x[:1]``) is part of the operation that reads it: it is not put in anew.
Where the batch runs other operations than the row alone, or its entries cannot be told apart, nothing is compared, and
that is said.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Callable, Iterable, Sequence

import pandas as pd
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..common import BadInput
from .comparing import Difference, compare_rows, flipped
from .dispatched import Recorder, copied, run_again, tensors
from .parts import Place, Unaligned, carried, place_of
from .snapshots import same_bits
from .subjects import CausalSubject, Subject

AUDIT_AXES = ("rerun", "contents", "composition", "position", "solo")
SIZES = (1, 2, 3, 4, 8, 16, 32, 64)
_MOVES_ONLY = "aten.clone.default"  # it makes no bits


@dataclass
class Seen:
    """One operation of the run alone: its name, module and tensors in order, for each watched row."""

    phase: str
    op: str
    module: str
    function: Callable
    leaves: list[list[Any]]  # a watched row's flattened arguments
    spec: Any
    outputs: list[list[torch.Tensor]]
    places: list[Place | None] = field(default_factory=list)  # where an argument of a batch holds the rows
    out_places: list[Place | None] = field(default_factory=list)
    base: list[list[torch.Tensor]] | None = None  # the rows' outputs in the base batch

    @property
    def key(self) -> tuple[str, str, str]:
        return self.phase, self.module, self.op


@dataclass
class OperationRecord:
    """What all runs say of one operation. ``varies`` maps an axis to whether any watched row's output bits changed."""

    index: int
    phase: str
    op: str
    module: str
    varies: dict[str, bool] = field(default_factory=dict)
    inputs_differ: bool = False
    introduces: bool = False
    carries: bool = False
    spans_batch: bool = False
    max_ulp_in: int = 0
    max_ulp_out: int = 0
    max_ulp_introduced: int = 0
    max_scaled_in: float = 0.0
    max_scaled_out: float = 0.0
    note: str = ""


class Audit:
    """Runs a subject alone and in batches, and holds what was found; see ``operations``, ``groups``, ``first``,
    ``uncompared`` and ``sizes``.

    subject: what to run. watched: how many of its first rows are followed (each is run alone once).
    Raises BadInput for a batch under two rows, a watched row that leaves no batchmate, watched rows that run different
    operations alone, or a module of which nothing can be compared.
    """

    def __init__(self, subject: Subject, watched: int = 2):
        if subject.count < 2:
            raise BadInput(f"a batch of {subject.count} has no batchmates: give 2 rows or more.")
        if not 1 <= watched <= subject.count:
            raise BadInput(f"watched = {watched}: give a number from 1 to the batch's {subject.count} rows.")
        self.subject, self.watched = subject, list(range(watched))
        self.seen: list[Seen] = []
        self.records: list[OperationRecord] = []
        self.unmatched: Counter = Counter()
        self.feed_unrepeatable = 0
        self.flip_seen = self.rows_told_apart = False
        self._uncompared: list[dict] = []
        self._fed_as_is: set = set()
        self._varied = False
        self._made: dict[StorageWeakRef, tuple[str, int | None]] = {}
        self._whole: tuple | None = None
        with torch.no_grad():
            self._run_alone()
            self._run_batches()
            self._controls()
        self._made.clear()

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _run_alone(self) -> None:
        parameters = {t.untyped_storage().data_ptr() for t in self.subject.module.parameters()}
        for row in self.watched:
            position = 0
            memory: dict = {}  # one copy of a tensor that several operations read

            def keep(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().data_ptr() in parameters:
                    return leaf
                key = leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype
                # Its version would not tell that it is as it was: writing through ``.data`` leaves it alone.
                if key not in memory or not same_bits(memory[key][0], leaf):
                    memory[key] = (copied(leaf), leaf)  # the original is held, so that its address stays its own
                return memory[key][0]

            def saw(recorder, function, leaves, spec, outputs):
                nonlocal position
                kept, given = [keep(leaf) for leaf in leaves], [copied(t) for t in outputs]
                if row == 0:
                    self.seen.append(
                        Seen(recorder.phase, str(function), recorder.where, function, [kept], spec, [given])
                    )
                else:
                    if position >= len(self.seen) or self.seen[position].op != str(function):
                        raise BadInput(
                            f"row {row} alone runs other operations than row 0 alone (first {function} in "
                            f"{recorder.where or 'the module'}), as where each row chooses its experts: follow one row "
                            "(watched = 1, --rows 1)."
                        )
                    self.seen[position].leaves.append(kept)
                    self.seen[position].outputs.append(given)
                position += 1

            self._run([row], saw)
        self.records = [OperationRecord(i, s.phase, s.op, s.module) for i, s in enumerate(self.seen)]

    def _run_batches(self) -> None:
        n, every = self.subject.count, list(range(self.subject.count))
        stand_ins = [row + n for row in every]
        here = {row: row for row in self.watched}
        self._compare_run("base", every, here)
        if not any(record.carries for record in self.records):
            raise BadInput(
                f"none of the {len(self.seen)} operations that a row runs alone could be found again in a batch of {n}."
            )
        self._compare_run("rerun", every, here)
        for row in self.watched:
            self._compare_run("contents", [r if r == row else stand_ins[r] for r in every], {row: row})
        turned = every[1:] + every[:1]
        for order in (turned, every[::-1]):
            self._compare_run(
                "position", order, {row: order.index(row) for row in self.watched if order.index(row) != row}
            )
        half = max((n + 1) // 2, len(self.watched), 2)
        if half < n:
            self._compare_run("composition", every[:half], here)
        self._compare_run("composition", every + stand_ins, here)

    def _run(self, rows: Sequence[int], saw: Callable) -> None:
        with Recorder(self.subject.module, saw) as recorder:

            def phase(name: str) -> None:
                recorder.phase = name

            self.subject.run(rows, phase)

    def _compare_run(self, axis: str, rows: Sequence[int], places: dict[int, int]) -> None:
        """Compare a batch with the rows alone, operation by operation; where it runs others, those in common."""
        alone = [seen.key for seen in self.seen]
        keys = self._compare(axis, rows, places, list(range(len(alone))), alone)
        if keys != alone:
            targets: list[int | None] = [None] * len(keys)
            for block in SequenceMatcher(None, alone, keys, autojunk=False).get_matching_blocks():
                targets[block.b : block.b + block.size] = range(block.a, block.a + block.size)
            self._compare(axis, rows, places, targets, keys)

    def _compare(
        self, axis: str, rows: Sequence[int], places: dict[int, int], targets: list[int | None], expected: list[tuple]
    ) -> list[tuple]:
        """Run once; returns the operations that ran. Comparing ends at the first that is not the one expected.

        targets: for each operation expected, which of those alone it is compared with.
        """
        base, keys, following, last = axis == "base", [], True, -1
        if base:
            self._varied, self._uncompared, self._made = False, [], {}

        def skipped(until: int) -> None:
            for missing in self.seen[last + 1 : until]:
                self._unmatched(axis, missing.key, last + 1, "alone only")

        def saw(recorder, function, leaves, spec, outputs):
            nonlocal following, last
            key, at = (recorder.phase, recorder.where, str(function)), len(keys)
            keys.append(key)
            following = following and at < len(expected) and expected[at] == key
            if not following:
                return
            found = targets[at]
            if found is None:
                self._unmatched(axis, key, last + 1, "in the batch only")
                return
            skipped(found)
            last = found
            seen, record = self.seen[found], self.records[found]
            try:
                if not seen.outputs[0] or not outputs:
                    raise Unaligned("it works on nested or sparse tensors")
                if base:
                    self._against_alone(seen, record, function, leaves, spec, outputs, len(rows), places)
                else:
                    self._against_base(axis, seen, record, outputs, len(rows), places)
            except Unaligned as error:
                record.note = record.note or f"not compared: {error}"
                if base:
                    self._not_compared(key, found, "both", str(error))
                    for t in outputs:
                        self._made.pop(StorageWeakRef(t.untyped_storage()), None)

        self._run(rows, saw)
        if following and keys == expected:
            skipped(len(self.seen))
        return keys

    def _unmatched(self, axis: str, key: tuple[str, str, str], index: int, ran: str) -> None:
        phase, _, op = key
        self.unmatched[(axis, phase, op)] += 1
        if axis == "base":
            self._not_compared(key, index, ran, "it has no counterpart")

    def _not_compared(self, key: tuple[str, str, str], index: int, ran: str, why: str) -> None:
        phase, module, op = key
        if op != _MOVES_ONLY:
            found = {"index": index, "phase": phase, "module": module, "op": _short(op), "ran": ran, "why": why}
            self._uncompared.append(found)

    # -- one operation -------------------------------------------------------------------------------------------------

    def _against_alone(
        self, seen: Seen, record: OperationRecord, function, leaves, spec, outputs, n: int, places: dict[int, int]
    ) -> None:
        if len(leaves) != len(seen.leaves[0]) or len(outputs) != len(seen.outputs[0]):
            raise Unaligned("it takes or returns another number of tensors than alone")
        at = [places[row] for row in self.watched]
        self._place(seen, leaves, outputs, at, n)
        if not any(seen.places) and not any(seen.out_places):
            self._follow(leaves, outputs)
            return
        record.carries, record.spans_batch = True, not any(seen.out_places)
        seen.base = [self._rows_of(outputs, seen, row, places[row], n, copy=True) for row in self.watched]
        whole = next(((k, t) for k, t in enumerate(outputs) if seen.out_places[k] and t.dtype.is_floating_point), None)
        self._whole = (seen, *whole, n) if whole else self._whole
        given = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        into = self._difference(
            [[seen.leaves[row][k] for k in given] for row in self.watched],
            [
                [_part(leaves[k], seen.leaves[row][k], seen.places[k], places[row], n) for k in given]
                for row in self.watched
            ],
        )
        out = self._difference(seen.outputs, seen.base)
        record.varies["solo"] = out.rows_differ > 0
        record.inputs_differ, record.max_ulp_in, record.max_ulp_out = into.rows_differ > 0, into.max_ulp, out.max_ulp
        record.max_scaled_in, record.max_scaled_out = into.max_row_scaled_ulp, out.max_row_scaled_ulp
        fed = out
        if record.inputs_differ:
            fed = self._fed(seen, function, leaves, spec, n, places)
            self._feed_control(record, function, leaves, spec, outputs)
        # A decision over the whole batch (is any row padded?) is no arithmetic: it is listed, and what it changes
        # shows later.
        decides = record.spans_batch and not any(t.dtype.is_floating_point for t in outputs)
        # Where inputs differ but results agree nothing came in: a row number that picks the row's own entries is such
        # an input.
        record.introduces = record.varies["solo"] and fed.rows_differ > 0 and not decides
        record.max_ulp_introduced = fed.max_ulp if record.introduces else 0
        if record.spans_batch:
            record.note = "one result for the whole batch"
        elif record.varies["solo"] and not record.introduces and not self._varied:
            self._came_from_nowhere(record, out)
        kinds = [(a.dtype, b.dtype) for a, b in zip(seen.outputs[0], outputs) if a.dtype != b.dtype]
        if kinds:
            record.note = f"its result is {kinds[0][1]} in the batch and {kinds[0][0]} alone"
        self._varied |= record.varies["solo"] and not decides
        for t, place in zip(outputs, seen.out_places):
            made = ("row", place.step(t, n)) if place else ("batch" if record.spans_batch else "row", None)
            self._made[StorageWeakRef(t.untyped_storage())] = made

    def _place(self, seen: Seen, leaves, outputs, at: list[int], n: int) -> None:
        """Find where the rows lie in what the operation takes and returns. Raises Unaligned."""
        seen.places, seen.out_places, inner = [], [], set()
        for k, leaf in enumerate(leaves):
            place = None
            if isinstance(leaf, torch.Tensor):
                alone = [kept[k] for kept in seen.leaves]
                place = place_of(leaf, alone, at, n, step=self._made_as(leaf)[1])
                if place and alone[0].shape[place.dim] > 1:
                    inner.add(place.inner)
            seen.places.append(place)
        likely = inner.pop() if len(inner) == 1 else None
        for k, t in enumerate(outputs):
            seen.out_places.append(place_of(t, [kept[k] for kept in seen.outputs], at, n, likely=likely))

    def _follow(self, leaves, outputs) -> None:
        """What is computed from one row's values, or from a result for the whole batch, is made of such too."""
        kinds = {self._made_as(leaf)[0] for leaf in tensors(leaves)}
        kind = "batch" if "batch" in kinds else "row" if "row" in kinds else ""
        for t in outputs:
            self._made[StorageWeakRef(t.untyped_storage())] = (kind, None)

    def _made_as(self, leaf: torch.Tensor) -> tuple[str, int | None]:
        """What its memory was last written with: "row", values that rows have each for themselves, and the elements from
        a row to the next; "batch", one result for the whole batch; or nothing known.
        """
        return self._made.get(StorageWeakRef(leaf.untyped_storage()), ("", None))

    def _came_from_nowhere(self, record: OperationRecord, out: Difference) -> None:
        """Nothing compared before it differed, and yet its input does."""
        if self._uncompared:
            record.note = f"its inputs differ already; not compared before it: {_named(self._uncompared)}"
        else:  # made without inputs, such as the rows' own numbers
            record.introduces, record.max_ulp_introduced, record.note = True, out.max_ulp, "its input numbers the rows"

    def _against_base(
        self, axis: str, seen: Seen, record: OperationRecord, outputs, n: int, places: dict[int, int]
    ) -> None:
        if seen.base is None or not record.carries:
            return
        if len(outputs) != len(seen.outputs[0]):
            raise Unaligned("it returns another number of tensors than alone")
        now = [self._rows_of(outputs, seen, row, places[row], n) for row in places]
        found = self._difference([seen.base[row] for row in places], now)
        record.varies[axis] = record.varies.get(axis, False) or found.rows_differ > 0

    def _rows_of(
        self, batched: Sequence[torch.Tensor], seen: Seen, row: int, position: int, n: int, copy: bool = False
    ) -> list[torch.Tensor]:
        """The row's part of an operation's results."""
        if len(batched) != len(seen.outputs[row]):
            raise Unaligned("it returns another number of tensors than alone")
        parts = [_part(t, one, p, position, n) for t, one, p in zip(batched, seen.outputs[row], seen.out_places)]
        return [part.clone() for part in parts] if copy else parts

    def _fed(self, seen: Seen, function, leaves, spec, n: int, places: dict[int, int]) -> Difference:
        """Run the batch's operation with the watched rows' inputs as they were alone, and compare with what it gave
        alone.
        """
        given = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if any(leaves[k].dtype != seen.leaves[0][k].dtype for k in given):
            return Difference()  # what came in was another dtype: nothing to put in
        # One row's values that all rows read are the batch's doing, not an input of the row's.
        shared = [k for k in given if seen.places[k] is None and self._made_as(leaves[k])[0] != "row"]
        same = all(
            self._difference([[seen.leaves[row][k]]], [[leaves[k]]]).rows_differ == 0
            for k in shared
            for row in self.watched
        )
        # An argument without rows can only be one row's at a time.
        total = Difference()
        for rows in [self.watched] if same else [[row] for row in self.watched]:
            fed = [seen.leaves[rows[0]][k] if k in shared and not same else leaf for k, leaf in enumerate(leaves)]
            for k, place in enumerate(seen.places):
                if place is not None:
                    fed[k] = copied(leaves[k])
                    for row in rows:
                        place.part(fed[k], seen.leaves[row][k], places[row], n).copy_(seen.leaves[row][k])
                elif k in given and function._schema.is_mutable:
                    fed[k] = copied(fed[k])
            again = run_again(function, fed, spec)
            total = total + self._difference(
                [seen.outputs[row] for row in rows],
                [self._rows_of(again, seen, row, places[row], n) for row in rows],
            )
        return total

    def _feed_control(self, record: OperationRecord, function, leaves, spec, outputs) -> None:
        """Once a kind of operation: run again on copies of its own inputs, it must give its own outputs."""
        kind = (str(function), tuple(t.shape for t in tensors(leaves)))
        if kind in self._fed_as_is:
            return
        self._fed_as_is.add(kind)
        again = run_again(function, [copied(leaf) for leaf in leaves], spec)
        if not all(same_bits(a, b) for a, b in zip(again, outputs)):
            self.feed_unrepeatable += 1
            record.note = (
                "run again on the same inputs it gives other bits: introduces and propagates cannot be told apart"
            )

    def _difference(
        self, before: Sequence[Sequence[torch.Tensor]], after: Sequence[Sequence[torch.Tensor]]
    ) -> Difference:
        """Compare rows given as lists of tensors. Parameters compare by being the same memory; another dtype is a
        difference that has no distance.
        """
        total, differ = Difference(rows=len(before)), 0
        for olds, news in zip(before, after):
            unequal = False
            for old, new in zip(olds, news):
                if old.data_ptr() == new.data_ptr() and old.shape == new.shape and old.stride() == new.stride():
                    continue
                if old.numel() and not same_bits(old, new):
                    unequal = True
                    if old.dtype == new.dtype:
                        total = total + compare_rows([[old]], [[new]], [False])
            differ += unequal
        total.rows, total.rows_differ = len(before), differ
        return total

    def _controls(self) -> None:
        """The comparison sees a flipped bit, and tells a row from a batchmate: in the last floating result with rows."""
        if self._whole is None:
            return
        seen, k, whole, n = self._whole
        own, *others = (_part(whole, seen.outputs[0][k], seen.out_places[k], position, n) for position in range(n))
        self.flip_seen = self._difference([[own]], [[flipped(own)]]).rows_differ == 1
        self.rows_told_apart = any(self._difference([[own]], [[other]]).rows_differ == 1 for other in others)

    # -- what was found ------------------------------------------------------------------------------------------------

    def operations(self) -> pd.DataFrame:
        """One row an operation that carries the batch, in order: phase, module, op, whether it varies on each axis,
        ...
        """
        rows = [
            {
                "index": r.index,
                "phase": r.phase,
                "module": r.module,
                "op": _short(r.op),
                **{axis: r.varies.get(axis) for axis in AUDIT_AXES},
                "inputs_differ": r.inputs_differ,
                "introduces": r.introduces,
                "propagates": bool(r.varies.get("solo")) and r.inputs_differ and not r.introduces,
                "spans_batch": r.spans_batch,
                "max_ulp_in": r.max_ulp_in,
                "max_ulp_out": r.max_ulp_out,
                "max_ulp_introduced": r.max_ulp_introduced,
                "max_row_scaled_ulp_in": r.max_scaled_in,
                "max_row_scaled_ulp_out": r.max_scaled_out,
                "note": r.note,
            }
            for r in self.records
            if r.carries
        ]
        return pd.DataFrame(rows)

    def groups(self) -> pd.DataFrame:
        """Operations of one kind together (layers joined): calls, calls that vary on each axis, introduce,
        propagate.
        """
        frame = self.operations()
        frame["place"] = frame["module"].map(without_layer)
        rows = []
        for (phase, place, op), part in frame.groupby(["phase", "place", "op"], sort=False):
            rows.append(
                {
                    "phase": phase,
                    "module": place,
                    "op": op,
                    "calls": len(part),
                    **{axis: int(part[axis].eq(True).sum()) for axis in AUDIT_AXES},
                    "introduces": int(part["introduces"].sum()),
                    "propagates": int(part["propagates"].sum()),
                    "share_varies": float(part["solo"].eq(True).mean()),
                    "max_ulp_in": int(part["max_ulp_in"].max()),
                    "max_ulp_out": int(part["max_ulp_out"].max()),
                    "max_ulp_introduced": int(part["max_ulp_introduced"].max()),
                    "max_row_scaled_ulp_in": float(part["max_row_scaled_ulp_in"].max()),
                    "max_row_scaled_ulp_out": float(part["max_row_scaled_ulp_out"].max()),
                    "note": "; ".join(dict.fromkeys(note for note in part["note"] if note)),
                }
            )
        return pd.DataFrame(rows)

    def first(self) -> dict | None:
        """The first operation that introduces a difference, or None."""
        frame = self.operations()
        found = frame[frame["introduces"]]
        return (
            None
            if found.empty
            else found[["index", "phase", "module", "op", "max_ulp_introduced"]].to_dict("records")[0]
        )

    def uncompared(self) -> pd.DataFrame:
        """Operations of the base batch or of the row alone that could not be compared, in order: index (of the operation
        alone at whose place it ran), phase, module, op, ran ("both", "alone only", "in the batch only"), why.

        Copies are left out: they make no bits.
        """
        return pd.DataFrame(self._uncompared, columns=["index", "phase", "module", "op", "ran", "why"])

    def axes(self) -> pd.DataFrame:
        """Per axis: operations compared, operations whose bits changed, and whether the final operation's did."""
        frame = self.operations()
        last = frame.iloc[-1]
        return pd.DataFrame(
            [
                {
                    "axis": axis,
                    "operations": int(frame[axis].notna().sum()),
                    "vary": int(frame[axis].eq(True).sum()),
                    "last_operation_varies": bool(last[axis]),
                }
                for axis in AUDIT_AXES
            ]
        )

    def sizes(self, sizes: Sequence[int] = SIZES, values: int = 20_000) -> pd.DataFrame:
        """At which batch sizes an operation changes its bits, for each kind that computes floating values.

        As many calls of each kind are run as it takes to look at ``values`` numbers of a watched row, three at least
        (where a kernel differs it may be in one value of 10,000), each watched row leading a batch of repeats of them
        all with the inputs it had alone. Returns rows (phase, module, op, size, bit_class); sizes of one class gave
        the rows the same bits, and size 1 is class 0.
        """
        chosen: dict[tuple, list[Seen]] = defaultdict(list)
        for seen, record in zip(self.seen, self.records):
            kind = (seen.phase, without_layer(seen.module), _short(seen.op))
            enough = max(3, values // max(seen.outputs[0][0].numel(), 1))
            if record.carries and seen.outputs[0][0].dtype.is_floating_point and len(chosen[kind]) < enough:
                chosen[kind].append(seen)
        rows = []
        with torch.no_grad():
            for kind, calls in chosen.items():
                rows += [
                    dict(zip(("phase", "module", "op"), kind), size=size, bit_class=found)
                    for size, found in self._classes(calls, sizes)
                ]
        return pd.DataFrame(rows, columns=["phase", "module", "op", "size", "bit_class"])

    def _classes(self, calls: Sequence[Seen], sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
        known: list[list[torch.Tensor]] = []
        for size in sizes:
            try:
                outputs = [t for seen in calls for row in self.watched for t in self._at_size(seen, row, size)]
            except (RuntimeError, Unaligned):
                continue  # sizes spelled out in the arguments, or too large for the memory: no statement
            found = next((k for k, old in enumerate(known) if all(same_bits(a, b) for a, b in zip(old, outputs))), None)
            if found is None:
                known.append(outputs)
                found = len(known) - 1
            yield size, found

    def _at_size(self, seen: Seen, row: int, size: int) -> list[torch.Tensor]:
        """A watched row's outputs with the operation run at a batch size, the row first."""
        leaves = []
        for k, leaf in enumerate(seen.leaves[row]):
            if seen.places[k] is not None:
                leaf = seen.places[k].joined([seen.leaves[(row + p) % len(self.watched)][k] for p in range(size)])
            elif isinstance(leaf, torch.Tensor) and seen.function._schema.is_mutable:
                leaf = copied(leaf)
            leaves.append(leaf)
        outputs = run_again(seen.function, leaves, seen.spec)
        return [part.clone() for part in self._rows_of(outputs, seen, row, 0, size)]


def _part(
    batched: torch.Tensor, alone: torch.Tensor, place: Place | None, position: int, n: int
) -> torch.Tensor:
    """The row's part, or all of what has no rows. Raises Unaligned."""
    if place is not None:
        return place.part(batched, alone, position, n)
    if carried(batched, alone, n) is not None:
        raise Unaligned(f"{tuple(batched.shape)} in a batch of {n} against {tuple(alone.shape)} alone")
    return batched


def _named(uncompared: Sequence[dict], most: int = 4) -> str:
    names = dict.fromkeys(f"{one['op']} ({one['module'] or 'the module'}, {one['ran']})" for one in uncompared)
    return ", ".join(list(names)[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def without_layer(module: str) -> str:
    """A module's name with layer numbers starred, so that layers of one kind come together."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")


def tokens(subject: CausalSubject, count: int) -> pd.DataFrame:
    """Greedy tokens of each row in the batch, in the same batch again, and alone; one row a row of the batch.

    Columns: row, tokens, first_difference (index of the first token that differs from alone, or -1), rerun_differs,
    logits_differ (bits of the first step's logits), max_logit_difference, margin (top-1 minus top-2 of those logits,
    alone).
    """
    rows = list(range(subject.count))
    (batch, logits), (again, _) = subject.greedy_with_logits(rows, count), subject.greedy_with_logits(rows, count)
    table = []
    for row in rows:
        alone, own = subject.greedy_with_logits([row], count)
        unequal = (batch[row] != alone[0]).nonzero().flatten().tolist()
        top = own[0].float().topk(2).values
        table.append(
            {
                "row": row,
                "tokens": count,
                "first_difference": unequal[0] if unequal else -1,
                "rerun_differs": not torch.equal(batch[row], again[row]),
                "logits_differ": not same_bits(logits[row], own[0]),
                "max_logit_difference": float((logits[row].float() - own[0].float()).abs().max()),
                "margin": float(top[0] - top[1]),
            }
        )
    return pd.DataFrame(table)
