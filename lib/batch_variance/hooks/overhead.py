"""What a probe costs the engine that it sits in: the same load served in turn without a probe and with one.

Run as ``python -m batch_variance.hooks.overhead FOLDER`` it prints a table and writes it as CSV.
The engine runs in float32, on Triton kernels where there is a GPU and on torch's own where there is none.
Two measures stand side by side: the clock's, which takes in everything and varies with whatever else goes on, and the
probe's own account of its seconds, which is steady, and on a GPU counts as the probe's own the engine's queued work
that it waits for. A probe does not time the calls that it does not sample; what such a call costs is measured beside.
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
from .probe import CallSiteProbe

SITES = ("attend", "linear", "rms_norm")
SAMPLING = {
    "re-run and solo": dict(axes=("rerun", "solo"), rows=1),
    "re-run and solo, later": dict(axes=("rerun", "solo"), rows=1, controls="later"),
    "re-run and solo, at most 2%": dict(axes=("rerun", "solo"), rows=1, max_share=0.02),
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
    samplings: tuple[str, ...] = tuple(SAMPLING),
) -> pd.DataFrame:
    """Serve one load again and again, alternating without the probe and with it; medians and quartiles of seconds.

    The run after a probed one ("off") is also the run before the next ("plain"). With 32 tokens a run takes 33 steps,
    in which one call in 100 is 10 samples at `attend`; the rounds are added up, and their spread is what says how far
    the clock can be relied on, so that nine short ones tell more than one long one.

    A probe stays the same over the rounds, as in a serving engine, and its first controls are made in the round that is
    not counted. Returns a row a site and sampling: site, sampling, every, rounds, calls, sampled, passed_over (calls
    that a limit on the share cost), plain_s, probed_s, off_s (medians), ratio (median of the rounds' own ratios probed
    over plain, with its quartiles), off_ratio likewise, share likewise (the probe's seconds, those of calls not sampled
    included, over the engine's in the probed run, that run less those seconds), ms_per_sample, later_ms_per_sample (of
    controls made after the probed run, which none of the other columns holds; 0 where they are made at once),
    us_per_call_not_sampled, samples_per_s (samples a second of the engine's time).
    """
    load, unsampled = Load(len(prompts), len(prompts), tokens, 0, 0), unsampled_seconds()

    def seconds() -> tuple[float, list]:
        _settle(model)
        started = time.perf_counter()
        outputs = [r.output for r in serve(model, prompts, load).requests]
        _settle(model)
        return time.perf_counter() - started, outputs

    for _ in range(2):
        plain, expected = seconds()
    rows = []
    for site in sites:
        for sampling in samplings:
            times = {"plain": [], "probed": [], "off": []}
            share, engine, counted = [], 0.0, None
            probe = engine_sites(model.kernels, every=every, **SAMPLING[sampling])[site]
            for number in range(rounds + 1):
                before = _counts(probe)
                with probe:
                    probed, outputs = seconds()
                made, sampled, _, spent, _ = (now - then for now, then in zip(_counts(probe), before))
                spent += (made - sampled) * unsampled
                off, _ = seconds()
                if outputs != expected or probe.refusals:
                    raise RuntimeError(f"the probe at {site} changed the engine's tokens or refused: {probe.refusals}")
                if number:  # the first round compiles what only the probe's batches need
                    for name, value in zip(times, (plain, probed, off)):
                        times[name].append(value)
                    share.append(spent / (probed - spent))
                    engine += probed - spent
                else:
                    counted = _counts(probe)
                plain = off
            calls, sampled, passed, spent, later = (now - before for now, before in zip(_counts(probe), counted))
            ratio = [p / q for p, q in zip(times["probed"], times["plain"])]
            off_ratio = [p / q for p, q in zip(times["off"], times["plain"])]
            rows.append(
                {
                    "site": site,
                    "sampling": sampling,
                    "every": every,
                    "rounds": rounds,
                    "calls": calls,
                    "sampled": sampled,
                    "passed_over": passed,
                    **{f"{name}_s": statistics.median(values) for name, values in times.items()},
                    **_spread("ratio", "ratio", ratio),
                    **_spread("off_ratio", "off", off_ratio),
                    **_spread("share", "share", share),
                    "ms_per_sample": 1000 * spent / max(sampled, 1),
                    "later_ms_per_sample": 1000 * later / max(sampled, 1),
                    "us_per_call_not_sampled": 1e6 * unsampled,
                    "samples_per_s": sampled / engine,
                }
            )
    return pd.DataFrame(rows)


def unsampled_seconds(calls: int = 20_000, repeats: int = 7) -> float:
    """What a probe adds to a call that it does not sample: the median of ``repeats`` over a bare call, nothing else between."""

    class Engine:
        def kernel(self, x, weight):
            return x

    engine, arguments = Engine(), (torch.zeros(1, 1), torch.zeros(1, 1))

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(calls):
            engine.kernel(*arguments)
        return time.perf_counter() - started

    added = []
    for _ in range(repeats):
        bare = seconds()
        with CallSiteProbe((engine, "kernel"), {"x": 0}, every=calls + 1, controls="later") as probe:
            engine.kernel(*arguments)  # the first is sampled
            added.append((seconds() - bare) / calls)
            assert probe.sampled == 1
    return statistics.median(added)


def _counts(probe: CallSiteProbe) -> tuple[float, ...]:
    return probe.calls, probe.sampled, probe.passed_over, probe.seconds, probe.control_seconds


def _spread(name: str, short: str, values: list[float]) -> dict[str, float]:
    """Median and quartiles, in columns of these names."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return {name: statistics.median(ordered), f"{short}_low": ordered[quarter], f"{short}_high": ordered[-1 - quarter]}


def _settle(model: Model) -> None:
    if model.kernels.device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a Llama model's folder in the Hugging Face layout")
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--site", action="append", choices=SITES, help="may be given again; default: attend and linear")
    parser.add_argument("--sampling", action="append", choices=SAMPLING, help="may be given again; default: all")
    given = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    weights = load_weights(given.folder, torch.device("cuda" if cuda else "cpu"))
    model = Model(weights, TritonKernels() if cuda else NativeKernels(), policy("default"))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, weights.shape.vocabulary, (24,), generator=generator).tolist() for _ in range(8)]
    sites = tuple(given.site or ("attend", "linear"))
    samplings = tuple(given.sampling or SAMPLING)
    table = measure(model, prompts, sites, rounds=given.rounds, tokens=given.tokens, samplings=samplings)
    table = table.assign(tier="live-gpu" if cuda else "cpu-native")
    print(table.to_string(index=False))
    if given.out:
        write_atomically(given.out, lambda path: table.assign(**gpu_columns()).to_csv(path, index=False))


if __name__ == "__main__":
    main()
