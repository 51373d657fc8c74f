"""Calls whose controls are made later: what is kept of each until then, and what of the engine's must not be lost then.

A replay that is made later runs as its call did, in the same stream and under the same modes of torch, on copies made
around the call. A kernel may write into a buffer of its own that its earlier results lie in, so the memory of every
result is remembered, weakly: what of it is still there when controls are made belongs to the engine.
"""

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .calls import Call
from .snapshots import CannotCopy, KeptState, Snapshot, in_plain_memory

_DEVICES = ("cpu", "cuda")  # that autocast may be on for


@dataclass
class Taken:
    """One sampled call and copies of what it gave, tensors of its return value by path. ``again`` runs a replay.

    ``reads``: the call is taken to only read its arguments, of which no copies were made after it; ``stateless``: to
    draw no random numbers, so that no generator's state was kept.
    """

    number: int
    turn: int  # which of the samples it is
    again: Callable[[Call], Any]
    snapshot: Snapshot
    results: dict[str, torch.Tensor]
    reads: bool
    stateless: bool


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


def settle(devices: Iterable[torch.device]) -> None:
    """Wait for all work that these CUDA devices were given."""
    for device in devices:
        torch.cuda.synchronize(device)


class Backlog:
    """The calls whose controls are still to be made, the oldest first. ``nbytes`` is what their copies take."""

    def __init__(self):
        self.nbytes = 0
        self._waiting: deque[Waiting] = deque()
        self._memories: set[StorageWeakRef] = set()  # that results lay in; none is kept from being freed

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting, results: Iterable[torch.Tensor]) -> None:
        """results: the engine's own tensors, which are not held."""
        self._waiting.append(waiting)
        self.nbytes += waiting.nbytes
        self._memories.update(StorageWeakRef(t.untyped_storage()) for t in results if in_plain_memory(t))

    def take(self) -> Waiting:
        waiting = self._waiting.popleft()
        self.nbytes -= waiting.nbytes
        return waiting

    def devices(self) -> set[torch.device]:
        """The CUDA devices that the calls ran on."""
        streams = [waiting.surroundings.stream for waiting in list(self._waiting)]
        return {stream.device for stream in streams if stream is not None}

    def engines_own(self, state: Iterable[Any], max_bytes: int) -> KeptState:
        """Copies of all that replays may write over: ``state``, and each memory that results lay in, whole.

        Raises CannotCopy where those memories take more than ``max_bytes``.
        """
        self._memories = {memory for memory in self._memories if not memory.expired()}
        storages = [torch.UntypedStorage._new_with_weak_ptr(memory.cdata) for memory in self._memories]
        results = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages
            if storage is not None
        ]
        size = sum([t.nbytes for t in results])
        if size > max_bytes:
            raise CannotCopy(f"the engine's results lie in {size:,} bytes of memory and max_bytes is {max_bytes:,}")
        return KeptState([*state, *[waiting.state.tensors for waiting in list(self._waiting)], results])
