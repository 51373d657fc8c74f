"""The launches that are profiled: points of the recorded benchmarks, with the same random inputs and default.

A case makes its inputs when asked and returns one call on them, ready to launch. Which number of programs a decode
launch uses was tuned by its benchmark, and is tuned again here (``tune``).
"""

import importlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Callable

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from ...common import BadInput
from ...schedules import BATCH_WIDE
from ..decode import bench as decode_bench
from ..decode.inputs import DecodeInputs
from ..gemm import bench as gemm_bench
from ..gemm.invariant import matmul
from ..nvfp4 import bench as nvfp4_bench
from ..nvfp4 import invariant as nvfp4
from ..nvfp4 import triton as nvfp4_default
from ..nvfp4.policy import policy
from ..prefill import RULE, DeviceTiles
from ..prefill import bench as prefill_bench
from ..prefill import launch as prefill
from ..timing import copies

GEMM_ROWS = (256, 1024, 4096)
BATCHES, MORE_BATCHES, LENGTHS = (1, 4, 16), (2, 8, 32, 64), decode_bench.LENGTHS
LATENT_HEADS, LATENT_TOPK, LATENT_BATCH = 64, 2048, 128
LATENT_SHAPE = f"h{LATENT_HEADS} d576 topk{LATENT_TOPK} full"
PREFILLS = ((1, 8192), (8, 1024), (1, 512), (1, 2048))
NVFP4 = ((4096, 4096),)  # (K, N)
NVFP4_ROWS = (1, 64)
PAGE = decode_bench.PAGE


@dataclass(frozen=True)
class Case:
    """kernel, policy, shape, m: as in the recorded tables. make: number of a choice, or None for the first, to a call; tune:
    the number of the fastest choice, None where there is none to make."""

    kernel: str
    policy: str
    shape: str
    m: int
    make: Callable[[int | None], Callable[[], object]]
    tune: Callable[[], int] | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.kernel, self.policy, self.shape, self.m

    def __str__(self) -> str:
        return f"{self.kernel}, {self.policy}, {self.shape}, {self.m}"


def all_cases(recorded: Path) -> list[Case]:
    """Every case, those whose costs matter most first. recorded: folder of ``decode.csv``, which says which rules to
    profile. FlashMLA's is there where its extension is found."""
    grouped = best_rule(recorded, lambda table: table["shape"].str.contains(" kv8 "))
    latent = best_rule(recorded, lambda table: (table["shape"] == LATENT_SHAPE) & (table.m == LATENT_BATCH))
    cases = [case for m in GEMM_ROWS for K, N in gemm_bench.SHAPES for case in _gemm(K, N, m)]
    cases += [*_latent(dict.fromkeys((BATCH_WIDE, "never-split", latent))), *_flashmla()]
    cases += [case for prompts, tokens in PREFILLS for case in _prefill(prompts, tokens)]
    cases += _many_grouped(BATCHES, grouped)
    cases += [case for m in NVFP4_ROWS for K, N in NVFP4 for case in _nvfp4(K, N, m)]
    return cases + _many_grouped(MORE_BATCHES, grouped)


def best_rule(recorded: Path, points: Callable[[pd.DataFrame], pd.Series]) -> str:
    """The free rule of least geometric mean of time among the recorded points that ``points`` marks; free-4 where none
    is recorded."""
    path = recorded / "decode.csv"
    if not path.exists():
        return "free-4"
    table = pd.read_csv(path)
    mine = table[(table.kernel == "triton") & (table.metric == "time") & points(table)]
    mine = mine[mine.policy.str.startswith("invariant-free")]
    if mine.empty:
        return "free-4"
    return mine.groupby("policy").ratio.apply(lambda r: np.log(r).mean()).idxmin().removeprefix("invariant-")


def _random(*shape: int, seed: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype)


def _gemm(K: int, N: int, m: int):
    def case(policy_name, call):
        def make(_):
            x, w = _random(m, K), _random(N, K, seed=1)
            return lambda: call(x, w)

        return Case("gemm", policy_name, f"N{N} K{K}", m, make)

    return case("default", F.linear), case("invariant", matmul)


def _nvfp4(K: int, N: int, m: int):
    arithmetic = policy("default").choose(m)

    def case(policy_name, call):
        def make(_):
            w = nvfp4_bench.random_weight(K, N, torch.Generator("cuda").manual_seed(1))
            x = _random(m, K, dtype=torch.float32)
            return lambda: call(x, w)

        return Case("nvfp4", policy_name, f"N{N} K{K}", m, make)

    yield case("default", lambda x, w: nvfp4_default.matmul(x, w, arithmetic))
    yield case("invariant", nvfp4.matmul)


def _decode(shape: str, batch: int, rule: str, inputs: Callable[[int], DecodeInputs], token_bytes: int) -> Case:
    def make(number):
        some = inputs(0)
        return decode_bench.choices(some)[number or 0].call(some, rule)

    def tune():
        first = inputs(0)
        rest = range(1, copies(sum(first.lengths(PAGE)) * token_bytes, 8))
        return decode_bench.fastest([first, *map(inputs, rest)], rule)[1]

    named = "default" if rule == BATCH_WIDE else f"invariant-{rule}"
    return Case("triton", named, shape, batch, make, tune)


def _many_grouped(batches, rule: str) -> list[Case]:
    kinds = [(batch, longest, kind) for batch in batches for longest in LENGTHS for kind in ("full", "ragged")]
    return [_grouped(*one, either) for one in kinds for either in (BATCH_WIDE, rule)]


def _grouped(batch: int, longest: int, kind: str, rule: str) -> Case:
    def inputs(seed):
        return decode_bench.random_inputs(_pool(), decode_bench.row_lengths(batch, longest, kind, seed), seed)

    return _decode(f"h64 kv8 d128 {longest} {kind}", batch, rule, inputs, 8 * 128 * 2 * 2)


def _latent(rules):
    def inputs(seed):
        return decode_bench.latent_inputs(_latent_pool(), LATENT_BATCH, seed, LATENT_HEADS, LATENT_TOPK)

    return [_decode(LATENT_SHAPE, LATENT_BATCH, rule, inputs, 576 * 2) for rule in rules]


@lru_cache
def _pool():
    pages = decode_bench.POOL_PAGES, decode_bench.PAGE, 8, 128
    return [_random(*pages, seed=seed) for seed in (1, 2)]


@lru_cache
def _latent_pool():
    return _random(decode_bench.LATENT_PAGES, PAGE, 1, 576, seed=1)


def _flashmla() -> list[Case]:
    # Looked up by name: FlashMLA's adapter lies in a room above the kernels.
    flashmla = importlib.import_module("batch_variance.hooks.flashmla")
    try:
        op = flashmla.load()
    except BadInput:
        return []

    def make(_):
        some = flashmla.random_flashmla_inputs(LATENT_BATCH, LATENT_HEADS, 576, LATENT_TOPK, pages=decode_bench.LATENT_PAGES)
        *_, metadata, splits = flashmla.decode(op, some)
        return lambda: flashmla.decode(op, some, metadata, splits)

    return [Case("flashmla", "default", LATENT_SHAPE, LATENT_BATCH, make)]


def _prefill(prompts: int, tokens: int):
    bench = prefill_bench
    shape = f"h{bench.HEADS} kv{bench.KV_HEADS} d{bench.D} {prompts} prompts of {tokens}"

    def default(_):
        return bench.library(bench.random_inputs(prompts, tokens, 0), prompts)

    def ours(_):
        some = bench.random_inputs(prompts, tokens, 0)
        tiles, out = DeviceTiles.upload(some, RULE), torch.empty_like(some.q)
        return lambda: prefill(some, tiles, out)

    yield Case("prefill", "default", shape, prompts * tokens, default)
    yield Case("prefill", f"invariant-{RULE}", shape, prompts * tokens, ours)
