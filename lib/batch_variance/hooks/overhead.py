"""What a probe costs the engine that it sits in: the same load served plain, with the probe, and again with the probe
gone.

Run as ``python -m batch_variance.hooks.overhead FOLDER`` it prints a table and writes it as CSV.
The engine runs in float32, on Triton kernels where there is a GPU and on torch's own where there is none.
"""

import argparse
import statistics
import time
from pathlib import Path

import pandas as pd
import torch

from ..common.data import write_atomically
from ..common.provenance import gpu_columns
from ..engine.client import Load, serve
from ..engine.model import Model, load_weights
from ..kernels.nvfp4.policy import policy
from ..kernels.sets import NativeKernels, TritonKernels
from .adapters import engine_sites

SAMPLING = {
    "re-run and solo": dict(axes=("rerun", "solo"), rows=1),
    "all axes in turn": dict(
        axes=("rerun", "contents", "composition", "solo", "position", "padding"), rows=1, spread=True
    ),
}


def measure(
    model: Model,
    prompts: list[list[int]],
    sites: tuple[str, ...] = ("attend", "linear"),
    every: int = 100,
    rounds: int = 9,
    tokens: int = 32,
) -> pd.DataFrame:
    """Serve one load again and again, alternating plain, probed and plain after the probe; medians and quartiles of
    seconds.

    Returns a row a site and sampling: site, sampling, every, rounds, calls, sampled, plain_s, probed_s, off_s
    (medians), ratio (median of the rounds' own ratios probed over plain, with its quartiles), off_ratio likewise,
    ms_per_sample.
    """
    load = Load(len(prompts), len(prompts), tokens, 0, 0)

    def seconds() -> tuple[float, list]:
        _settle(model)
        started = time.perf_counter()
        outputs = [r.output for r in serve(model, prompts, load).requests]
        _settle(model)
        return time.perf_counter() - started, outputs

    for _ in range(2):
        _, expected = seconds()
    rows = []
    for site in sites:
        for sampling, options in SAMPLING.items():
            times = {"plain": [], "probed": [], "off": []}
            calls = sampled = 0
            spent = 0.0
            for number in range(rounds + 1):
                plain, _ = seconds()
                with engine_sites(model.kernels, every=every, **options)[site] as probe:
                    probed, outputs = seconds()
                off, _ = seconds()
                if outputs != expected or probe.refusals:
                    raise RuntimeError(f"the probe at {site} changed the engine's tokens or refused: {probe.refusals}")
                if number:  # the first round compiles what only the probe's batches need
                    for name, value in zip(times, (plain, probed, off)):
                        times[name].append(value)
                    calls, sampled, spent = calls + probe.calls, sampled + probe.sampled, spent + probe.seconds
            ratio = sorted(p / q for p, q in zip(times["probed"], times["plain"]))
            off_ratio = sorted(p / q for p, q in zip(times["off"], times["plain"]))
            rows.append(
                {
                    "site": site,
                    "sampling": sampling,
                    "every": every,
                    "rounds": rounds,
                    "calls": calls,
                    "sampled": sampled,
                    **{f"{name}_s": statistics.median(values) for name, values in times.items()},
                    "ratio": statistics.median(ratio),
                    "ratio_low": ratio[len(ratio) // 4],
                    "ratio_high": ratio[-1 - len(ratio) // 4],
                    "off_ratio": statistics.median(off_ratio),
                    "off_low": off_ratio[len(ratio) // 4],
                    "off_high": off_ratio[-1 - len(ratio) // 4],
                    "ms_per_sample": 1000 * spent / max(sampled, 1),
                }
            )
    return pd.DataFrame(rows)


def _settle(model: Model) -> None:
    if model.kernels.device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a Llama model's folder in the Hugging Face layout")
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    weights = load_weights(given.folder, torch.device("cuda" if cuda else "cpu"))
    model = Model(weights, TritonKernels() if cuda else NativeKernels(), policy("default"))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, weights.shape.vocabulary, (24,), generator=generator).tolist() for _ in range(8)]
    table = measure(model, prompts, rounds=given.rounds, tokens=given.tokens).assign(
        tier="live-gpu" if cuda else "cpu-native"
    )
    print(table.to_string(index=False))
    if given.out:
        write_atomically(given.out, lambda path: table.assign(**gpu_columns()).to_csv(path, index=False))


if __name__ == "__main__":
    main()
