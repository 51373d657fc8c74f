"""Calls whose controls are made later: what is kept of each until then, and what of the engine's must not be lost then.

A replay that is made later runs as its call did, in the same stream and under the same modes of torch, on copies made
around the call. A kernel may write into a buffer of its own that its earlier results lie in, so the memory of every
result is remembered, weakly: what of it is still there when controls are made belongs to the engine.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .calls import Call
from .snapshots import KeptState, Snapshot

_DEVICES = ("cpu", "cuda")  # that autocast may be on for


@dataclass
class Taken:
    """One sampled call and copies of what it gave, tensors of its return value by path. ``again`` runs a replay."""

    number: int
    turn: int  # which of the samples it is
    again: Callable[[Call], Any]
    snapshot: Snapshot
    results: dict[str, torch.Tensor]


@dataclass
class Waiting:
    """A call whose controls are made later, the state that its replays will set back, and what its copies take."""

    taken: Taken
    state: KeptState
    surroundings: "Surroundings"
    nbytes: int


class Surroundings:
    """The CUDA stream and the modes of torch that a call ran in."""

    def __init__(self):
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = {
            device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)
        }

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device in _DEVICES:
                if device in self._autocast:
                    stack.enter_context(torch.autocast(device, self._autocast[device]))
                elif torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            yield

    @property
    def device(self) -> torch.device | None:
        return self.stream.device if self.stream is not None else None


def settle(devices: Iterable[torch.device | None]) -> None:
    """Wait for all work that these devices were given."""
    for device in devices:
        if device is not None:
            torch.cuda.synchronize(device)


class Memories:
    """The memory that results lay in. None of it is kept from being freed."""

    def __init__(self):
        self._known: set[StorageWeakRef] = set()

    def add(self, result: torch.Tensor) -> None:
        self._known.add(StorageWeakRef(result.untyped_storage()))

    def alive(self) -> list[torch.Tensor]:
        """What has not been freed, each memory whole as uint8 [bytes]."""
        self._known = {known for known in self._known if not known.expired()}
        storages = [torch.UntypedStorage._new_with_weak_ptr(known.cdata) for known in self._known]
        return [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages
            if storage is not None
        ]
