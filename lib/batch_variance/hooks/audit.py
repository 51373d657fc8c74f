"""Which operations of a model depend on the batch, which of them bring a difference in, and at which batch sizes.

Every operation that torch dispatches is seen (TorchDispatchMode), with the module it ran in. A row is run alone and
its inputs and outputs are kept; then batches that hold it are run, and at each operation the row's part is compared,
bit by bit.

An operation *introduces* a difference if, given for the row exactly what it had alone, within the batch, it returns
other bits. Where its inputs in the batch already differ, the inputs it had alone are put in and the operation is run
once more; if the difference is then gone it was only *propagated*. This tells correlation from cause one operation at
a time.

The batch's place in a tensor is found from shapes: a dimension N times as long as in the run alone holds the rows in
order, also where tokens, heads or pages were folded into it.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Sequence

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..common import BadInput
from .comparing import Difference, compare_rows, flipped
from .layouts import fresh_like, strided
from .snapshots import same_bits
from .subjects import CausalSubject, Subject

AUDIT_AXES = ("rerun", "contents", "composition", "position", "solo")
SIZES = (1, 2, 3, 4, 8, 16, 32, 64)
_BACKWARD_ONLY = frozenset({"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"})
_WINDOW = 40  # how far ahead an operation that ran in only one of two runs is looked for


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
    dims: list[int | None] = field(default_factory=list)  # an argument's dimension that holds the rows in a batch
    base: list[list[torch.Tensor]] | None = None  # the rows' outputs in the base batch


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


class Unaligned(Exception):
    """A tensor of the batch that does not line up with the one of the row alone."""


class _Recorder(TorchDispatchMode):
    """Hands each operation that computes to ``saw(function, leaves, spec, outputs)``; views and factories pass by."""

    def __init__(self, module: torch.nn.Module, saw: Callable):
        super().__init__()
        self.phase, self._saw, self._stack, self._handles = "", saw, [], []
        for name, part in module.named_modules():
            self._handles.append(part.register_forward_pre_hook(self._entering(name)))
            self._handles.append(part.register_forward_hook(self._leaving, always_call=True))

    @property
    def where(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _entering(self, name: str):
        def hook(module, args):
            self._stack.append(name)

        return hook

    def _leaving(self, module, args, output):
        self._stack.pop()

    def __exit__(self, *exception):
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) or _only_views(function):
            return function(*args, **kwargs)
        written = (
            [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            if function._schema.is_mutable
            else []
        )
        before = [_copy(leaf) if i in written else leaf for i, leaf in enumerate(leaves)]
        result = function(*args, **kwargs)
        outputs = _results(function, result)
        if any(t.numel() for t in outputs):
            self._saw(self, function, before, spec, outputs)
        return result


def _only_views(function: Callable) -> bool:
    return getattr(function, "is_view", False) or str(function) in (
        "aten.detach.default",
        "aten._reshape_alias.default",
        "aten._unsafe_view.default",
    )


def _copy(leaf: Any) -> Any:
    """A tensor's own copy with the same strides. Dimensions that share one memory get memory each, outside the others:
    kernels ask for the inner strides that a padded mask has.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    strides = list(leaf.stride())
    reach = 1 + sum((n - 1) * s for n, s in zip(leaf.shape, strides) if n)
    for d in reversed(range(leaf.dim())):
        if strides[d] == 0 and leaf.shape[d] > 1:
            strides[d] = reach = -(-reach // 16) * 16
            reach *= leaf.shape[d]
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device).copy_(leaf.detach())


def carried(batched: torch.Tensor, alone: torch.Tensor, n: int) -> int | None:
    """The dimension that holds n rows, or None where the tensor is the same for every batch. Raises Unaligned
    otherwise.
    """
    if batched.shape == alone.shape:
        return None
    if batched.dim() == alone.dim():
        unequal = [d for d in range(alone.dim()) if batched.shape[d] != alone.shape[d]]
        if len(unequal) == 1 and batched.shape[unequal[0]] == n * alone.shape[unequal[0]]:
            return unequal[0]
    raise Unaligned(f"{tuple(batched.shape)} in a batch of {n} against {tuple(alone.shape)} alone")


def part_of(batched: torch.Tensor, alone: torch.Tensor, position: int, n: int) -> torch.Tensor:
    """The row's part of a batched tensor: of the same shape as the tensor it had alone."""
    dim = carried(batched, alone, n)
    return batched if dim is None else batched.narrow(dim, position * alone.shape[dim], alone.shape[dim])


class Audit:
    """Runs a subject alone and in batches, and holds what was found; see ``operations``, ``groups``, ``first`` and
    ``sizes``.

    subject: what to run. watched: how many of its first rows are followed (each is run alone once).
    Raises BadInput for a batch under two rows, or a watched row that leaves no batchmate.
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
        self._fed_as_is: set = set()
        self._varied = False
        with torch.no_grad():
            self._run_alone()
            self._run_batches()
            self._controls()

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _run_alone(self) -> None:
        parameters = {t.untyped_storage().data_ptr() for t in self.subject.module.parameters()}
        for row in self.watched:
            position = 0
            memory: dict = {}  # one copy of a tensor that several operations read

            def keep(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().data_ptr() in parameters:
                    return leaf
                key = (
                    leaf.untyped_storage().data_ptr(),
                    leaf.storage_offset(),
                    leaf.shape,
                    leaf.stride(),
                    leaf._version,
                    leaf.dtype,
                )
                if key not in memory:
                    memory[key] = (_copy(leaf), leaf)  # the original is held, so that its address stays its own
                return memory[key][0]

            def saw(recorder, function, leaves, spec, outputs):
                nonlocal position
                kept, given = [keep(leaf) for leaf in leaves], [_copy(t) for t in outputs]
                if row == 0:
                    self.seen.append(
                        Seen(recorder.phase, str(function), recorder.where, function, [kept], spec, [given])
                    )
                else:
                    if position >= len(self.seen) or self.seen[position].op != str(function):
                        raise BadInput(
                            f"row {row} alone ran other operations than row 0 alone (at {recorder.where}, {function}): their shapes must agree."
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
        with _Recorder(self.subject.module, saw) as recorder:

            def phase(name: str) -> None:
                recorder.phase = name

            self.subject.run(rows, phase)

    def _compare_run(self, axis: str, rows: Sequence[int], places: dict[int, int]) -> None:
        at = 0

        def saw(recorder, function, leaves, spec, outputs):
            nonlocal at
            found = self._find(at, str(function), recorder.where)
            if found is None:
                self.unmatched[(axis, recorder.phase, str(function))] += 1
                return
            at = found + 1
            seen, record = self.seen[found], self.records[found]
            try:
                if axis == "base":
                    self._against_alone(seen, record, function, leaves, spec, outputs, len(rows), places)
                else:
                    self._against_base(axis, seen, record, outputs, len(rows), places)
            except Unaligned as error:
                record.note = record.note or str(error)

        self._run(rows, saw)

    def _find(self, at: int, op: str, module: str) -> int | None:
        for k in range(at, min(at + _WINDOW, len(self.seen))):
            if self.seen[k].op == op and self.seen[k].module == module:
                return k
        return None

    # -- one operation -------------------------------------------------------------------------------------------------

    def _against_alone(
        self, seen: Seen, record: OperationRecord, function, leaves, spec, outputs, n: int, places: dict[int, int]
    ) -> None:
        dims = [
            carried(leaf, alone, n) if isinstance(leaf, torch.Tensor) else None
            for leaf, alone in zip(leaves, seen.leaves[0])
        ]
        rows_in = any(dim is not None for dim in dims)
        rows_out = any(carried(t, alone, n) is not None for t, alone in zip(outputs, seen.outputs[0]))
        if not (rows_in or rows_out):
            return
        seen.dims = dims
        seen.base = [self._rows_of(outputs, seen.outputs[row], places[row], n, copy=True) for row in self.watched]
        record.carries, record.spans_batch = True, not rows_out
        into = self._difference(
            [_tensors(seen.leaves[row]) for row in self.watched],
            [self._rows_of(_tensors(leaves), _tensors(seen.leaves[row]), places[row], n) for row in self.watched],
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
            # Nothing before it differed, and yet its input does: made without inputs, such as the rows' own numbers.
            record.introduces, record.max_ulp_introduced, record.note = True, out.max_ulp, "its input numbers the rows"
        self._varied |= record.varies["solo"] and not decides

    def _against_base(
        self, axis: str, seen: Seen, record: OperationRecord, outputs, n: int, places: dict[int, int]
    ) -> None:
        if seen.base is None or not record.carries:
            return
        now = [self._rows_of(outputs, seen.outputs[row], places[row], n) for row in places]
        found = self._difference([seen.base[row] for row in places], now)
        record.varies[axis] = record.varies.get(axis, False) or found.rows_differ > 0

    def _rows_of(
        self, batched: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], place: int, n: int, copy: bool = False
    ) -> list[torch.Tensor]:
        parts = [part_of(t, one, place, n) for t, one in zip(batched, alone, strict=True)]
        return [part.clone() for part in parts] if copy else parts

    def _fed(self, seen: Seen, function, leaves, spec, n: int, places: dict[int, int]) -> Difference:
        """Run the batch's operation with the watched rows' inputs as they were alone, and compare with what it gave
        alone.
        """
        shared = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and seen.dims[k] is None]
        same = all(
            self._difference([[seen.leaves[row][k]]], [[leaves[k]]]).rows_differ == 0
            for k in shared
            for row in self.watched
        )
        # An argument without rows can only be one row's at a time.
        total = Difference()
        for rows in [self.watched] if same else [[row] for row in self.watched]:
            fed = [seen.leaves[rows[0]][k] if k in shared and not same else leaf for k, leaf in enumerate(leaves)]
            for k, dim in enumerate(seen.dims):
                if dim is not None:
                    fed[k] = _copy(leaves[k])
                    for row in rows:
                        part_of(fed[k], seen.leaves[row][k], places[row], n).copy_(seen.leaves[row][k])
                elif k in shared and function._schema.is_mutable:
                    fed[k] = _copy(fed[k])
            given = _outputs(function, fed, spec)
            total = total + self._difference(
                [seen.outputs[row] for row in rows],
                [self._rows_of(given, seen.outputs[row], places[row], n) for row in rows],
            )
        return total

    def _feed_control(self, record: OperationRecord, function, leaves, spec, outputs) -> None:
        """Once a kind of operation: run again on copies of its own inputs, it must give its own outputs."""
        kind = (str(function), tuple(t.shape for t in _tensors(leaves)))
        if kind in self._fed_as_is:
            return
        self._fed_as_is.add(kind)
        again = _outputs(function, [_copy(leaf) for leaf in leaves], spec)
        if not all(same_bits(a, b) for a, b in zip(again, outputs)):
            self.feed_unrepeatable += 1
            record.note = (
                "run again on the same inputs it gives other bits: introduces and propagates cannot be told apart"
            )

    def _difference(
        self, before: Sequence[Sequence[torch.Tensor]], after: Sequence[Sequence[torch.Tensor]]
    ) -> Difference:
        """Compare rows given as lists of tensors. Parameters compare by being the same memory."""
        total, differ = Difference(rows=len(before)), 0
        for olds, news in zip(before, after):
            unequal = False
            for old, new in zip(olds, news):
                if old.data_ptr() == new.data_ptr() and old.shape == new.shape and old.stride() == new.stride():
                    continue
                if old.numel() and not same_bits(old, new):
                    unequal = True
                    total = total + compare_rows([[old]], [[new]], [False])
            differ += unequal
        total.rows, total.rows_differ = len(before), differ
        return total

    def _controls(self) -> None:
        """The comparison sees a flipped bit, and tells two rows of one batch apart."""
        last = next(
            (s for s in reversed(self.seen) if s.base is not None and s.base[0][0].dtype.is_floating_point), None
        )
        if last is None:
            return
        out = last.base[0][0]
        self.flip_seen = self._difference([[out]], [[flipped(out)]]).rows_differ == 1
        other = last.base[1][0] if len(last.base) > 1 else None
        self.rows_told_apart = other is not None and self._difference([[out]], [[other]]).rows_differ == 1

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
            if seen.dims[k] is not None:
                leaf = _joined([seen.leaves[(row + p) % len(self.watched)][k] for p in range(size)], seen.dims[k])
            elif isinstance(leaf, torch.Tensor) and seen.function._schema.is_mutable:
                leaf = _copy(leaf)
            leaves.append(leaf)
        return [
            part_of(t, alone, 0, size).clone()
            for t, alone in zip(_outputs(seen.function, leaves, seen.spec), seen.outputs[row])
        ]


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The parts one after another along ``dim``, with the strides of the first; where those would overlap, ``dim`` is
    outermost.
    """
    size = sum(part.shape[dim] for part in parts)
    new = fresh_like(parts[0], dim, size)
    reach = 1
    for stride, n in sorted(zip(new.stride(), new.shape)):
        if n > 1 and stride < reach:
            one = _copy(parts[0].narrow(dim, 0, 1))
            strides, shape = list(one.stride()), list(one.shape)
            span = 1 + sum((m - 1) * s for m, s in zip(shape, strides))
            strides[dim], shape[dim] = -(-span // 16) * 16, size
            new = strided(shape, strides, one.dtype, one.device)
            break
        reach = max(reach, stride * n)
    start = 0
    for part in parts:
        new.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return new


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _outputs(function: Callable, leaves: Sequence[Any], spec: Any) -> list[torch.Tensor]:
    args, kwargs = tree_unflatten(list(leaves), spec)
    return _results(function, function(*args, **kwargs))


def _results(function: Callable, result: Any) -> list[torch.Tensor]:
    """The tensors that an operation computed. What fused attention returns for its backward pass alone is left out:
    seeds and offsets are not even written where nothing is dropped, so their bits are whatever lay in memory."""
    named = zip(function._schema.returns, result) if isinstance(result, tuple) else ((None, result),)
    kept = [value for declared, value in named if declared is None or declared.name not in _BACKWARD_ONLY]
    return [t for t in tree_flatten(kept)[0] if isinstance(t, torch.Tensor)]


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
