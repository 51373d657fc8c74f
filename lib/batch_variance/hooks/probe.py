"""A probe at one call site: the engine's call runs as ever; a sample of calls is repeated on copies with one thing
varied.

It knows when to sample, how to repeat a call without the engine noticing, and what to record. How rows are cut is
`layouts`, what is varied `axes`, what the records mean `verdicts`. The method (identical re-run, then row 0 alone
with fresh metadata) is that of FlashMLA issue 212, extended to all axes and given controls.
"""

import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Sequence

import pandas as pd
import torch

from ..common import BadInput
from .axes import AXES, Planner, Replay, other_values
from .calls import Call, check_names, signature_of, tensors
from .comparing import Difference, ShapeChanged, compare_rows, flipped
from .layouts import CannotSlice, Flat, Layout, Prefix, Rows, as_layout, strided, taken_offsets
from .patching import Target
from .snapshots import CannotCopy, KeptState, RandomState, Snapshot, same_bits
from .verdicts import verdicts

FRAME = ["call", "axis", "rows_checked", "rows_differ", "max_ulp", "max_row_scaled_ulp"]
RECORD = FRAME + [
    "site",
    "batch",
    "replays",
    "rows_unmoved",
    "differ_unmoved",
    "rows_sensitive",
    "occurred",
    "flip_seen",
    "witness",
    "elements",
    "elements_differ",
    "ulp_histogram",
    "note",
]


@dataclass
class _Sample:
    """What one sampled call was and gave: the ground that its replays are compared with."""

    snapshot: Snapshot
    before: Call
    layouts: dict[str, Layout]
    offsets: dict[str, list[int]]
    count: int
    changed: list[str]
    results: dict[str, torch.Tensor]
    result_layouts: dict[str, Layout | None]
    watched: list[int]


class CallSiteProbe:
    """Wrap a callable in place, and find out on which axes its rows' results depend on the batch.

    Args:
        target: the call site; see ``patching``.
        batch_args: path of each argument that carries the batch -> dimension of the rows, or a layout (``Rows``,
            ``Flat``, ``Prefix``). Arguments not named are taken to be the same for every batch (weights, caches,
            options).
        fresh: path -> function that builds the argument anew for a replay's batch (scheduler metadata, a maximum
            length). It is called with those of the call's arguments that its parameters name; a single parameter of
            another name gets them all in a dict. An identical re-run uses a copy of the argument as it was.
        axes: which of ``AXES`` to report. The identical re-run is always made: it is the negative control.
        every: sample call 0, every, 2 * every, ...; None to sample by probability alone.
        rows: "all", a number of rows drawn at random a call, or a list of row numbers.
        probability: chance of sampling a call, beside or instead of ``every``.
        max_calls, max_seconds: stop sampling after so many sampled calls, or so many seconds spent on replays.
        outputs: path in the return value -> dimension, layout, or None to leave it out; "" is the return value itself.
            Unnamed tensors are cut along the dimension that has as many entries as the batch has rows (or tokens).
        values: integer arguments in ``batch_args`` that are contents (token ids) and not structure (lengths, indices).
        lengths: path of the argument in ``batch_args`` that gives each row's size, for the composition axis.
        pad: argument path -> dimension to widen with zeros on the padding axis, instead of adding rows.
        whole: arguments that replays are given as they are, uncopied: large, and only read.
        state: what else the call may change, to be put back: tensors, torch modules (their buffers), containers of
            tensors.
        witness: function of the call's arguments, after the call, to a plain value that says which path was taken (a
            split count). Its change on a replay is the proof that the condition under test occurred.
        checks: input checks, run on each sampled call; see ``checks``.
        log: a ``ProbeLog``, or the path of one to write.
        spread: make one of ``axes`` (and the re-run) a sampled call, in turn, instead of all: a cheaper sample.
        controls_every: make the positive controls on the first of so many sampled calls, and on the first of all.
        max_bytes: refuse a sample whose arguments would need more copied.
        seed: for sampling by probability, the rows drawn and the orders shuffled.

    Raises BadInput for a target or argument that does not exist, an unknown axis, or a limit that is not positive.
    Copies of arguments do not require gradients. Inside a CUDA graph's capture or a compiled region no call is sampled;
    ``refusals`` counts why. The wrapped call's own exceptions pass unchanged.
    """

    def __init__(
        self,
        target: Any,
        batch_args: Mapping[str, Any],
        fresh: Mapping[str, Callable] | None = None,
        axes: Sequence[str] = ("rerun", "contents", "solo", "position"),
        every: int | None = 1,
        rows: str | int | Sequence[int] = "all",
        probability: float = 0.0,
        max_calls: int | None = None,
        max_seconds: float | None = None,
        outputs: Mapping[str, Any] | None = None,
        values: Iterable[str] = (),
        lengths: str | None = None,
        pad: Mapping[str, int] | None = None,
        whole: Iterable[str] = (),
        state: Iterable[Any] = (),
        witness: Callable[[dict], Any] | None = None,
        checks: Iterable[Any] = (),
        log: Any = None,
        spread: bool = False,
        controls_every: int = 8,
        max_bytes: int = 2**32,
        seed: int = 0,
    ):
        self.target = Target(target)
        self.site = self.target.site
        self.batch_args = {path: as_layout(spec) for path, spec in batch_args.items()}
        self.fresh, self.outputs, self.pad = dict(fresh or {}), dict(outputs or {}), dict(pad or {})
        self.axes, self.every, self.rows, self.probability = tuple(axes), every, rows, probability
        self.max_calls, self.max_seconds, self.max_bytes = max_calls, max_seconds, max_bytes
        self.values, self.whole, self.lengths, self.witness = set(values), tuple(whole), lengths, witness
        self.state, self.checks = list(state), list(checks)
        self.spread, self.controls_every = spread, controls_every
        self._signature = signature_of(self.target.function)
        self._check_arguments()
        owner = self.target.owner
        if isinstance(owner, torch.nn.Module):
            self.state.append(owner)
        self._draw = random.Random(seed)
        self._numbers = itertools.count()
        self._thread = threading.local()
        self._records: list[dict] = []
        self._check_records: list[dict] = []
        self.refusals: dict[str, int] = {}
        self.calls = self.sampled = 0
        self.seconds = 0.0
        self._log = log
        self._installed = False

    def _check_arguments(self) -> None:
        unknown = [axis for axis in self.axes if axis not in AXES]
        if unknown or not self.axes:
            raise BadInput(f"axes {unknown or 'empty'}: give some of {', '.join(AXES)}.")
        if not self.batch_args:
            raise BadInput("batch_args is empty: name at least one argument that carries the batch, such as {'q': 0}.")
        for what, paths in (
            ("batch_args", self.batch_args),
            ("fresh", self.fresh),
            ("pad", self.pad),
            ("whole", dict.fromkeys(self.whole)),
        ):
            check_names(what, paths, self._signature, self.site)
        for name, value in (
            ("every", self.every),
            ("max_calls", self.max_calls),
            ("max_seconds", self.max_seconds),
            ("controls_every", self.controls_every),
        ):
            if value is not None and value <= 0:
                raise BadInput(f"{name} = {value}: give a positive number.")
        if not 0 <= self.probability <= 1:
            raise BadInput(f"probability = {self.probability}: give a number from 0 to 1.")
        if self.every is None and self.probability == 0:
            raise BadInput("every is None and probability is 0: no call would ever be sampled.")
        if isinstance(self.rows, str) and self.rows != "all" or isinstance(self.rows, int) and self.rows < 1:
            raise BadInput(f"rows = {self.rows!r}: give 'all', a positive number of rows, or a list of row numbers.")
        both = set(self.batch_args) & set(self.fresh)
        if both:
            raise BadInput(
                f"{', '.join(sorted(both))} is named in batch_args and in fresh: it is either cut or built anew."
            )
        if self.lengths is not None and self.lengths not in self.batch_args:
            raise BadInput(f"lengths names {self.lengths!r}, which batch_args does not.")

    # -- the context manager -------------------------------------------------------------------------------------------

    def __enter__(self) -> "CallSiteProbe":
        if self._installed:
            raise BadInput(f"the probe at {self.site} is already in place: make another one for a second site.")
        if isinstance(self._log, (str, bytes)) or hasattr(self._log, "__fspath__"):
            from .log import ProbeLog

            self._log = ProbeLog(self._log)
        self.target.install(self._wrap)
        self._installed = True
        return self

    def __exit__(self, *exception) -> None:
        self.target.remove()
        self._installed = False
        if self._log is not None:
            self._log.flush()

    def _wrap(self, function: Callable) -> Callable:
        def probed(*args, **kwargs):
            if getattr(self._thread, "busy", False):  # a replay that reaches its own call site
                return function(*args, **kwargs)
            number = next(self._numbers)
            self.calls = number + 1
            if not self._chosen(number):
                return function(*args, **kwargs)
            return self._observe(function, number, args, kwargs)

        return probed

    def _chosen(self, number: int) -> bool:
        if self.every is not None and number % self.every == 0:
            chosen = True
        else:
            chosen = self.probability > 0 and self._draw.random() < self.probability
        if not chosen:
            return False
        if self.max_calls is not None and self.sampled >= self.max_calls:
            return False
        return self.max_seconds is None or self.seconds < self.max_seconds

    # -- one sampled call ----------------------------------------------------------------------------------------------

    def _observe(self, function: Callable, number: int, args: tuple, kwargs: Mapping) -> Any:
        reason = _unsafe()
        if reason:
            self._refuse(reason)
            return function(*args, **kwargs)
        started = time.perf_counter()
        try:
            call = Call.bind(self._signature, args, kwargs)
            snapshot = Snapshot(call, self.whole, self.max_bytes)
        except TypeError:  # wrong arguments: the function says so itself, in its own words
            return function(*args, **kwargs)
        except CannotCopy as error:
            self._refuse(str(error))
            return function(*args, **kwargs)
        random_state, kept = RandomState(), KeptState(self.state)
        self.seconds += time.perf_counter() - started

        result = function(*args, **kwargs)

        started = time.perf_counter()
        after_state, after_random = KeptState([*self.state, result]), RandomState()
        self._thread.busy = True
        try:
            self.sampled += 1
            self._study(function, number, snapshot, result, random_state, kept)
        except Exception as error:  # whatever goes wrong in the probe stays there: the engine has its result
            self._refuse(f"the probe failed on the call: {type(error).__name__}: {error}")
            self._record_refused(number, f"the probe failed: {type(error).__name__}: {error}")
        finally:
            # A kernel may hand out a buffer of its own: then a replay has written over the engine's result.
            after_state.restore()
            after_random.restore()
            self._thread.busy = False
            self.seconds += time.perf_counter() - started
        return result

    def _study(
        self,
        function: Callable,
        number: int,
        snapshot: Snapshot,
        result: Any,
        random_state: RandomState,
        kept: KeptState,
    ) -> None:
        changed = snapshot.note_changes()

        def again(call: Call) -> Any:
            kept.restore()
            random_state.restore()
            return call.run(function)

        try:
            sample = self._sample(snapshot, changed, result)
        except CannotSlice as error:
            self._refuse(str(error))
            self._record_refused(number, str(error))
            return
        planner = Planner(sample.count, sample.watched, self._row_sizes(sample), bool(self.pad), self._draw)
        controlled = (self.sampled - 1) % self.controls_every == 0
        flip_seen = _flip_is_seen(sample) if controlled else None
        sensitive = self._sensitive_rows(again, sample, planner) if controlled else 0
        axes = [axis for axis in self.axes if axis != "rerun"]
        if self.spread and axes:
            axes = [axes[(self.sampled - 1) % len(axes)]]
        # The identical re-run is made whether it was asked for or not: it is the negative control of all the others.
        records = []
        for axis in ("rerun", *axes):
            record = self._axis(again, sample, planner, axis)
            records.append(
                {
                    **record,
                    "call": number,
                    "site": self.site,
                    "batch": sample.count,
                    "rows_sensitive": sensitive,
                    "flip_seen": flip_seen,
                }
            )
        self._keep(records)
        for check in self.checks:
            self._run_check(check, again, sample, number, repeatable=not records[0]["rows_differ"])

    def _sample(self, snapshot: Snapshot, changed: list[str], result: Any) -> _Sample:
        call = snapshot.fresh_call()  # as it was before it ran: the real call may have moved its lengths on
        layouts = {path: layout for path, layout in self.batch_args.items() if call.has(path)}
        if not layouts:
            raise CannotSlice(f"none of batch_args ({', '.join(self.batch_args)}) was given in this call")
        offsets = {
            path: call.get(path).tolist()
            for path, layout in layouts.items()
            if isinstance(layout, Prefix) and isinstance(call.get(path), torch.Tensor)
        }
        counts = {}
        for path, layout in layouts.items():
            try:
                rows = layout.count(call.get(path), offsets)
            except CannotSlice as error:
                raise CannotSlice(f"argument {path!r} {error}") from None
            if rows is not None:
                counts[path] = rows
        layouts = {path: layouts[path] for path in counts}
        if not counts:
            raise CannotSlice("every argument named in batch_args is shared by all rows")
        count = next(iter(counts.values()))
        for path, rows in counts.items():
            if rows != count:
                first = next(iter(counts))
                raise CannotSlice(f"argument {path!r} has {rows} rows where {first!r} has {count}")
        if count == 0:
            raise CannotSlice("the batch is empty")
        watched = self._watched(count)
        results = self._results(result, snapshot.real, changed)
        result_layouts = self._result_layouts(results, snapshot.real, layouts, offsets, count)
        kept = {label: t.detach().clone() for label, t in results.items()}
        return _Sample(snapshot, call, layouts, offsets, count, changed, kept, result_layouts, watched)

    def _watched(self, count: int) -> list[int]:
        if self.rows == "all":
            return list(range(count))
        if isinstance(self.rows, int):
            return sorted(self._draw.sample(range(count), min(self.rows, count)))
        rows = [r for r in self.rows if r < count]
        if not rows:
            raise CannotSlice(f"rows {list(self.rows)} are all beyond a batch of {count}")
        return rows

    def _results(self, result: Any, call: Call, changed: Sequence[str]) -> dict[str, torch.Tensor]:
        """Every tensor the call gave back, and every argument it changed in place."""
        found = {f"return.{path}" if path else "return": t for path, t in tensors(result)}
        by_path = dict(tensors(call.flat()))
        found.update({f"argument.{path}": by_path[path] for path in changed})
        return found

    def _result_layouts(
        self,
        results: Mapping[str, torch.Tensor],
        call: Call,
        layouts: Mapping[str, Layout],
        offsets: Mapping,
        count: int,
    ) -> dict[str, Layout | None]:
        found = {}
        for label, t in results.items():
            kind, _, path = label.partition(".")
            if kind == "argument":
                # A cache written in place belongs to no row in particular: only an identical re-run compares it.
                found[label] = next((layout for name, layout in layouts.items() if call.get(name) is t), None)
            elif path in self.outputs:
                found[label] = as_layout(self.outputs[path]) if self.outputs[path] is not None else None
            else:
                found[label] = self._guess(path, t, layouts, offsets, count)
        if not any(layout is not None for layout in found.values()):
            raise CannotSlice("the call neither returned nor changed a tensor that carries the batch")
        return found

    def _guess(self, path: str, t: torch.Tensor, layouts: Mapping[str, Layout], offsets: Mapping, count: int) -> Layout:
        for layout in layouts.values():
            if isinstance(layout, Flat) and t.dim() and t.shape[0] == offsets[layout.by][-1]:
                return Flat(layout.by, 0)
        if t.dim() and t.shape[0] == count:
            return Rows(0)
        fitting = [d for d in range(t.dim()) if t.shape[d] == count]
        if len(fitting) == 1:
            return Rows(fitting[0])
        where = f"output {path!r}" if path else "the output"
        raise CannotSlice(
            f"{where} of shape {tuple(t.shape)} has {'several dimensions' if fitting else 'no dimension'} of {count} rows: say in `outputs` which it is, or None to leave it out"
        )

    def _row_sizes(self, sample: _Sample) -> list[int] | None:
        if self.lengths is not None and self.lengths in sample.layouts:
            value = sample.before.get(self.lengths)
            if isinstance(sample.layouts[self.lengths], Prefix):
                ends = sample.offsets[self.lengths]
                return [b - a for a, b in zip(ends, ends[1:])]
            return [int(x) for x in (value.flatten().tolist() if isinstance(value, torch.Tensor) else value)]
        for ends in sample.offsets.values():
            return [b - a for a, b in zip(ends, ends[1:])]
        return None

    # -- replays -------------------------------------------------------------------------------------------------------

    def _axis(self, again: Callable, sample: _Sample, planner: Planner, axis: str) -> dict:
        total, notes, done, occurred, witnesses = Difference(), [], 0, 0, []
        replays = planner.replays(axis)
        if not replays:
            notes.append(f"a batch of {sample.count} has nothing to vary on {axis}")
        for replay in replays:
            try:
                difference, really, witness = self._replay(again, sample, replay, axis)
            except (CannotSlice, ShapeChanged) as error:
                notes.append(str(error))
                continue
            except Exception as error:  # the kernel may not take such a batch; that must not reach the engine
                notes.append(
                    f"the replay raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
                continue
            total, done, occurred = total + difference, done + 1, occurred + really
            if witness is not None:
                witnesses.append(witness)
        return {
            "axis": axis,
            "rows_checked": total.rows,
            "rows_differ": total.rows_differ,
            "max_ulp": total.max_ulp,
            "max_row_scaled_ulp": total.max_row_scaled_ulp,
            "replays": done,
            "rows_unmoved": total.rows_unmoved,
            "differ_unmoved": total.differ_unmoved,
            "occurred": occurred,
            "witness": any(witnesses) if witnesses else None,
            "elements": total.elements,
            "elements_differ": total.elements_differ,
            "ulp_histogram": total.histogram,
            "note": "; ".join(dict.fromkeys(notes)),
        }

    def _replay(
        self, again: Callable, sample: _Sample, replay: Replay, axis: str
    ) -> tuple[Difference, bool, bool | None]:
        call, offsets, really = self._build(sample, replay, axis)
        result = again(call)
        results = self._results(result, call, sample.changed)
        before, after = [], []
        for label, t in sample.results.items():
            layout = sample.result_layouts[label]
            if layout is None:
                if axis == "rerun":
                    before.append([t] * len(replay.watched))
                    after.append([results[label]] * len(replay.watched))
                continue
            if label not in results:
                raise ShapeChanged(f"the replay gave no {label}")
            before.append(layout.parts(t, replay.rows, sample.offsets))
            after.append(
                [
                    _cropped(new, old) if replay.widened else new
                    for old, new in zip(before[-1], layout.parts(results[label], replay.watched, offsets))
                ]
            )
        witness = None
        if self.witness is not None:
            witness = self.witness(call.flat()) != self.witness(sample.snapshot.real.flat())
        return compare_rows(before, after, replay.moved), really, witness

    def _build(self, sample: _Sample, replay: Replay, axis: str) -> tuple[Call, dict, bool]:
        """The replay's arguments, its prefix sums, and whether its batch is really another than the call's."""
        call = sample.snapshot.fresh_call()
        if axis == "rerun":
            return call, sample.offsets, True
        offsets = {path: taken_offsets(ends, replay.index) for path, ends in sample.offsets.items()}
        taken: dict[int, Any] = {}
        changes: dict[str, Any] = {}
        really = replay.index != tuple(range(sample.count))
        for path, layout in sample.layouts.items():
            value = call.get(path)
            # The same tensor given twice (out= that is an input) stays one tensor.
            if id(value) not in taken:
                new = layout.take(value, replay.index, sample.offsets)
                really |= self._overwrite(path, layout, new, replay, offsets)
                taken[id(value)] = new
            changes[path] = taken[id(value)]
        if replay.widened:
            for path, dim in self.pad.items():
                changes[path] = _widened(changes.get(path, call.get(path)), dim)
                really = True
        call = call.replace(changes)
        fresh = {path: _make(maker, call.flat()) for path, maker in self.fresh.items() if call.has(path)}
        return call.replace(fresh), offsets, really

    def _overwrite(self, path: str, layout: Layout, new: Any, replay: Replay, offsets: Mapping) -> bool:
        """Write other values over the rows whose contents are to change, zeros over padding; whether any bit
        changed.
        """
        if not isinstance(new, torch.Tensor) or isinstance(layout, Prefix) or not new.numel():
            return False
        if isinstance(layout, Rows) and new.stride(layout.dim) == 0 and new.shape[layout.dim] > 1:
            return False  # one memory for all rows: not a row's own contents
        content = new.dtype.is_floating_point or path in self.values
        really = False
        if content and replay.overwritten:
            parts = layout.parts(new, replay.overwritten, offsets)
            olds = [part.clone() for part in parts]
            # Integers cannot be rescaled: a row gets its neighbour's, where the shapes allow.
            every = layout.parts(new, range(len(replay.index)), offsets)
            shifted = [every[(p + 1) % len(every)].clone() for p in replay.overwritten]
            for part, old, other in zip(parts, olds, shifted):
                borrowed = not new.dtype.is_floating_point and other.shape == old.shape
                part.copy_(other if borrowed else other_values(old))
                really |= not same_bits(part, old)
        if content and replay.padded:
            for part in layout.parts(new, replay.padded, offsets):
                part.zero_()
        return really

    def _sensitive_rows(self, again: Callable, sample: _Sample, planner: Planner) -> int:
        """How many watched rows change when their own values do: the positive control."""
        try:
            difference, _, _ = self._replay(again, sample, planner.everything_overwritten(), "contents")
        except Exception:  # without it the verdict stays inconclusive, which is what should be said
            return 0
        return difference.rows_differ

    # -- checks, records, verdicts -------------------------------------------------------------------------------------

    def _run_check(self, check: Any, again: Callable, sample: _Sample, number: int, repeatable: bool) -> None:
        from .checks import CheckContext, run_check

        def replay(change: Callable[[Call], Call]) -> Difference:
            call = change(sample.snapshot.fresh_call())
            results = self._results(again(call), call, sample.changed)
            labels = [label for label, layout in sample.result_layouts.items() if layout is not None]
            parts = [
                [sample.result_layouts[k].parts(r[k], range(sample.count), sample.offsets) for k in labels]
                for r in (sample.results, results)
            ]
            return compare_rows(*parts, [False] * sample.count)

        record = run_check(check, CheckContext(sample.before, number, sample.count, repeatable, replay))
        self._check_records.append({**record, "site": self.site})
        if self._log is not None:
            self._log.append([{"kind": "check", **record, "site": self.site}])

    def _keep(self, records: list[dict]) -> None:
        self._records.extend(records)
        if self._log is not None:
            self._log.append([{"kind": "axis", **record} for record in records])

    def _refuse(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def _record_refused(self, number: int, reason: str) -> None:
        empty = {
            "call": number,
            "site": self.site,
            "rows_checked": 0,
            "rows_differ": 0,
            "max_ulp": 0,
            "max_row_scaled_ulp": 0.0,
            "batch": 0,
            "replays": 0,
            "rows_unmoved": 0,
            "differ_unmoved": 0,
            "rows_sensitive": 0,
            "occurred": 0,
            "flip_seen": None,
            "witness": None,
            "elements": 0,
            "elements_differ": 0,
            "ulp_histogram": Difference().histogram,
            "note": reason,
        }
        self._keep([{**empty, "axis": axis} for axis in dict.fromkeys(("rerun", *self.axes))])

    def records(self) -> pd.DataFrame:
        """All that was recorded, a row per sampled call and axis, the control re-run included."""
        return pd.DataFrame(self._records, columns=RECORD)

    def frame(self) -> pd.DataFrame:
        """A row per sampled call and axis: call, axis, rows_checked, rows_differ, max_ulp, max_row_scaled_ulp."""
        records = self.records()
        return records.loc[records["axis"].isin(self.axes), FRAME].reset_index(drop=True)

    def explain(self) -> pd.DataFrame:
        """The verdict of each axis with its reason, counts and interval; see ``verdicts``."""
        found = verdicts(self.records(), self.axes)
        if self.refusals:
            reasons = "; ".join(f"{reason} ({n} calls)" for reason, n in self.refusals.items())
            found.loc[found["calls"] == 0, "reason"] = reasons
        return found

    def verdict(self) -> dict[str, str]:
        """``invariant``, ``variant`` or ``inconclusive`` for each axis."""
        found = self.explain()
        return dict(zip(found["axis"], found["verdict"]))

    def well_formed(self) -> pd.DataFrame:
        """The input checks' table: check, calls, rows, failed, occurred, verdict, detail."""
        from .checks import summarise

        return summarise(pd.DataFrame(self._check_records))


def _unsafe() -> str | None:
    """Why the current call cannot be sampled at all, or None."""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "the call is being captured into a CUDA graph, where it does not run and must not be repeated"
    if torch.compiler.is_compiling():
        return "the call is being traced by torch.compile, where it does not run"
    return None


def _make(maker: Callable, arguments: Mapping[str, Any]) -> Any:
    """Call a metadata maker with the arguments that it names."""
    signature = signature_of(maker)
    needed = list(signature.parameters.values()) if signature is not None else []
    if any(p.kind is p.VAR_KEYWORD for p in needed):
        return maker(**arguments)
    if (
        len(needed) == 1
        and needed[0].name not in arguments
        and needed[0].default is needed[0].empty
        and needed[0].kind is not needed[0].VAR_POSITIONAL
    ):
        return maker(dict(arguments))
    return maker(
        **{p.name: arguments[p.name] for p in needed if p.name in arguments and p.kind is not p.VAR_POSITIONAL}
    )


def _flip_is_seen(sample: _Sample) -> bool:
    """Whether the comparison notices one flipped bit in one row of each result: it could not then miss a difference."""
    for label, t in sample.results.items():
        layout = sample.result_layouts[label]
        if layout is None:
            continue
        rows = [part for part in layout.parts(t, sample.watched, sample.offsets)]
        filled = [i for i, part in enumerate(rows) if part.numel()]
        if not filled:
            continue
        planted = list(rows)
        planted[filled[0]] = flipped(rows[filled[0]])
        still = [False] * len(rows)
        if (
            compare_rows([rows], [rows], still).rows_differ != 0
            or compare_rows([rows], [planted], still).rows_differ != 1
        ):
            return False
    return True


def _cropped(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The leading part of ``new`` that has the shape of ``old``: widened arguments may widen the result."""
    for dim in range(min(new.dim(), old.dim())):
        if new.shape[dim] > old.shape[dim]:
            new = new.narrow(dim, 0, old.shape[dim])
    return new


def _widened(value: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with zeros appended along ``dim``, to the next power of two beyond its size."""
    shape = list(value.shape)
    shape[dim] = 1 << value.shape[dim].bit_length()
    steps, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        steps[d], step = step, step * max(shape[d], 1)
    new = strided(shape, steps, value.dtype, value.device).zero_()
    new.narrow(dim, 0, value.shape[dim]).copy_(value)
    return new
