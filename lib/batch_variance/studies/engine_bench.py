"""The cost of invariance end to end: this project's engine on default and on invariant kernels, on CUDA, in one run.

Default: the library's matmul and decode attention cut by the whole batch. Invariant: the invariant GEMM and decode
cut by each row's own length. All else is shared. The model is a Llama of serving width with random weights, so
nothing need be fetched; its texts mean nothing, their bits do.
"""

import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from ..engine import EngineConfig, Load, Model, Weights, serve
from ..engine.checkpoint import Architecture
from ..engine.model import FFN, Layer
from ..kernels.gemm import invariant
from ..kernels.nvfp4 import policy
from ..kernels.recorded import Benchmark
from ..kernels.sets import TritonKernels

CONCURRENCIES = (1, 8, 32)
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
    model: Model, config: EngineConfig, texts: list[list[int]], concurrency: int, requests: int, tokens: int
) -> tuple[int, int]:
    """(requests whose text differs from the same prompt served alone, requests)."""
    alone = {}
    for index, prompt in enumerate(texts):
        alone[index] = serve(model, [prompt], Load(1, 1, tokens, 0), config).requests[0].output
    found = serve(model, texts, Load(concurrency, requests, tokens, 0), config).requests
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


def _step_times(model: Model, config: EngineConfig, texts, concurrency: int, tokens: int) -> dict[str, float]:
    """Milliseconds of one engine step: by the wall clock ("step"), the GPU's busy share of it ("device time"), and
    that by kind of kernel ("device time, matmul")."""
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


def run(folder: Path, budget_seconds: float) -> None:
    """Time steps at each concurrency and count variant texts; writes engine.csv in the folder."""
    start, bench = time.time(), Benchmark("engine")
    weights, texts = random_weights(), prompts(16, SHAPE.vocabulary)
    config = {
        which: EngineConfig(max_rows=256, max_length=256, page=32, ignore_eos=True, split_rule=rule)
        for which, rule in (("default", "flashmla"), ("invariant", "free-4"))
    }
    models = {which: Model(weights, kernels_of(which), policy("default")) for which in config}
    for concurrency in CONCURRENCIES:
        times = {which: [] for which in models}
        for _ in range(3):
            for which, model in models.items():
                times[which].append(_step_times(model, config[which], texts, concurrency, 24))
        middle = {which: pd.DataFrame(found).median() for which, found in times.items()}
        for which, values in middle.items():
            for metric, value in values.items():
                bench.add("engine", which, LABEL, concurrency, metric, "ms", value, middle["default"][metric])
        ratio = middle["invariant"] / middle["default"]
        print(f"concurrency {concurrency}:", pd.DataFrame({**middle, "ratio": ratio}).round(3).T.to_string(), flush=True)
        bench.save(folder)
    counted = {}
    for which in ("default", "invariant"):
        requests = 1000 if time.time() - start < 0.5 * budget_seconds else 200
        counted[which] = variants(models[which], config[which], texts, 32, requests, 16)
        print(
            f"{which}: {counted[which][0]} of {counted[which][1]} texts differ from the prompt served alone, "
            f"{time.time() - start:.0f} s",
            flush=True,
        )
    for which, (differ, requests) in counted.items():
        bench.add("engine", which, LABEL, 32, "variant texts", "count", differ, counted["default"][0])
        bench.add("engine", which, LABEL, 32, "requests", "count", requests, counted["default"][1])
    bench.save(folder)
