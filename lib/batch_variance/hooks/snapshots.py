"""Private copies of what a call was given and of the state it could change, so that it can be repeated exactly.

Arguments that share memory in the real call (q, k and v cut from one buffer, ``out`` that is an input) share it in
the copy
too: what is copied is the span of bytes that they cover, not each tensor. The random state of Python, numpy and torch
is kept.
"""

import random
from typing import Any, Callable, Iterable

import numpy as np
import torch

from .calls import Call, map_tensors, tensors
from .layouts import ALIGNMENT, strided

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CannotCopy(Exception):
    """An argument cannot be copied; the message says which one and why."""


def bits(x: torch.Tensor) -> torch.Tensor:
    """The raw bits of a tensor as integers of the same width (complex values as pairs), contiguous."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.detach().contiguous().view(_WORD[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


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
        self._live = [(path, t) for path, t in tensors(call.flat()) if not {path, path.split(".")[0]} & self.whole]
        spans: dict[int, list] = {}
        for path, t in self._live:
            low, high = _span(path, t)
            key = t.untyped_storage().data_ptr() or id(t)
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
        self._copies = {key: (_bytes(t, low, high), low) for key, (t, low, high, _) in spans.items()}
        self._changed: set[int] = set()

    def note_changes(self) -> list[str]:
        """After the real call: paths whose bits it changed. Only their memory is copied again for each replay."""
        changed = []
        rebuilt = self._rebuild(lambda key: self._copies[key][0])
        for (path, now), before in zip(self._live, rebuilt):
            if not same_bits(now, before):
                changed.append(path)
                self._changed.add(now.untyped_storage().data_ptr() or id(now))
        return changed

    def fresh_call(self) -> Call:
        """The call with private tensors that hold what the real ones held before it ran."""
        copies = {key: _aligned(copy) if key in self._changed else copy for key, (copy, _) in self._copies.items()}
        made = dict(zip((id(t) for _, t in self._live), self._rebuild(copies.__getitem__)))
        return self._kept.with_values(
            {
                name: value if name in self.whole else map_tensors(value, lambda t: made.get(id(t), t))
                for name, value in self._kept.values.items()
            }
        )

    def _rebuild(self, storage: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        return [
            _view(t, storage(key), self._copies[key][1])
            for _, t in self._live
            for key in [t.untyped_storage().data_ptr() or id(t)]
        ]


def _span(path: str, t: torch.Tensor) -> tuple[int, int]:
    if t.layout is not torch.strided or t.device.type == "meta" or t.is_quantized or t.is_nested:
        raise CannotCopy(f"argument {path!r} is a {t.layout} tensor on {t.device}, which has no plain memory to copy")
    start = t.storage_offset() * t.element_size()
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 if t.numel() else 0
    low = start - (t.untyped_storage().data_ptr() + start) % ALIGNMENT
    return max(low, 0), start + reach * t.element_size()


def _bytes(t: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """A copy of these bytes of the tensor's memory, as uint8, at an aligned address."""
    return _aligned(
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage(), low, (high - low,), (1,))
    )


def _aligned(source: torch.Tensor) -> torch.Tensor:
    return strided(source.shape, (1,), torch.uint8, source.device).copy_(source)


def _view(t: torch.Tensor, copy: torch.Tensor, low: int) -> torch.Tensor:
    offset = copy.storage_offset() + t.storage_offset() * t.element_size() - low
    new = torch.empty(0, dtype=t.dtype, device=t.device)
    return new.set_(copy.untyped_storage(), offset // t.element_size(), t.shape, t.stride())


class RandomState:
    """The state of Python's, numpy's and torch's generators, CUDA's included where it is in use."""

    def __init__(self):
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = (
            torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        )

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class KeptState:
    """Tensors outside the arguments that a call may change: a module's buffers, or tensors in nested containers.

    ``restore`` writes the bits back in place, so that every view of the memory sees them again.
    """

    def __init__(self, objects: Iterable[Any]):
        self._tensors = [t for one in objects for t in _tensors_of(one)]
        self._kept = [t.detach().clone() for t in self._tensors]

    def restore(self) -> None:
        with torch.no_grad():
            for t, kept in zip(self._tensors, self._kept):
                if not same_bits(t, kept):
                    t.copy_(kept)


def _tensors_of(one: Any) -> list[torch.Tensor]:
    if isinstance(one, torch.nn.Module):
        return list(one.buffers())
    return [t for _, t in tensors(one)]
