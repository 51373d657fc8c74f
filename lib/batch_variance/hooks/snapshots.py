"""Private copies of what a call was given and of the state it could change, so that it can be repeated exactly.

Arguments that share memory in the real call (q, k and v cut from one buffer, ``out`` that is an input) share it in
the copy too: what is copied is the span of bytes that they cover, not each tensor. The random state of Python, numpy
and torch is kept. What differs from its copy is asked of the device with as few waits as will do.
"""

import ctypes
import random
from itertools import islice
from typing import Any, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch

from .calls import Call, map_tensors, tensors
from .layouts import extent, misplacement, strided

WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CannotCopy(Exception):
    """An argument cannot be copied; the message says which one and why."""


class NoRoom(Exception):
    """The copies are more than there is room for now."""


def values_of(x: torch.Tensor) -> torch.Tensor:
    """The tensor without its history: what is done with it leaves none."""
    return x.detach() if x.requires_grad else x


def bits(x: torch.Tensor) -> torch.Tensor:
    """The raw bits of a tensor as integers of the same width (complex values as pairs), contiguous."""
    x = values_of(x)
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x, word = x.contiguous(), WORD[x.element_size()]
    return x if x.dtype is word else x.view(word)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs, as bool [] on ``a``'s device: the answer that ``same_bits`` would wait for."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones((), dtype=torch.bool)
    return other_bits(a, b)


def other_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``differs`` of tensors of one shape and dtype."""
    return (bits(a) != bits(b)).any()


class Questions:
    """Yes-or-no answers that are still on their devices, and are read together when the first of them is wanted.

    Reading waits for all work that a device was given, so that one reading should serve many answers. ``send`` has the
    answers brought while other work goes on; read later, they wait for nothing.
    """

    def __init__(self):
        self._flags: list[torch.Tensor] = []
        self._answers: list[list[bool]] = []
        self._sent: dict[torch.device, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def ask(self, flags: torch.Tensor) -> int:
        """flags: bool [N] or []. Returns the number by which ``answer`` gives them as a list."""
        self._flags.append(flags)
        return len(self._flags) - 1

    def send(self) -> None:
        """Ask the devices for all that is unread; nothing more can be asked. Waits only where memory is the host's."""
        for device, flags in self._unread().items():
            if device.type == "cuda":
                flags = in_one(flags)
                answers = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._sent[device] = answers, event

    def answer(self, number: int) -> list[bool]:
        if number >= len(self._answers):
            values = {device: in_one(flags).tolist() for device, flags in self._unread().items()}
            for device, (answers, event) in self._sent.items():
                event.synchronize()
                values[device] = answers.tolist()
            values = {device: iter(flags) for device, flags in values.items()}
            unread = self._flags[len(self._answers) :]
            self._answers += [list(islice(values[flags.device], flags.numel())) for flags in unread]
        return self._answers[number]

    def _unread(self) -> dict[torch.device, list[torch.Tensor]]:
        """Unread flags of each device that was not asked for them yet."""
        unread: dict[torch.device, list[torch.Tensor]] = {}
        for flags in self._flags[len(self._answers) :]:
            unread.setdefault(flags.device, []).append(flags)
        return {device: flags for device, flags in unread.items() if device not in self._sent}


def in_one(flags: list[torch.Tensor]) -> torch.Tensor:
    """Flags, bool [N] or [] each, one after another."""
    return torch.hstack(flags) if any([t.dim() for t in flags]) else torch.stack(flags)


class Snapshot:
    """Copies of a call's tensor arguments as they were before it ran, which ``before`` holds and nobody writes.
    ``real`` is the call itself, with the engine's tensors, until ``keep_after`` puts copies in their place.

    ``whole`` names arguments that are passed on as they are: too large to copy, and only read. ``nbytes`` is what the
    copies take. ``only_read`` is given where replays are made later: names of arguments that the call does not change,
    of which ``keep_after`` copies nothing. Then every torch.nn.Parameter is whole. ``own`` are those of the call's
    tensors that are copies already.
    Raises CannotCopy for a tensor without plain memory, or when more than ``max_bytes`` would be copied; NoRoom when
    it is more than ``room``.
    """

    def __init__(
        self,
        call: Call,
        whole: Iterable[str] = (),
        max_bytes: int = 2**32,
        room: int | None = None,
        only_read: Collection[str] | None = None,
        own: Iterable[torch.Tensor] = (),
    ):
        self.real = call
        self.whole, self._only_read, later = set(whole), only_read, only_read is not None
        self._live = [
            (path, t)
            for path, t in tensors(call.flat())
            if not _named(path, self.whole) and not (later and _is_parameter(t))
        ]
        self._keys = [t.untyped_storage().data_ptr() or id(t) for _, t in self._live]
        # Of each memory: first and last byte of the tensors in it, one of them, how many they are, that one's path.
        spans: dict[int, list] = {}
        for key, (path, t) in zip(self._keys, self._live):
            low, high = _span(path, t)
            if key in spans:
                span = spans[key]
                span[0], span[1], span[3] = min(span[0], low), max(span[1], high), span[3] + 1
            else:
                spans[key] = [low, high, t, 1, path]
        self.nbytes = sum([span[1] - span[0] for span in spans.values()])
        if later:
            self.nbytes += sum([t.nbytes for path, t in self._live if not _named(path, only_read)])
        if self.nbytes > max_bytes:
            low, high, _, _, path = max(spans.values(), key=lambda span: span[1] - span[0])
            raise CannotCopy(
                f"copies of the arguments take {self.nbytes:,} bytes and max_bytes is {max_bytes:,}: argument {path!r} "
                f"alone spans {high - low:,}; name it in `whole` if the call only reads it (for controls made later: "
                f"in `constant`, if nothing at all writes it)"
            )
        if room is not None and self.nbytes > room:
            raise NoRoom
        own = {id(t) for t in own}
        self._copies = {
            key: _Copy(t, low, high, n == 1, later, id(t) in own) for key, (low, high, t, n, _) in spans.items()
        }
        self._views = [self._copies[key].view(t) for key, (_, t) in zip(self._keys, self._live)]
        # What a replay is given a copy of its own of: what the call changes, and what was copied to any address.
        self._anew = {key for key, copy in self._copies.items() if copy.misplaced}
        # The containers are copied too: a call may also set fields of its metadata.
        self.before = self._replaced(call, {id(t): view for (_, t), view in zip(self._live, self._views)})

    def _replaced(self, call: Call, made: Mapping[int, torch.Tensor]) -> Call:
        """The call in new containers, with the tensors of these ids replaced; arguments that are whole stay."""
        values = {}
        for name, value in call.values.items():
            if isinstance(value, torch.Tensor):
                values[name] = made.get(id(value), value)
            else:
                values[name] = value if name in self.whole else map_tensors(value, lambda t: made.get(id(t), t))
        return call.with_values(values)

    def ask_changes(self, questions: Questions, given: Sequence[torch.Tensor] | None = None) -> list[int]:
        """Ask of each argument whether its bits were changed: by the real call, or by a replay of ``call_apart``, whose
        tensors were ``given``.
        """
        now = [t for _, t in self._live] if given is None else given
        return [questions.ask(differs(t, before)) for t, before in zip(now, self._views)]

    def note_changes(self) -> list[str]:
        """After the real call: paths whose bits it changed. Only their memory is copied again for each replay."""
        questions = Questions()
        changed = [questions.answer(number)[0] for number in self.ask_changes(questions)]
        if not any(changed):
            return []
        self._anew |= {key for key, other in zip(self._keys, changed) if other}
        return [path for (path, _), other in zip(self._live, changed) if other]

    def keep_after(self) -> None:
        """After the real call: copy its arguments as they are now, so that nothing here is the engine's any more."""
        made = {}
        for (path, t), view in zip(self._live, self._views):
            if id(t) not in made:
                made[id(t)] = view if _named(path, self._only_read) else values_of(t).clone()
        self.real = self._replaced(self.real, made)
        self._live = [(path, made[id(t)]) for path, t in self._live]

    def fresh_call(self) -> Call:
        """The call with private tensors that hold what the real ones held before it ran."""
        return self._replaced(self.before, self._made_anew(self._anew) if self._anew else {})

    def call_apart(self) -> tuple[Call, list[torch.Tensor]]:
        """``fresh_call`` with a copy of its own of every tensor, and these: nothing that it writes is in ``before``."""
        made = self._made_anew(self._copies.keys())
        return self._replaced(self.before, made), [made[id(view)] for view in self._views]

    def _made_anew(self, keys: Collection[int]) -> dict[int, torch.Tensor]:
        """Copies of these memories as each of ``before``'s tensors in them, by that tensor's id."""
        copies = {key: self._copies[key].again() for key in keys}
        return {
            id(view): self._copies[key].view_in(copies[key], view)
            for key, view in zip(self._keys, self._views)
            if key in copies
        }


def _is_parameter(t: torch.Tensor) -> bool:
    return type(t) is not torch.Tensor and isinstance(t, torch.nn.Parameter)


def _named(path: str, names: Collection[str]) -> bool:
    return path in names or "." in path and path.partition(".")[0] in names


def in_plain_memory(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not (t.is_meta or t.is_quantized or t.is_nested)


def _span(path: str, t: torch.Tensor) -> tuple[int, int]:
    """First and last byte of the tensor in its memory, the first moved down to an address that a new one may have."""
    if not in_plain_memory(t):
        raise CannotCopy(f"argument {path!r} is a {t.layout} tensor on {t.device}, which has no plain memory to copy")
    start = t.storage_offset() * t.element_size()
    end = start + (t.nbytes if t.is_contiguous() else extent(t.shape, t.stride()) * t.element_size())
    return max(start - misplacement(t), 0), end


class _Copy:
    """Bytes ``low`` to ``high`` of the memory of ``t``, which is ``alone`` where no other tensor lies in it. They keep
    their place relative to addresses that new tensors have, or are ``misplaced``: ``later`` leaves that to ``again``.
    ``own``: ``t`` is a copy already.
    """

    def __init__(self, t: torch.Tensor, low: int, high: int, alone: bool, later: bool, own: bool):
        self.plain, self.misplaced = alone and t.is_contiguous(), False  # then one tensor is all that is copied
        if self.plain:
            self._low, self._place = 0, misplacement(t)
            self.misplaced = later and not own and self._place != 0
            self._held = t if own else _placed(values_of(t), 0 if later else self._place)
        else:
            self._low, self._place = low, 0
            memory = torch.empty(0, dtype=torch.uint8, device=t.device)
            self._held = _placed(memory.set_(t.untyped_storage(), low, (high - low,), (1,)), 0)

    def view(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies in the copy."""
        return self._held if self.plain else _viewed(self._held, t, t.storage_offset() * t.element_size() - self._low)

    def again(self) -> torch.Tensor:
        """The bytes copied once more, to their place."""
        return _placed(self._held, self._place)

    def view_in(self, other: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """What ``view`` is of this copy, of another one that ``again`` made."""
        start = view.storage_offset() * view.element_size() - self._held.storage_offset()
        return other if self.plain else _viewed(other, view, start)


def _placed(source: torch.Tensor, place: int) -> torch.Tensor:
    if not place and source.is_contiguous():
        return source.clone()
    return strided(source.shape, source.stride(), source.dtype, source.device, place).copy_(source)


def _viewed(memory: torch.Tensor, like: torch.Tensor, start: int) -> torch.Tensor:
    """A tensor like another one in uint8 memory, from byte ``start`` of it."""
    new = torch.empty(0, dtype=like.dtype, device=like.device)
    offset = (memory.storage_offset() + start) // like.element_size()
    return new.set_(memory.untyped_storage(), offset, like.shape, like.stride())


class RandomState:
    """The state of Python's, numpy's and torch's generators, CUDA's included where it is in use. Where it takes
    longer to set one back than to see that it has not moved, it is looked at first."""

    def __init__(self):
        self._python, self._numpy = random.getstate(), _NumpyState.now()
        self._torch = torch.default_generator.get_state()
        self._cuda = [
            (generator, generator.get_state(), _place(generator))
            for generator in (torch.cuda.default_generators if torch.cuda.is_initialized() else ())
        ]

    def has_moved(self) -> bool:
        """Whether any generator has drawn since, or was set."""
        return (
            self._python != random.getstate()
            or self._numpy.has_moved()
            or not torch.equal(self._torch, torch.default_generator.get_state())
            or any([_place(generator) != place for generator, _, place in self._cuda])
        )

    def restore(self) -> None:
        random.setstate(self._python)
        self._numpy.restore()
        torch.default_generator.set_state(self._torch)
        for generator, state, place in self._cuda:
            if _place(generator) != place:
                generator.set_state(state)


def _place(generator: torch.Generator) -> tuple[int, int]:
    """Where a CUDA generator, which counts, stands."""
    return generator.initial_seed(), generator.get_offset()


class _NumpyState:
    """The state of numpy's global generator, which takes long to get and to set, so that both are left out where they
    can be.

    Its raw words are quick to read. While they stay the same, all that can change is whether the second of a pair of
    normals is held back, and a state that holds one is got and set each time.
    """

    _last: "_NumpyState | None" = None

    def __init__(self):
        self._words, self._state = _numpy_words(), np.random.get_state()
        self._plain = self._words is not None and not self._state[3]

    @classmethod
    def now(cls) -> "_NumpyState":
        if cls._last is None or cls._last._may_have_moved():
            cls._last = cls()
        return cls._last

    def restore(self) -> None:
        if self._may_have_moved():
            np.random.set_state(self._state)

    def has_moved(self) -> bool:
        return self._may_have_moved() and any(
            not np.array_equal(a, b) for a, b in zip(self._state, np.random.get_state())
        )

    def _may_have_moved(self) -> bool:
        return not self._plain or self._words != _numpy_words()


def _numpy_words() -> bytes | None:
    """The Mersenne Twister's 624 words and place among them, from numpy's own ctypes interface; None for another
    generator.
    """
    generator = np.random.get_bit_generator()
    return ctypes.string_at(generator.ctypes.state_address, 2500) if type(generator) is np.random.MT19937 else None


class KeptState:
    """Tensors outside the arguments that a call may change: a module's buffers, or tensors in nested containers.

    ``restore`` writes the bits back in place, so that every view of the memory sees them again.
    """

    def __init__(self, objects: Iterable[Any]):
        self.tensors = list({id(t): t for one in objects for t in _tensors_of(one) if in_plain_memory(t)}.values())
        self._kept = [values_of(t).clone() for t in self.tensors]
        self._asked: tuple[Questions, list[int]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy that was made of this very tensor, or one made now where it has no plain memory to be put back."""
        for t, kept in zip(self.tensors, self._kept):
            if t is tensor:
                return kept
        return values_of(tensor).clone()

    def ask(self, questions: Questions) -> None:
        """Ask now what has changed, among other questions; ``restore`` then goes by the answers."""
        self._asked = questions, [questions.ask(differs(t, kept)) for t, kept in zip(self.tensors, self._kept)]

    def forget(self) -> None:
        """The answers no longer hold: what may have changed since is asked anew."""
        self._asked = None

    def restore(self, unasked: bool = False) -> None:
        """unasked: write all bits back without asking which have changed; then nothing is waited for."""
        if not self.tensors:
            return
        if unasked:
            self.forget()
            for t, kept in zip(self.tensors, self._kept):
                _write(t, kept)
            return
        if self._asked is None:
            self.ask(Questions())
        questions, numbers = self._asked
        self.forget()
        for number, t, kept in zip(numbers, self.tensors, self._kept):
            if questions.answer(number)[0]:
                _write(t, kept)


def _write(t: torch.Tensor, kept: torch.Tensor) -> None:
    """Put bits back into memory behind autograd's back: its account of the tensor (version, inference mode) stays."""
    t = t.data
    for dim in [d for d, step in enumerate(t.stride()) if step == 0 and t.shape[d] > 1]:  # expanded: one copy is held
        t, kept = t.narrow(dim, 0, 1), kept.narrow(dim, 0, 1)
    t.copy_(kept)


def _tensors_of(one: Any) -> list[torch.Tensor]:
    if isinstance(one, torch.nn.Module):
        return list(one.buffers())
    return [t for _, t in tensors(one)]
