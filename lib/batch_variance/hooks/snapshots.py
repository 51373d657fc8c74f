"""Private copies of what a call was given and of the state it could change, so that it can be repeated exactly.

Arguments that share memory in the real call (q, k and v cut from one buffer, ``out`` that is an input) share it in
the copy too: what is copied is the span of bytes that they cover, not each tensor. The random state of Python, numpy
and torch is kept. What differs from its copy is asked of the device with as few waits as will do.
"""

import ctypes
import random
from itertools import islice
from typing import Any, Iterable

import numpy as np
import torch

from .calls import Call, map_tensors, tensors
from .layouts import ALIGNMENT, strided

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CannotCopy(Exception):
    """An argument cannot be copied; the message says which one and why."""


def values_of(x: torch.Tensor) -> torch.Tensor:
    """The tensor without its history: what is done with it leaves none."""
    return x.detach() if x.requires_grad else x


def bits(x: torch.Tensor) -> torch.Tensor:
    """The raw bits of a tensor as integers of the same width (complex values as pairs), contiguous."""
    x = values_of(x)
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.contiguous().view(_WORD[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs, as bool [] on ``a``'s device: the answer that ``same_bits`` would wait for."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones((), dtype=torch.bool)
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
                answers = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._sent[device] = answers, event

    def answer(self, number: int) -> list[bool]:
        if number >= len(self._answers):
            values = {}
            for device, (answers, event) in self._sent.items():
                event.synchronize()
                values[device] = iter(answers.tolist())
            values |= {device: iter(flags.tolist()) for device, flags in self._unread().items()}
            unread = self._flags[len(self._answers) :]
            self._answers += [list(islice(values[flags.device], flags.numel())) for flags in unread]
        return self._answers[number]

    def _unread(self) -> dict[torch.device, torch.Tensor]:
        """Unread flags, those of a device in one tensor."""
        unread: dict[torch.device, list[torch.Tensor]] = {}
        for flags in self._flags[len(self._answers) :]:
            unread.setdefault(flags.device, []).append(flags)
        return {device: torch.hstack(flags) for device, flags in unread.items() if device not in self._sent}


class Snapshot:
    """Copies of a call's tensor arguments as they were before it ran. ``real`` is the call itself, with the engine's
    tensors.

    ``whole`` names arguments that are passed on as they are: too large to copy, and only read.
    Raises CannotCopy for a tensor without plain memory, or when more than ``max_bytes`` would be copied.
    """

    def __init__(self, call: Call, whole: Iterable[str] = (), max_bytes: int = 2**32):
        # The containers are copied now, the tensors in them below: a call may also set fields of its metadata.
        self.real = call
        self._kept = call.with_values({name: map_tensors(value, lambda t: t) for name, value in call.values.items()})
        self.whole = set(whole)
        self._live = [
            (path, t)
            for path, t in tensors(call.flat())
            if path not in self.whole and path.partition(".")[0] not in self.whole
        ]
        self._keys = [t.untyped_storage().data_ptr() or id(t) for _, t in self._live]
        spans: dict[int, list] = {}
        for key, (path, t) in zip(self._keys, self._live):
            low, high = _span(path, t)
            if key in spans:
                spans[key][1], spans[key][2] = min(spans[key][1], low), max(spans[key][2], high)
            else:
                spans[key] = [t, low, high, path]
        total = sum(high - low for _, low, high, _ in spans.values())
        if total > max_bytes:
            t, low, high, path = max(spans.values(), key=lambda s: s[2] - s[1])
            raise CannotCopy(
                f"the arguments span {total:,} bytes and max_bytes is {max_bytes:,}: argument {path!r} alone spans "
                f"{high - low:,}; name it in `whole` if the call only reads it"
            )
        self._copies = {
            key: _copy(t, low, high, self._keys.count(key) == 1) for key, (t, low, high, _) in spans.items()
        }
        self._views = [_view(t, *self._copies[key]) for key, (_, t) in zip(self._keys, self._live)]
        self._changed: set[int] = set()

    def ask_changes(self, questions: Questions) -> list[int]:
        """After the real call: ask of each argument whether its bits were changed."""
        return [questions.ask(differs(now, before)) for (_, now), before in zip(self._live, self._views)]

    def note_changes(self) -> list[str]:
        """After the real call: paths whose bits it changed. Only their memory is copied again for each replay."""
        questions = Questions()
        changed = [questions.answer(number)[0] for number in self.ask_changes(questions)]
        if not any(changed):
            return []
        self._changed = {key for key, other in zip(self._keys, changed) if other}
        return [path for (path, _), other in zip(self._live, changed) if other]

    def fresh_call(self) -> Call:
        """The call with private tensors that hold what the real ones held before it ran."""
        views = self._views
        if self._changed:
            copies = {key: (_aligned(self._copies[key][0]), self._copies[key][1]) for key in self._changed}
            views = [
                _view(t, *copies[key]) if key in copies else view
                for key, (_, t), view in zip(self._keys, self._live, views)
            ]
        made = {id(t): view for (_, t), view in zip(self._live, views)}
        return self._kept.with_values(
            {
                name: value if name in self.whole else map_tensors(value, lambda t: made.get(id(t), t))
                for name, value in self._kept.values.items()
            }
        )


def _in_plain_memory(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and t.device.type != "meta" and not t.is_quantized and not t.is_nested


def _span(path: str, t: torch.Tensor) -> tuple[int, int]:
    if not _in_plain_memory(t):
        raise CannotCopy(f"argument {path!r} is a {t.layout} tensor on {t.device}, which has no plain memory to copy")
    start = t.storage_offset() * t.element_size()
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 if t.numel() else 0
    low = start - (t.untyped_storage().data_ptr() + start) % ALIGNMENT
    return max(low, 0), start + reach * t.element_size()


def _copy(t: torch.Tensor, low: int, high: int, alone: bool) -> tuple[torch.Tensor, int | None]:
    """These bytes of the tensor's memory, as uint8 at an aligned address, with the place of the first. Where they are
    just one tensor that lies aligned and without gaps, a copy of it and None, which takes fewer operations.
    """
    if alone and t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0:
        return _aligned(values_of(t)), None
    memory = torch.empty(0, dtype=torch.uint8, device=t.device)
    return _aligned(memory.set_(t.untyped_storage(), low, (high - low,), (1,))), low


def _aligned(source: torch.Tensor) -> torch.Tensor:
    return strided(source.shape, source.stride(), source.dtype, source.device).copy_(source)


def _view(t: torch.Tensor, copy: torch.Tensor, low: int | None) -> torch.Tensor:
    """The tensor as it lies in a copy that ``_copy`` made."""
    if low is None:
        return copy
    offset = copy.storage_offset() + t.storage_offset() * t.element_size() - low
    new = torch.empty(0, dtype=t.dtype, device=t.device)
    return new.set_(copy.untyped_storage(), offset // t.element_size(), t.shape, t.stride())


class RandomState:
    """The state of Python's, numpy's and torch's generators, CUDA's included where it is in use. Where it takes
    longer to set one back than to see that it has not moved, it is looked at first."""

    def __init__(self):
        self._python, self._numpy, self._torch = random.getstate(), _NumpyState.now(), torch.get_rng_state()
        self._cuda = [
            (generator, generator.get_state(), _place(generator))
            for generator in (torch.cuda.default_generators if torch.cuda.is_initialized() else ())
        ]

    def restore(self) -> None:
        random.setstate(self._python)
        self._numpy.restore()
        torch.set_rng_state(self._torch)
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
        self._tensors = [t for one in objects for t in _tensors_of(one) if _in_plain_memory(t)]
        self._kept = [values_of(t).clone() for t in self._tensors]
        self._asked: tuple[Questions, list[int]] | None = None

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The copy that was made of this very tensor, if there is one."""
        return next((kept for t, kept in zip(self._tensors, self._kept) if t is tensor), None)

    def ask(self, questions: Questions) -> None:
        """Ask now what has changed, among other questions; ``restore`` then goes by the answers."""
        self._asked = questions, [questions.ask(differs(t, kept)) for t, kept in zip(self._tensors, self._kept)]

    def forget(self) -> None:
        """The answers no longer hold: what may have changed since is asked anew."""
        self._asked = None

    def restore(self, unasked: bool = False) -> None:
        """unasked: write all bits back without asking which have changed; then nothing is waited for."""
        if not self._tensors:
            return
        if unasked:
            self.forget()
            for t, kept in zip(self._tensors, self._kept):
                _write(t, kept)
            return
        if self._asked is None:
            self.ask(Questions())
        questions, numbers = self._asked
        self.forget()
        for number, t, kept in zip(numbers, self._tensors, self._kept):
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
