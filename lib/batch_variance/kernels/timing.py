"""Timing on CUDA: medians over CUDA-graph replays, over buffers that do not stay in the cache."""

from typing import Callable

import numpy as np
import torch

COLD_BYTES = 256e6  # rotating over this much leaves nothing of a buffer in an L2 cache of 50 or 60 MB


def copies(bytes_a_call: float, most: int = 24) -> int:
    """How many sets of buffers a memory-bound call must rotate over so that none is still cached."""
    return int(np.clip(np.ceil(COLD_BYTES / max(bytes_a_call, 1)), 1, most))


def graph_microseconds(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median time of one call in microseconds. calls: one a set of buffers; all of them make one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del kept  # the graph's outputs had to stay allocated until here
    return float(np.median([start.elapsed_time(end) for start, end in events])) * 1e3 / len(calls)


def alternating_microseconds(first: list[Callable], second: list[Callable], rounds: int = 3) -> tuple[float, float]:
    """Medians of `graph_microseconds` of both over rounds in which one follows the other, so that a clock that sinks
    as the device warms favours neither."""
    found = [(graph_microseconds(first), graph_microseconds(second)) for _ in range(rounds)]
    return tuple(float(np.median(times)) for times in zip(*found))
