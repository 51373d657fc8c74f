"""The cost of invariance end to end: this project's engine on default and on invariant kernels, on CUDA, in one run.

Default: the library's matmul and decode attention cut by the whole batch. Invariant: the invariant GEMM and decode
cut by each row's own length. All else is shared. Steps are timed launched one by one from Python ("step"), where the
device waits for Python most of the time, and, as serving engines do, with decode-only steps replayed from CUDA graphs
("step, CUDA graphs"); texts are compared with graphs. The model is a Llama of serving width with random weights, so
nothing need be fetched; its texts mean nothing, their bits do.
"""

import time
from pathlib import Path
from typing import Callable

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from ..engine import DecodeGraphs, Engine, EngineConfig, Load, Model, Request, Weights, serve
from ..engine.checkpoint import Architecture
from ..engine.model import FFN, Layer
from ..kernels.gemm import invariant
from ..kernels.nvfp4 import policy
from ..kernels.recorded import Benchmark
from ..kernels.sets import TritonKernels

CONCURRENCIES = (1, 8, 32)
GRAPH_ROUNDS = 7
SHAPE = Architecture(
    hidden=2048,
    intermediate=7168,
    layers=4,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=8192,
    rope_theta=10000.0,
    rms_eps=1e-5,
    tied_embedding=False,
    eos=(),
)
KINDS = ("matmul", "decode attention", "prefill attention", "other")
LABEL = "random Llama, 4 layers of 2048 x 7168, bfloat16"


def kernels_of(which: str):
    """The Triton kernel set with another matmul: "default" is torch's, "invariant" this project's."""
    kernels = TritonKernels()
    kernels.linear = F.linear if which == "default" else invariant.matmul
    return kernels


def random_weights(shape: Architecture = SHAPE, device="cuda", dtype=torch.bfloat16, seed: int = 0) -> Weights:
    """Normal weights, scaled so that activations keep their size."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(rows, columns, gain=1.0):
        return torch.randn(rows, columns, generator=generator, device=device).mul_(gain * columns**-0.5).to(dtype)

    ones = lambda: torch.ones(shape.hidden, device=device, dtype=dtype)  # noqa: E731
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = [
        Layer(
            ones(),
            make(width, shape.hidden),
            make(shape.hidden, shape.heads * shape.head_dim),
            ones(),
            FFN(make(2 * shape.intermediate, shape.hidden), make(shape.hidden, shape.intermediate)),
        )
        for _ in range(shape.layers)
    ]
    return Weights(
        shape,
        make(shape.vocabulary, shape.hidden, shape.hidden**0.5),
        layers,
        ones(),
        make(shape.vocabulary, shape.hidden),
        LABEL,
    )


def prompts(count: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, int(rng.integers(16, 65))).tolist() for _ in range(count)]


def variants(
    model: Model,
    config: EngineConfig,
    texts: list[list[int]],
    concurrency: int,
    requests: int,
    tokens: int,
    build: Callable[[Model, EngineConfig], Engine] = Engine,
) -> tuple[int, int]:
    """(requests whose text differs from the same prompt served alone, requests). build: as for `serve`."""
    alone = {}
    for index, prompt in enumerate(texts):
        alone[index] = serve(model, [prompt], Load(1, 1, tokens, 0), config, build=build).requests[0].output
    found = serve(model, texts, Load(concurrency, requests, tokens, 0), config, build=build).requests
    return sum(request.output != alone[request.prompt] for request in found), len(found)


def kind_of(kernel: str) -> str:
    """What a GPU kernel does in the engine, by its name: matmul, decode attention, prefill attention or other."""
    name = kernel.lower()
    kinds = {
        "decode attention": ("decode_kernel", "combine_kernel"),
        "prefill attention": ("_attend",),
        "matmul": ("gemm", "nvjet", "cutlass", "splitk", "parallel", "in_turn", "gemv", "cublas"),
    }
    return next((kind for kind, marks in kinds.items() if any(mark in name for mark in marks)), "other")


def _eager_times(model: Model, config: EngineConfig, texts, concurrency: int, tokens: int) -> dict[str, float]:
    """Milliseconds of one engine step, prefill steps included: by the wall clock ("step"), the GPU's busy share of it
    ("device time"), and that by kind of kernel ("device time, matmul")."""
    load = Load(concurrency, concurrency, tokens, 0, jitter=0)
    some = (texts * concurrency)[:concurrency]
    serve(model, some, load, config)
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps = len(serve(model, some, load, config).steps)
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) * 1e3 / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        steps = len(serve(model, some, load, config).steps)
        torch.cuda.synchronize()
    found = {"step": wall, "device time": 0.0} | {f"device time, {kind}": 0.0 for kind in KINDS}
    for event in seen.key_averages():
        for name in ("device time", f"device time, {kind_of(event.key)}"):
            found[name] += event.self_device_time_total / 1e3 / steps
    return found


def graph_times(graphs: DecodeGraphs, texts: list[list[int]], concurrency: int, tokens: int) -> dict[str, float]:
    """Milliseconds by the wall clock with graphs: of one decode-only step of all requests, everything on the host
    included ("step, CUDA graphs", the median), and of the whole run from the first prompt to the last token ("run, CUDA
    graphs"). Both end with sampled tokens on the host."""
    engine = graphs.engine(graphs.model, graphs.config)
    for number, prompt in enumerate((texts * concurrency)[:concurrency]):
        engine.submit(Request(number, number % len(texts), list(prompt), len(prompt), tokens, 0))
    times = [time.perf_counter()]
    while engine.running or engine.waiting:
        engine.step()
        times.append(time.perf_counter())
    whole = [len(step.rows) == concurrency and all(p == "decode" for _, _, p in step.rows) for step in engine.steps]
    steps = np.diff(times) * 1e3
    return {"step, CUDA graphs": float(np.median(steps[whole])), "run, CUDA graphs": float(steps.sum())}


def _middle(found: list[dict[str, float]]) -> dict[str, float]:
    return pd.DataFrame(found).median().to_dict()


def run(folder: Path, budget_seconds: float) -> None:
    """Time steps at each concurrency and count variant texts; writes engine.csv in the folder."""
    start, bench = time.time(), Benchmark("engine")
    weights, texts = random_weights(), prompts(16, SHAPE.vocabulary)
    config = {
        which: EngineConfig(max_rows=256, max_length=256, page=32, ignore_eos=True, split_rule=rule)
        for which, rule in (("default", "flashmla"), ("invariant", "free-4"))
    }
    models = {which: Model(weights, kernels_of(which), policy("default")) for which in config}
    graphs = {which: DecodeGraphs(models[which], config[which]) for which in models}
    # All replays before the first profile, which might leave something on the way of each launch.
    replayed = {
        concurrency: _alternating(lambda which: graph_times(graphs[which], texts, concurrency, 96), GRAPH_ROUNDS + 1)
        for concurrency in CONCURRENCIES
    }
    counted = {}
    for which in models:
        requests = 1000 if time.time() - start < 0.5 * budget_seconds else 200
        before = graphs[which].replayed
        found = variants(models[which], config[which], texts, 32, requests, 64, graphs[which].engine)
        counted[which] = (*found, graphs[which].replayed - before)
        print(
            f"{which}: {found[0]} of {found[1]} texts differ from the prompt served alone, {counted[which][2]} steps "
            f"replayed from {graphs[which].captured} graphs, {time.time() - start:.0f} s",
            flush=True,
        )
    for which, counts in counted.items():
        for metric, value, base in zip(("variant texts", "requests", "steps replayed"), counts, counted["default"]):
            bench.add("engine", which, LABEL, 32, metric, "count", value, base)
    for concurrency in CONCURRENCIES:
        eager = _alternating(lambda which: _eager_times(models[which], config[which], texts, concurrency, 24), 3)
        middle = {  # the first replayed round captures
            which: _middle(eager[which]) | _middle(replayed[concurrency][which][1:]) for which in models
        }
        for which, values in middle.items():
            for metric, value in values.items():
                bench.add("engine", which, LABEL, concurrency, metric, "ms", value, middle["default"][metric])
        shown = pd.DataFrame(middle)
        shown["ratio"] = shown.invariant / shown.default
        print(f"concurrency {concurrency}, {time.time() - start:.0f} s:\n{shown.round(3).to_string()}", flush=True)
        bench.save(folder)


def _alternating(measure: Callable[[str], dict[str, float]], rounds: int) -> dict[str, list[dict[str, float]]]:
    """What ``measure`` finds of default and invariant in turn, so that a clock that sinks favours neither."""
    found = {"default": [], "invariant": []}
    for _ in range(rounds):
        for which, seen in found.items():
            seen.append(measure(which))
    return found
