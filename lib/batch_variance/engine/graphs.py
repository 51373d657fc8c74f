"""Decode-only steps replayed as CUDA graphs: one captured forward pass for each number of rows.

What the host decides in such a step (tokens, places in the KV cache, page tables, lengths, how the rows are cut) is
written into arrays that keep their places and their largest size; all else is fixed by the number of rows, the rule and
the block, and captured. No rows are added to fill a graph up: a row shares a replayed step with those that it would
share it with otherwise, in the same kernels, so its bits are the same. Steps that prefill run as ever.
"""

from dataclasses import dataclass, replace
from typing import Callable

import numpy as np
import torch

from ..common import BadInput
from ..kernels.decode import DevicePlan
from ..schedules import Plan, plan_room
from .engine import Engine, EngineConfig, Request
from .model import Experts, Model, StepRows

ALIGNED = 256  # bytes: as a tensor of its own would be, so that kernels are compiled for the same alignment

Capture = Callable[[Callable[[], object]], tuple[Callable[[], None], object]]


class Buffers:
    """Integer arrays by name that keep their places. host: numpy arrays to write into; there: the tensors on the device
    that ``upload`` makes equal to them, in one copy. Nothing may be written while an upload is under way."""

    def __init__(self, shapes: dict[str, tuple[type, tuple[int, ...]]], device: torch.device):
        sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (dtype, shape) in shapes.items()}
        ends = np.cumsum([0] + [-(-size // ALIGNED) * ALIGNED for size in sizes.values()]).tolist()
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = self._host.to(device)  # on a CPU the same memory
        self.host, self.there = {}, {}
        for start, (name, (dtype, shape)) in zip(ends, shapes.items()):
            part = slice(start, start + sizes[name])
            self.host[name] = self._host[part].numpy().view(dtype).reshape(shape)
            kind = torch.from_numpy(self.host[name]).dtype
            self.there[name] = self._there[part].view(kind).view(shape)

    def upload(self) -> None:
        self._there.copy_(self._host, non_blocking=True)


PLAN_ARRAYS = ("segments", "program_starts", "slot_starts", "chunks")


def plan_shapes(plan: Plan, longest: int) -> dict[str, tuple[type, tuple[int, ...]]]:
    """Dtypes and shapes that hold any plan of this one's rule, programs, block and number of rows, for rows of at most
    ``longest`` tokens."""
    segments, _ = plan_room(plan.rule, plan.batch, longest, plan.programs, plan.block_size)
    shapes = (segments, 4), (plan.programs + 1,), (plan.batch + 1,), (plan.batch,)
    return {name: (np.int32, shape) for name, shape in zip(PLAN_ARRAYS, shapes)}


def plan_in(buffers: Buffers, plan: Plan, longest: int) -> DevicePlan:
    """A plan such as this one whose arrays are those of ``buffers``, lengths among them."""
    _, room = plan_room(plan.rule, plan.batch, longest, plan.programs, plan.block_size)
    kept = replace(plan, **{name: buffers.host[name] for name in (*PLAN_ARRAYS, "lengths")})
    return DevicePlan(kept, *(buffers.there[name] for name in PLAN_ARRAYS), room=room)


def write_plan(host: dict[str, np.ndarray], plan: Plan) -> None:
    """Write a plan into arrays of `plan_shapes`."""
    host["segments"][: len(plan.segments)] = plan.segments
    host["segments"][len(plan.segments) :] = -1  # of no row, and beyond every program
    for name in PLAN_ARRAYS[1:]:
        host[name][:] = getattr(plan, name)


class CudaCapture:
    """Captures work as CUDA graphs that share one pool of memory: none is replayed while another runs."""

    def __init__(self):
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, work: Callable[[], object]) -> tuple[Callable[[], None], object]:
        """What replays ``work``, and its result, whose tensors a replay rewrites; they hold nothing before the first.

        work: launches kernels on the current stream, and asks the device for nothing. It is run twice before, so that
        whatever a first call compiles or allocates is there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        return graph.replay, result


@dataclass
class _Seen:
    """A forward pass as captured: its rows with what the pass has noted in them, tensors that it read, its logits."""

    rows: StepRows
    read: tuple[torch.Tensor, ...]
    logits: torch.Tensor


class _Step:
    """The decode step of a number of rows. plan: the first that it is to run with, or None."""

    def __init__(self, model: Model, config: EngineConfig, cache, count: int, plan: Plan | None):
        device, width = model.weights.embedding.device, -(-config.max_length // config.page)
        shapes = {name: (np.int64, (count,)) for name in ("tokens", "positions", "slots")}
        shapes |= {"tables": (np.int32, (count, width)), "lengths": (np.int32, (count,))}
        self.buffers = Buffers(shapes | (plan_shapes(plan, config.max_length) if plan is not None else {}), device)
        self._page, self._tabled = config.page, [(None, 0)] * count
        self._cut: np.ndarray | None = None
        self._model, self._cache = model, cache
        self._rows = StepRows(
            *(self.buffers.there[name] for name in ("tokens", "positions", "slots", "tables", "lengths")),
            sampled=torch.arange(count, device=device),
            decode_rows=count,
            splits=plan_in(self.buffers, plan, config.max_length) if plan is not None else None,
            last=config.max_length - 1,
        )
        self._replay, self._seen = None, None

    def write(self, requests: list[Request], plan: Plan | None) -> None:
        """Make the device's arrays those of these requests' next token, cut as planned."""
        host = self.buffers.host
        host["tokens"][:] = [r.tokens[r.computed] for r in requests]
        positions, tables = host["positions"], host["tables"]
        positions[:] = [r.computed for r in requests]
        host["lengths"][:] = positions + 1
        for row, request in enumerate(requests):
            held, pages = self._tabled[row]
            if held is not request or pages != len(request.pages):
                tables[row] = 0
                tables[row, : len(request.pages)] = request.pages
                self._tabled[row] = request, len(request.pages)
        host["slots"][:] = tables[np.arange(len(tables)), positions // self._page] * self._page + positions % self._page
        if plan is not None and plan.segments is not self._cut:
            write_plan(host, plan)
            self._cut = plan.segments
        self.buffers.upload()

    def _forward(self) -> _Seen:
        rows = replace(self._rows, matmuls=[], choices={})
        logits = self._model.forward(rows, *self._cache)
        return _Seen(rows, self._model.rotary_tables(rows), logits)

    def run(self, capture: Capture) -> tuple[StepRows, torch.Tensor]:
        """The forward pass over what was written: its rows and logits, which the next one overwrites."""
        if self._replay is None:
            self._replay, self._seen = capture(self._forward)
        self._replay()
        return self._seen.rows, self._seen.logits


class DecodeGraphs:
    """The captured decode steps of a model under a configuration, and the KV cache that they read and write.

    ``serve(..., build=graphs.engine)`` serves with them; graphs are kept from one engine to the next, of which one at a
    time may have requests. replayed, ordinary: steps that were replayed, and steps that ran as ever because a request
    was prefilling. What cannot be captured raises; nothing falls back in silence.

    What looks on from Python while a step runs (a probe, an audit, a forward pass that observes) sees a step when it is
    captured, and no replay: run it without graphs. capture: makes graphs, CUDA's by default; another one serves where
    there is no GPU. Raises BadInput for a model on another device, with experts (they are routed on the host), or with
    a forward pass of its own.
    """

    def __init__(self, model: Model, config: EngineConfig, capture: Capture | None = None):
        device = model.weights.embedding.device
        if capture is None and device.type != "cuda":
            raise BadInput(f"the model lies on {device}: CUDA graphs need it on a GPU.")
        if getattr(type(model), "forward", None) is not Model.forward:
            raise BadInput(
                f"{type(model).__name__} has a forward pass of its own, which may look at the values: "
                "graphs replay that of Model."
            )
        if any(isinstance(layer.ffn, Experts) for layer in model.weights.layers):
            raise BadInput(
                "the model has experts, which are routed on the host in every step: graphs need a dense FFN."
            )
        self.model, self.config = model, config
        self._capture = capture or CudaCapture()
        self._cache: tuple[torch.Tensor, torch.Tensor] | None = None
        self._steps: dict[tuple[int, int], _Step] = {}
        self._last: Engine | None = None
        self.replayed = self.ordinary = 0

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._steps)

    def engine(self, model: Model, config: EngineConfig) -> "GraphedEngine":
        """A new engine that replays. Raises BadInput for another model or configuration than these graphs', and while
        the last engine still has requests."""
        if model is not self.model or config != self.config:
            raise BadInput("these graphs belong to another model or configuration: make DecodeGraphs of this one.")
        if self._last and (self._last.running or self._last.waiting):
            raise BadInput(
                f"an engine over these graphs still has {len(self._last.running) + len(self._last.waiting)} "
                "requests: let it finish, or make DecodeGraphs of its own for the new one."
            )
        self._last = GraphedEngine(self)
        self._cache = self._last.k_pages, self._last.v_pages
        return self._last

    def run(self, requests: list[Request], plan: Plan | None) -> tuple[StepRows, torch.Tensor]:
        """One decode-only step of these requests."""
        key = len(requests), plan.block_size if plan is not None else 0
        if key not in self._steps:
            self._steps[key] = _Step(self.model, self.config, self._cache, len(requests), plan)
        self._steps[key].write(requests, plan)
        self.replayed += 1
        return self._steps[key].run(self._capture)


class GraphedEngine(Engine):
    """An engine whose decode-only steps are replayed from graphs."""

    def __init__(self, graphs: DecodeGraphs):
        super().__init__(graphs.model, graphs.config, graphs._cache)
        self._graphs = graphs

    def _run(self, work: list[tuple[Request, int]], decoding: int) -> tuple[StepRows, torch.Tensor]:
        if decoding < len(work):
            self._graphs.ordinary += 1
            return super()._run(work, decoding)
        lengths = [request.computed + 1 for request, _ in work]
        plan, choices = self._plan(lengths)
        rows, logits = self._graphs.run([request for request, _ in work], plan)
        self._plan([length + 1 for length in lengths])  # the next step's, most likely, while the device works
        return replace(rows, splits=plan, choices=rows.choices | choices), logits
