"""A probe at one call site: the engine's call runs as ever; a sample of calls is repeated on copies with one thing
varied.

It knows when to sample, how to repeat a call without the engine noticing, and what to record. How rows are cut is
`layouts`, what is varied `axes`, how a replay's batch is put together `batches`, what is kept of a call that is
replayed later `keeping`, what the records mean `verdicts`. The method (identical re-run, then row 0 alone with fresh
metadata) is that of FlashMLA issue 212, extended to all axes and given controls.
"""

import contextlib
import functools
import itertools
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import pandas as pd
import torch

from ..common import BadInput
from .axes import AXES, Planner, Replay
from .batches import Batch, Builder, Built
from .calls import Binder, Call, check_names, signature_of, tensors
from .comparing import Comparison, Difference, ShapeChanged, compare_rows, flipped
from .keeping import Backlog, Surroundings, Taken, Waiting, settle
from .layouts import CannotSlice, Layout, as_layout
from .paging import with_own_pages
from .patching import Target
from .snapshots import CannotCopy, KeptState, NoRoom, Questions, RandomState, Snapshot, differs, values_of
from .verdicts import verdicts

_NO_RERUN = "the identical call could not be repeated"
# So many samples in a row whose call changed no argument, or drew no random number, are taken for its habit: what is
# no longer waited for, or kept, is asked of the replays, and a sample that shows the contrary is refused.
HABIT = 4
_REPLAYING: set[int] = set()  # threads that make replays now
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


@contextlib.contextmanager
def _replays():
    """Meanwhile no probe counts or samples what this thread calls: it is not the engine's."""
    thread = threading.get_ident()
    within = thread in _REPLAYING
    _REPLAYING.add(thread)
    try:
        yield
    finally:
        if not within:
            _REPLAYING.discard(thread)


@dataclass
class _Sample:
    """What one sampled call was and gave: the ground that its replays are compared with. ``again`` runs a replay."""

    again: Callable[[Call], Any]
    questions: Questions

    snapshot: Snapshot
    batch: Batch
    count: int
    changed: list[str]
    results: dict[str, torch.Tensor]
    result_layouts: dict[str, Layout | None]
    watched: list[int]
    unchanging: list[int]  # questions whether arguments that are taken to be only read were changed after all
    reads: bool  # they are asked of the identical re-run, since nothing was kept of the arguments after the call

    def without_tensors(self) -> "_Sample":
        """What its records need once the replays are done."""
        return replace(self, again=None, snapshot=None, batch=None, results={})


@dataclass
class _Replayed:
    """What one replay gave, as yet unread from the device. Its batch was really another one where ``really``, or where
    one of the questions ``written`` says that overwriting changed bits. ``anywhere`` asks of an identical call made
    later whether any bit of its results is another, in rows that are not watched too.
    """

    comparison: Comparison
    really: bool
    written: list[int]
    witness: bool | None
    anywhere: list[int]


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
        max_share: sample only while the probe's own seconds are at most this share of the others since it was put in
            place; ``passed_over`` counts the calls that this cost.
        outputs: path in the return value -> dimension, layout, or None to leave it out; "" is the return value itself.
            Unnamed tensors are cut along the dimension that has as many entries as the batch has rows (or tokens).
        values: integer arguments in ``batch_args`` that are contents (token ids) and not structure (lengths, indices).
        lengths: path of the argument in ``batch_args`` that gives each row's size, for the composition axis.
        pad: argument path -> dimension to widen with zeros on the padding axis, instead of adding rows.
        whole: arguments that the call only reads, and that are large: replays are given them as they are, uncopied.
            Controls made later are given copies, since the engine may write them between calls, as it does a cache.
        pages: pool of pages (a paged KV cache) -> page table: path of an argument [P, ...] that the call only reads, as
            in ``whole`` -> path of the integer tensor that numbers its pages. Controls made later are then given copies
            of the pages that the table names, renumbered, and not of the pool. Name every pool that a table numbers.
        constant: arguments that are only ever read, by the call and by everyone else (weights): never copied.
        state: what else the call may change, to be put back: tensors, torch modules (their buffers), containers of
            tensors.
        witness: function of the call's arguments, after the call, to a plain value that says which path was taken (a
            split count). Its change on a replay is the proof that the condition under test occurred.
        checks: input checks, run on each sampled call; see ``checks``.
        log: a ``ProbeLog``, or the path of one to write.
        spread: make one of ``axes`` (and the re-run) a sampled call, in turn, instead of all: a cheaper sample.
        controls_every: make the positive controls on the first of so many sampled calls. Until they have succeeded once
            they are also made on the 2nd, the 4th, the 8th, ...
        max_bytes: refuse a sample whose arguments would need more copied; and, with controls made later, pass a call
            over while the copies kept would take more in all.
        controls: "now" to make replays, controls and checks before the sampled call returns; "later" to copy what they
            need, and to make them when ``run_controls`` is called or the probe is taken away; see there.
        seed: for sampling by probability, the rows drawn and the orders shuffled.

    Raises BadInput for a target or argument that does not exist, an unknown axis, or a limit that is not positive.
    Copies of arguments do not require gradients. Inside a CUDA graph's capture or a compiled region no call is sampled;
    ``refusals`` counts why. The wrapped call's own exceptions pass unchanged. ``seconds`` is what the sampled calls
    were delayed by, ``control_seconds`` what controls made later took.
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
        max_share: float | None = None,
        outputs: Mapping[str, Any] | None = None,
        values: Iterable[str] = (),
        lengths: str | None = None,
        pad: Mapping[str, int] | None = None,
        whole: Iterable[str] = (),
        pages: Mapping[str, str] | None = None,
        constant: Iterable[str] = (),
        state: Iterable[Any] = (),
        witness: Callable[[dict], Any] | None = None,
        checks: Iterable[Any] = (),
        log: Any = None,
        spread: bool = False,
        controls_every: int = 64,
        max_bytes: int = 2**32,
        controls: str = "now",
        seed: int = 0,
    ):
        self.target = Target(target)
        self.site = self.target.site
        self.batch_args = {path: as_layout(spec) for path, spec in batch_args.items()}
        self.fresh, self.outputs, self.pad = dict(fresh or {}), dict(outputs or {}), dict(pad or {})
        self.axes, self.every, self.rows, self.probability = tuple(axes), every, rows, probability
        self.max_calls, self.max_seconds, self.max_bytes = max_calls, max_seconds, max_bytes
        self.max_share = max_share
        self.values, self.lengths, self.witness = set(values), lengths, witness
        self.pages, self.constant, self.controls = dict(pages or {}), tuple(constant), controls
        self.whole = tuple(dict.fromkeys((*whole, *self.pages)))
        self.state, self.checks = list(state), list(checks)
        self.spread, self.controls_every = spread, controls_every
        self._read_target()
        owner = self.target.owner
        if isinstance(owner, torch.nn.Module):
            self.state.append(owner)
        self._builder = Builder(self.fresh, self.values, self.pad)
        self._draw = random.Random(seed)
        self._numbers = itertools.count()
        self._records: list[dict] = []
        self._check_records: list[dict] = []
        self.refusals: dict[str, int] = {}
        self.passes: dict[str, int] = {}  # why calls that were to be sampled were not
        self.calls = self.sampled = 0
        self.seconds = self.control_seconds = self._begun = self._spent = self._last = 0.0
        self._backlog = Backlog()
        self._unread: list[Callable[[], None]] = []  # what is left to record of the last sample
        self._unchanged = self._undrawn = 0  # samples in a row whose call changed no argument, drew no random number
        self._drew = False  # whether a replay of the sample under study did
        self._controlled = False  # whether the positive controls have ever succeeded
        self._log = log
        self._installed = False

    def _read_target(self) -> None:
        """The call site as it is now: between making a probe and putting it in place others may have wrapped it too."""
        self.target.read()
        self._signature = signature_of(self.target.function)
        self._binder = Binder(self._signature)
        self._check_arguments()

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
            ("pages", dict.fromkeys((*self.pages, *self.pages.values()))),
            ("whole", dict.fromkeys(self.whole)),
            ("constant", dict.fromkeys(self.constant)),
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
        if self.controls not in ("now", "later"):
            raise BadInput(f"controls = {self.controls!r}: give 'now' or 'later'.")
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise BadInput(f"max_share = {self.max_share}: give a share above 0 and up to 1, such as 0.02.")
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
        both = set(self.constant) & set(self.pages)
        if both:
            raise BadInput(
                f"{', '.join(sorted(both))} is named in constant and in pages: it is either left as it is or copied by page."
            )
        if self.lengths is not None and self.lengths not in self.batch_args:
            raise BadInput(f"lengths names {self.lengths!r}, which batch_args does not.")

    # -- the context manager -------------------------------------------------------------------------------------------

    def __enter__(self) -> "CallSiteProbe":
        if self._installed:
            raise BadInput(f"the probe at {self.site} is already in place: make another one for a second site.")
        self._read_target()
        if isinstance(self._log, (str, bytes)) or hasattr(self._log, "__fspath__"):
            from .log import ProbeLog

            self._log = ProbeLog(self._log)
        self.target.install(self._wrap)
        self._installed = True
        self._begun, self._spent = time.perf_counter(), self.seconds
        return self

    def __exit__(self, *exception) -> None:
        self.target.remove()
        self._installed = False
        self._settle()
        self.run_controls()
        if self._log is not None:
            self._log.flush()

    def _wrap(self, function: Callable) -> Callable:
        # Most calls are not sampled: for those each line here is what the probe costs.
        numbers, replaying, this_thread = self._numbers, _REPLAYING, threading.get_ident
        stride = self.every if self.every is not None and not self.probability else 1

        def probed(*args, **kwargs):
            if replaying and this_thread() in replaying:  # a replay, this probe's or another's
                return function(*args, **kwargs)
            number = next(numbers)
            self.calls = number + 1
            if number % stride or not self._chosen(number):
                return function(*args, **kwargs)
            return self._observe(function, number, args, kwargs)

        return probed

    def _chosen(self, number: int) -> bool:
        if not self._installed:  # taken away, but a wrapper that was put around it in the meantime still calls it
            return False
        if self.every is not None and number % self.every == 0:
            chosen = True
        else:
            chosen = self.probability > 0 and self._draw.random() < self.probability
        if not chosen:
            return False
        if self.max_calls is not None and self.sampled >= self.max_calls:
            return False
        if self.max_seconds is not None and self.seconds >= self.max_seconds:
            return False
        if self.max_share is None:
            return True
        spent = self.seconds - self._spent
        # A sample is taken to cost what the last one without controls did.
        within = not self.sampled or spent + self._last <= self.max_share * (time.perf_counter() - self._begun - spent)
        if not within:
            self._pass_over(f"the probe takes no more than {self.max_share:.1%} of the time")
        return within

    def _pass_over(self, reason: str) -> None:
        self.passes[reason] = self.passes.get(reason, 0) + 1

    @property
    def passed_over(self) -> int:
        """Calls that were to be sampled and were not, to keep to a limit; ``passes`` has them by reason."""
        return sum(self.passes.values())

    # -- one sampled call ----------------------------------------------------------------------------------------------

    def _observe(self, function: Callable, number: int, args: tuple, kwargs: Mapping) -> Any:
        reason = _unsafe()
        if reason:
            self._refuse(reason)
            return function(*args, **kwargs)
        started, spent = time.perf_counter(), self.seconds
        self._settle()
        try:
            call = self._binder.bind(args, kwargs)
        except TypeError:  # wrong arguments: the function says so itself, in its own words
            return function(*args, **kwargs)
        reads = self.controls == "later" and self._unchanged >= HABIT
        snapshot = self._copied(call, reads)
        if snapshot is None:
            self.seconds += time.perf_counter() - started
            return function(*args, **kwargs)
        random_state = RandomState() if self.controls == "now" or self._undrawn < HABIT else None
        kept = KeptState(self.state)
        self.seconds += time.perf_counter() - started

        result = function(*args, **kwargs)

        started = time.perf_counter()

        def again(call: Call) -> Any:
            kept.restore()
            if random_state is not None:
                random_state.restore()
            if self.controls == "now":
                return call.run(function)
            state = random_state or RandomState()
            replayed = call.run(function)
            self._drew = self._drew or state.has_moved()
            return replayed

        taken = Taken(number, self.sampled, again, snapshot, {}, reads, random_state is None)
        controlled = self.controls == "now" and self._wants_controls(taken.turn)
        self.sampled += 1
        try:
            if self.controls == "later":
                self._keep_for_later(taken, kept, result)
            else:
                self._control_now(taken, result)
        except Exception as error:  # whatever goes wrong in the probe stays there: the engine has its result
            self._failed(number, error)
        self.seconds += time.perf_counter() - started
        if not controlled:
            self._last = self.seconds - spent
        return result

    def _copied(self, call: Call, reads: bool) -> Snapshot | None:
        """The call's arguments as they are before it runs, or None where it is not to be sampled, for a reason kept."""
        try:
            if self.controls == "now":
                return Snapshot(call, (*self.whole, *self.constant), self.max_bytes)
            room = self.max_bytes - self._backlog.nbytes
            call, own = with_own_pages(call, self.pages, room)
            only_read = call.flat() if reads else {*self.whole, *self.pages.values()}
            return Snapshot(call, self.constant, self.max_bytes, room, only_read, own)
        except NoRoom:
            self._pass_over_full()
        except CannotCopy as error:
            self._refuse(str(error))
        except Exception as error:  # no memory left, for one
            self._refuse(f"the arguments could not be copied: {type(error).__name__}: {error}")
        return None

    def _control_now(self, taken: Taken, result: Any) -> None:
        after, after_random = KeptState([*self.state, result]), RandomState()
        taken.results = {path: after.copy_of(t) for path, t in tensors(result)}
        with _replays():
            try:
                self._study(taken, after)
            finally:
                # A kernel may hand out a buffer of its own: then a replay has written over the engine's result.
                after.restore(unasked=bool(self._unread))
                after_random.restore()

    # -- controls made later -------------------------------------------------------------------------------------------

    def _keep_for_later(self, taken: Taken, kept: KeptState, result: Any) -> None:
        taken.snapshot.keep_after()
        results = dict(tensors(result))
        taken.results = {path: values_of(t).clone() for path, t in results.items()}
        nbytes = taken.snapshot.nbytes + kept.nbytes + sum([t.nbytes for t in taken.results.values()])
        if self._backlog.nbytes + nbytes > self.max_bytes:
            self.sampled -= 1
            self._pass_over_full()
        else:
            self._backlog.add(Waiting(taken, kept, Surroundings(), nbytes), results.values())

    def _pass_over_full(self) -> None:
        self._pass_over(
            f"the copies kept until run_controls() is called may take {self.max_bytes:,} bytes in all (max_bytes)"
        )

    def run_controls(self, seconds: float | None = None) -> int:
        """Make the replays, controls and checks of samples that wait for them, the oldest first; returns of how many.

        To be called where the engine makes no calls: between requests, or when it idles. Waits for the device. After
        ``seconds`` the rest is left waiting. Afterwards the engine's random state, ``state`` and what is left of its
        results are as they were before.

        The replays have copies of the arguments as they were, but what the call read beside tensors in its arguments,
        or what is named ``constant``, may have changed since: weights loaded anew, a buffer that is not in ``state``,
        an object that is neither tensor nor container. Nothing shows that by itself (kernels write without leaving a
        version). The identical re-run does: it then gives other bits than the call gave, `rerun` is said to be variant
        and every other axis inconclusive, since what differs there may be the ground and not the batch. Where only rows
        that are not watched differ, the sample is refused. What the identical call does not read, but a replay of
        another batch does, no re-run can vouch for: do not name that ``constant``.
        """
        if not self._backlog or _unsafe():
            return 0
        started, done, devices = time.perf_counter(), 0, self._backlog.devices()
        settle(devices)
        try:
            random_state, engine = RandomState(), self._backlog.engines_own(self.state, self.max_bytes)
        except Exception as error:  # where the engine's own cannot be kept safe, nothing is replayed
            self._give_up(error)
            return 0
        settle(devices)
        with _replays():
            try:
                while self._backlog and (seconds is None or time.perf_counter() - started < seconds):
                    waiting, done = self._backlog.take(), done + 1
                    try:
                        with waiting.surroundings.entered():
                            self._study(waiting.taken, None)
                            self._settle()
                    except Exception as error:
                        self._failed(waiting.taken.number, error)
            finally:
                settle(devices)
                engine.restore()
                random_state.restore()
                settle(devices)
                self.control_seconds += time.perf_counter() - started
        return done

    def _give_up(self, error: Exception) -> None:
        reason = f"no controls were made: {type(error).__name__}: {error}"
        while self._backlog:
            self._refuse_sample(self._backlog.take().taken.number, reason)

    # -- one sample's replays ------------------------------------------------------------------------------------------

    def _study(self, taken: Taken, after: KeptState | None) -> None:
        """Make a sample's replays and controls. after: what they may write over, to be put back after them."""
        number, controlled = taken.number, self._wants_controls(taken.turn)
        self._drew = False
        try:
            sample = self._sample(taken, controlled)
        except CannotSlice as error:
            self._refuse_sample(number, str(error))
            return
        axes = [axis for axis in self.axes if axis != "rerun"]
        if self.spread and axes:
            axes = [axes[taken.turn % len(axes)]]
        sizes = sample.batch.sizes(self.lengths) if {"composition", "padding"} & set(axes) else None
        planner = Planner(sample.count, sample.watched, sizes, bool(self.pad), self._draw)
        flips = _flips(sample) if controlled else []
        sensitive = self._everything_overwritten(sample, planner) if controlled else None
        # The identical re-run is made whether it was asked for or not: it is the negative control of all the others.
        rerun, notes = self._axis(sample, planner, "rerun")
        replayed = [("rerun", rerun, notes)]
        for axis in axes:
            replayed.append((axis, *(self._axis(sample, planner, axis) if rerun else ([], [_NO_RERUN]))))
        if self.controls == "later":
            self._undrawn = 0 if self._drew else self._undrawn + 1
            if self._drew and taken.stateless:
                reason = (
                    "the call drew random numbers where those before it had not: it was replayed without their state"
                )
                self._refuse_sample(number, reason)
                return
        if not controlled and not self.checks and not self.state:
            # Nothing here needs the answers yet: they are read when the next call is sampled, and wait for nothing.
            sample.questions.send()
            asked = sample.without_tensors()  # until then the engine may want to let go of its own
            self._unread.append(lambda: self._finish(asked, number, replayed, sensitive, flips, controlled))
            return
        # All replays are done: with their answers comes whether they have written over the engine's own tensors.
        if after is not None:
            after.ask(sample.questions)
        records = self._finish(sample, number, replayed, sensitive, flips, controlled)
        for check in self.checks if records else ():
            if after is not None:
                after.forget()
            self._run_check(check, sample, number, repeatable=not records[0]["rows_differ"])

    def _finish(
        self,
        sample: _Sample,
        number: int,
        replayed: list[tuple],
        sensitive: _Replayed | None,
        flips: list[tuple[Comparison, int]],
        controlled: bool,
    ) -> list[dict]:
        """Read a sample's answers and keep its records, which it gives unless the sample says nothing after all."""
        reason, answer = None, sample.questions.answer
        if any([answer(question)[0] for question in sample.unchanging]):
            self._unchanged = 0
            reason = "the call changed an argument that those before it had only read: it was replayed as if it did not"
        for rerun in replayed[0][1]:
            if any([answer(q)[0] for q in rerun.anywhere]) and not any(rerun.comparison.differing()):
                reason = "the identical call, made later, gave other bits in rows not watched: its ground has moved"
        if reason:
            self._refuse_sample(number, reason)
            return []
        shared = {
            "call": number,
            "site": self.site,
            "batch": sample.count,
            "rows_sensitive": sum(sensitive.comparison.differing()) if sensitive else 0,
            "flip_seen": all(sum(found.differing()) == expected for found, expected in flips) if controlled else None,
        }
        self._controlled |= bool(shared["flip_seen"] and shared["rows_sensitive"])
        records = [{**self._record(sample, *found), **shared} for found in replayed]
        self._keep(records)
        return records

    def _settle(self) -> None:
        """Record what is left of the last sample."""
        while self._unread:
            finish = self._unread.pop()
            try:
                finish()
            except Exception as error:
                self._failed(self.calls, error)

    def _failed(self, number: int, error: Exception) -> None:
        self._refuse(f"the probe failed on the call: {type(error).__name__}: {error}")
        self._record_refused(number, f"the probe failed: {type(error).__name__}: {error}")

    def _wants_controls(self, turn: int) -> bool:
        return turn % self.controls_every == 0 or not self._controlled and (turn + 1) & turn == 0

    def _sample(self, taken: Taken, controlled: bool) -> _Sample:
        snapshot, questions, unchanging, changed = taken.snapshot, Questions(), [], []
        if self.controls == "now" and self._unchanged >= HABIT and not self.state and not controlled:
            unchanging = snapshot.ask_changes(questions)
        elif not taken.reads:
            changed = snapshot.note_changes()
            self._unchanged = 0 if changed else self._unchanged + 1
        batch = Batch.of(snapshot.before, self.batch_args)
        watched = self._watched(batch.count)
        results = self._results(taken.results, snapshot.real, changed)
        layouts = batch.result_layouts(results, snapshot.real, self.outputs)
        for path in changed:
            results[f"argument.{path}"] = values_of(results[f"argument.{path}"]).clone()
        return _Sample(
            taken.again,
            questions,
            snapshot,
            batch,
            batch.count,
            changed,
            results,
            layouts,
            watched,
            unchanging,
            taken.reads,
        )

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
        if changed:
            by_path = dict(tensors(call.flat()))
            found.update({f"argument.{path}": by_path[path] for path in changed})
        return found

    # -- replays -------------------------------------------------------------------------------------------------------

    def _axis(self, sample: _Sample, planner: Planner, axis: str) -> tuple[list[_Replayed], list[str]]:
        """The axis's replays, and notes on those that could not be made."""
        done, notes = [], []
        replays = planner.replays(axis)
        if not replays:
            notes.append(f"a batch of {sample.count} has nothing to vary on {axis}")
        for replay in replays:
            try:
                done.append(self._replay(sample, replay, axis))
            except (CannotSlice, ShapeChanged) as error:
                notes.append(str(error))
            except Exception as error:  # the kernel may not take such a batch; that must not reach the engine
                notes.append(
                    f"the replay raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
        return done, notes

    def _record(self, sample: _Sample, axis: str, done: list[_Replayed], notes: list[str]) -> dict:
        differences, answer = [], sample.questions.answer
        for replayed in done:
            try:
                differences.append(replayed.comparison.difference())
            except Exception as error:  # a dtype without the operations that a distance needs
                notes.append(f"a difference could not be measured: {type(error).__name__}: {error}")
        total = functools.reduce(Difference.__add__, differences) if differences else Difference()
        witnesses = [replayed.witness for replayed in done if replayed.witness is not None]
        return {
            "axis": axis,
            "rows_checked": total.rows,
            "rows_differ": total.rows_differ,
            "max_ulp": total.max_ulp,
            "max_row_scaled_ulp": total.max_row_scaled_ulp,
            "replays": len(done),
            "rows_unmoved": total.rows_unmoved,
            "differ_unmoved": total.differ_unmoved,
            "occurred": sum([r.really or any([answer(number)[0] for number in r.written]) for r in done]),
            "witness": any(witnesses) if witnesses else None,
            "elements": total.elements,
            "elements_differ": total.elements_differ,
            "ulp_histogram": total.histogram,
            "note": "; ".join(dict.fromkeys(notes)),
        }

    def _replay(self, sample: _Sample, replay: Replay, axis: str) -> _Replayed:
        if axis == "rerun":
            call, given = sample.snapshot.call_apart() if sample.reads else (sample.snapshot.fresh_call(), [])
            built = Built(call, sample.batch.offsets, True, [])
        else:
            built = self._builder.build(sample.batch, sample.snapshot.fresh_call(), replay, sample.questions)
        results = self._results(sample.again(built.call), built.call, sample.changed)
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
            before.append(layout.parts(t, replay.rows, sample.batch.offsets))
            after.append(layout.parts(results[label], replay.watched, built.offsets))
            if replay.widened:
                after[-1] = [_cropped(new, old) for old, new in zip(before[-1], after[-1])]
        witness = None
        if self.witness is not None:
            witness = self.witness(built.call.flat()) != self.witness(sample.snapshot.real.flat())
        anywhere = []
        if axis == "rerun" and sample.reads:
            sample.unchanging.extend(sample.snapshot.ask_changes(sample.questions, given))
        if axis == "rerun" and self.controls == "later":
            anywhere = [sample.questions.ask(differs(t, results[label])) for label, t in sample.results.items()]
        comparison = Comparison(before, after, replay.moved, sample.questions)
        return _Replayed(comparison, built.really, built.written, witness, anywhere)

    def _everything_overwritten(self, sample: _Sample, planner: Planner) -> _Replayed | None:
        """The positive control: watched rows must change when their own values do."""
        try:
            return self._replay(sample, planner.everything_overwritten(), "contents")
        except Exception:  # without it the verdict stays inconclusive, which is what should be said
            return None

    # -- checks, records, verdicts -------------------------------------------------------------------------------------

    def _run_check(self, check: Any, sample: _Sample, number: int, repeatable: bool) -> None:
        from .checks import CheckContext, run_check

        def replay(change: Callable[[Call], Call]) -> Difference:
            call = change(sample.snapshot.fresh_call())
            results = self._results(sample.again(call), call, sample.changed)
            labels = [label for label, layout in sample.result_layouts.items() if layout is not None]
            parts = [
                [sample.result_layouts[k].parts(r[k], range(sample.count), sample.batch.offsets) for k in labels]
                for r in (sample.results, results)
            ]
            return compare_rows(*parts, [False] * sample.count)

        record = run_check(check, CheckContext(sample.snapshot.fresh_call(), number, sample.count, repeatable, replay))
        self._check_records.append({**record, "site": self.site})
        if self._log is not None:
            self._log.append([{"kind": "check", **record, "site": self.site}])

    def _keep(self, records: list[dict]) -> None:
        self._records.extend(records)
        if self._log is not None:
            self._log.append([{"kind": "axis", **record} for record in records])

    def _refuse(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def _refuse_sample(self, number: int, reason: str) -> None:
        self._refuse(reason)
        self._record_refused(number, reason)

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
        """All that was recorded, a row per sampled call and axis, the control re-run included; nothing yet of samples
        that wait for ``run_controls``.
        """
        self._settle()
        return pd.DataFrame(self._records, columns=RECORD)

    def frame(self) -> pd.DataFrame:
        """A row per sampled call and axis: call, axis, rows_checked, rows_differ, max_ulp, max_row_scaled_ulp."""
        records = self.records()
        return records.loc[records["axis"].isin(self.axes), FRAME].reset_index(drop=True)

    def explain(self) -> pd.DataFrame:
        """The verdict of each axis with its reason, counts and interval; see ``verdicts``. Reasons end in what calls
        were passed over for, and in how many samples wait for ``run_controls``.
        """
        found = verdicts(self.records(), self.axes)
        if self.refusals:
            reasons = "; ".join(f"{reason} ({n} calls)" for reason, n in self.refusals.items())
            found.loc[found["calls"] == 0, "reason"] = reasons
        told = [f"{n} calls passed over: {reason}" for reason, n in self.passes.items()]
        if self._backlog:
            told.append(f"{len(self._backlog)} samples wait for run_controls()")
        if told:
            found["reason"] += f" ({'; '.join(told)})"
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
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "the call is being captured into a CUDA graph, where it does not run and must not be repeated"
    if torch.compiler.is_compiling():
        return "the call is being traced by torch.compile, where it does not run"
    return None


def _flips(sample: _Sample) -> list[tuple[Comparison, int]]:
    """Comparisons of each result with itself and with one bit flipped in one row, with the number of rows that must
    differ: a comparison that sees it could not then miss a difference.
    """
    found = []
    for label, t in sample.results.items():
        layout = sample.result_layouts[label]
        if layout is None:
            continue
        rows = layout.parts(t, sample.watched, sample.batch.offsets)
        filled = [i for i, part in enumerate(rows) if part.numel()]
        if not filled:
            continue
        planted = list(rows)
        planted[filled[0]] = flipped(rows[filled[0]])
        still = [False] * len(rows)
        for other, expected in ((rows, 0), (planted, 1)):
            found.append((Comparison([rows], [other], still, sample.questions), expected))
    return found


def _cropped(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The leading part of ``new`` that has the shape of ``old``: widened arguments may widen the result."""
    for dim in range(min(new.dim(), old.dim())):
        if new.shape[dim] > old.shape[dim]:
            new = new.narrow(dim, 0, old.shape[dim])
    return new
