"""The rows of one call: which arguments and results carry them, and the arguments of a batch put together from them.

How one argument is cut is `layouts`, which rows make up a batch `axes`.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch

from .axes import Replay, other_values
from .calls import Call, signature_of
from .layouts import CannotSlice, Flat, Layout, Prefix, Rows, as_layout, strided, taken_offsets
from .snapshots import Questions, differs


@dataclass
class Batch:
    """A call as it was before it ran (which may have moved its lengths on), the layout of each argument that carries
    its ``count`` rows, and the prefix sums by argument.
    """

    call: Call
    layouts: dict[str, Layout]
    offsets: dict[str, list[int]]
    count: int

    @classmethod
    def of(cls, call: Call, batch_args: Mapping[str, Layout]) -> "Batch":
        """Raises CannotSlice, naming the argument, where the call's arguments do not carry one number of rows."""
        given = {path: value for path in batch_args if (value := call.find(path)) is not None}
        if not given:
            raise CannotSlice(f"none of batch_args ({', '.join(batch_args)}) was given in this call")
        offsets = {
            path: value.tolist()
            for path, value in given.items()
            if isinstance(batch_args[path], Prefix) and isinstance(value, torch.Tensor)
        }
        layouts, count = {}, None
        for path, value in given.items():
            try:
                rows = batch_args[path].count(value, offsets)
            except CannotSlice as error:
                raise CannotSlice(f"argument {path!r} {error}") from None
            if rows is None:
                continue
            layouts[path] = batch_args[path]
            if count is None:
                count = rows
            elif rows != count:
                raise CannotSlice(f"argument {path!r} has {rows} rows where {next(iter(layouts))!r} has {count}")
        if count is None:
            raise CannotSlice("every argument named in batch_args is shared by all rows")
        if count == 0:
            raise CannotSlice("the batch is empty")
        return cls(call, layouts, offsets, count)

    def sizes(self, lengths: str | None) -> list[int] | None:
        """Each row's size from the argument ``lengths``, or else from any prefix sums; None where there are neither."""
        if lengths is not None and lengths in self.layouts and not isinstance(self.layouts[lengths], Prefix):
            value = self.call.get(lengths)
            return [int(x) for x in (value.flatten().tolist() if isinstance(value, torch.Tensor) else value)]
        for ends in [self.offsets[lengths]] if lengths in self.offsets else self.offsets.values():
            return [b - a for a, b in zip(ends, ends[1:])]
        return None

    def result_layouts(
        self, results: Mapping[str, torch.Tensor], call: Call, outputs: Mapping[str, Any]
    ) -> dict[str, Layout | None]:
        """How each result carries the rows; None where it does not.

        results: by label, ``return.<path>``, or ``argument.<path>`` for what the call, whose own arguments ``call``
        holds, changed in place; outputs: layouts by path in the return value, which are else guessed.
        Raises CannotSlice where that cannot be, or where no result carries rows.
        """
        found = {}
        for label, t in results.items():
            kind, _, path = label.partition(".")
            if kind == "argument":
                # A cache written in place belongs to no row in particular: only an identical re-run compares it.
                found[label] = next((layout for name, layout in self.layouts.items() if call.get(name) is t), None)
            elif path in outputs:
                found[label] = as_layout(outputs[path]) if outputs[path] is not None else None
            else:
                found[label] = self._guess(path, t)
        if not any(layout is not None for layout in found.values()):
            raise CannotSlice("the call neither returned nor changed a tensor that carries the batch")
        return found

    def _guess(self, path: str, t: torch.Tensor) -> Layout:
        for layout in self.layouts.values():
            if isinstance(layout, Flat) and t.dim() and t.shape[0] == self.offsets[layout.by][-1]:
                return Flat(layout.by, 0)
        if t.dim() and t.shape[0] == self.count:
            return Rows(0)
        fitting = [d for d in range(t.dim()) if t.shape[d] == self.count]
        if len(fitting) == 1:
            return Rows(fitting[0])
        where = f"output {path!r}" if path else "the output"
        several = "several dimensions" if fitting else "no dimension"
        raise CannotSlice(
            f"{where} of shape {tuple(t.shape)} has {several} of {self.count} rows: say in `outputs` which it is, or "
            f"None to leave it out"
        )


@dataclass
class Built:
    """A replay's arguments, its prefix sums, whether its batch is another than the call's, and the questions whether
    values written over change bits.
    """

    call: Call
    offsets: dict[str, list[int]]
    really: bool
    written: list[int]


class Builder:
    """Puts replays together. ``fresh``, ``values`` and ``pad`` are ``CallSiteProbe``'s."""

    def __init__(self, fresh: Mapping[str, Callable], values: Iterable[str], pad: Mapping[str, int]):
        self._makers = {path: (maker, signature_of(maker)) for path, maker in fresh.items()}
        self._values, self._pad = set(values), dict(pad)

    def build(self, batch: Batch, call: Call, replay: Replay, questions: Questions) -> Built:
        """call: the batch's call in private tensors, which may be written."""
        offsets = {path: taken_offsets(ends, replay.index) for path, ends in batch.offsets.items()}
        taken: dict[int, Any] = {}
        changes: dict[str, Any] = {}
        really, written = replay.index != tuple(range(batch.count)), []
        for path, layout in batch.layouts.items():
            value = call.get(path)
            # The same tensor given twice (out= that is an input) stays one tensor.
            if id(value) not in taken:
                new = layout.take(value, replay.index, batch.offsets)
                if (replay.overwritten or replay.padded) and self._holds_contents(path, layout, new):
                    if replay.overwritten:
                        written.append(questions.ask(overwritten(new, layout, replay, offsets)))
                    if replay.padded:
                        _blank(new, layout, replay.padded, offsets)
                taken[id(value)] = new
            changes[path] = taken[id(value)]
        if replay.widened:
            for path, dim in self._pad.items():
                changes[path] = _widened(changes.get(path, call.get(path)), dim)
                really = True
        call = call.replace(changes)
        fresh = {path: _make(*maker, call.flat()) for path, maker in self._makers.items() if call.has(path)}
        return Built(call.replace(fresh) if fresh else call, offsets, really, written)

    def _holds_contents(self, path: str, layout: Layout, value: Any) -> bool:
        """Whether the argument has values of each row's own that may be others."""
        if not isinstance(value, torch.Tensor) or isinstance(layout, Prefix) or not value.numel():
            return False
        if isinstance(layout, Rows) and value.stride(layout.dim) == 0 and value.shape[layout.dim] > 1:
            return False  # one memory for all rows
        return value.dtype.is_floating_point or path in self._values


def _make(maker: Callable, signature: inspect.Signature | None, arguments: Mapping[str, Any]) -> Any:
    """Call a metadata maker with the arguments that it names."""
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


def overwritten(new: torch.Tensor, layout: Layout, replay: Replay, offsets: Mapping) -> torch.Tensor:
    """Write other values over the rows whose contents are to change; whether any bit changed, bool [] on the device.

    Integers cannot be rescaled: a row gets its neighbour's, where the shapes allow.
    """
    old = new.clone()
    floating = new.dtype.is_floating_point
    if isinstance(layout, Rows):
        rows = old.movedim(layout.dim, 0)
        new.movedim(layout.dim, 0).copy_(other_values(rows) if floating else rows.roll(-1, 0))
        kept = [p for p in range(len(rows)) if p not in replay.overwritten]
        for part, values in zip(layout.parts(new, kept, offsets), layout.parts(old, kept, offsets)):
            part.copy_(values)
    else:
        olds = layout.parts(old, range(len(replay.index)), offsets)
        for p, part in zip(replay.overwritten, layout.parts(new, replay.overwritten, offsets)):
            other = olds[(p + 1) % len(olds)]
            part.copy_(other if not floating and other.shape == part.shape else other_values(olds[p][None])[0])
    return differs(new, old)


def _blank(new: torch.Tensor, layout: Layout, padded: Sequence[int], offsets: Mapping) -> None:
    """Zeros over rows that are padding, which are the last ones."""
    if isinstance(layout, Rows):
        new.narrow(layout.dim, padded[0], len(padded)).zero_()
    else:
        for part in layout.parts(new, padded, offsets):
            part.zero_()


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
