"""Zeroed counters for kernels whose last program to arrive does the rest, and which leave the counters at zero.

Launches that may run at one time must not share counters. Eager launches of one stream run one after another and share
a buffer; every launch captured into a CUDA graph gets places of its own, for graphs may be replayed side by side.
"""

import torch

CAPTURED = 1 << 20  # counters for captured launches, 4 MB a device; beyond them a graph zeroes its own


class _Counters:
    def __init__(self, device: torch.device):
        self.device = device
        self.captured = torch.zeros(CAPTURED, dtype=torch.int32, device=device)
        self.used = 0
        self.eager: dict[int, torch.Tensor] = {}

    def take(self, count: int, capturing: bool) -> torch.Tensor:
        count += -count % 4  # kernels are compiled for pointers that are multiples of 16 bytes
        if capturing:
            if self.used + count > CAPTURED:
                return torch.zeros(count, dtype=torch.int32, device=self.device)
            self.used += count
            return self.captured[self.used - count : self.used]
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        held = self.eager.get(stream)
        if held is None or len(held) < count:
            held = self.eager[stream] = torch.zeros(max(count, 1024), dtype=torch.int32, device=self.device)
        return held


_devices: dict[torch.device, _Counters] = {}


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """int32, at least ``count`` long, all zero; the launch it is given to must leave it so."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device not in _devices:
        if capturing:  # made in the graph, and zeroed at each replay
            return torch.zeros(count + -count % 4, dtype=torch.int32, device=device)
        _devices[device] = _Counters(device)
    return _devices[device].take(count, capturing)
