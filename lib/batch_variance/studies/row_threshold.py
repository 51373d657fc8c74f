"""Does a matmul that picks its kernel by row count change greedy texts, by what, and does forcing one path end it?

The mechanism of gllm issue 98 on a real model: an engine serves the same prompts at several concurrencies under each
dispatch policy; two runs, A and B, differ only in arrival jitter. The base operations under the policies are
row-invariant, so what varies is the policy's doing; `base_operations` is the control that proves it.
"""

import itertools
import multiprocessing
import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator
from tqdm.auto import tqdm

from ..common import BadInput, Rate, resolve_device
from ..common.devices import simulated_tier
from ..engine import ChatTokenizer, EngineConfig, Load, Model, Run, hf_folder, load_weights, serve
from ..engine.experts import perplexity, prompt_logits, python_docs, split_for
from ..kernels.nvfp4 import GEMM, GEMV, POLICY_NAMES, policy
from ..kernels.nvfp4.reference import matmul_float64
from ..kernels.sets import KernelSet, NativeKernels, kernel_set
from ..kernels.tiles import differing_rows
from ..numerics import row_scaled_ulp, ulp_distance
from .recordings import recorded_source, recorded_table, save_tables, without_columns  # noqa: F401 (recorded_source: for the notebook)
from .served_model import Device, ServedModel
from .sources import named
from .texts import first_divergence, read_prompts

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65)
RECORDED = "row_threshold"
RECORDED_TABLES = ("variants", "pairs", "crossings", "decomposition", "agreement", "control", "quality")


class Parameters(ServedModel):
    """Parameters of notebook 01."""

    threshold: int
    policies: list[str]
    concurrencies: list[int]
    cycles: int = Field(ge=1)
    tokens: int = Field(ge=1)
    native_tokens: int = Field(ge=1)
    perplexity_tokens: int = Field(ge=2)
    prompts: str
    seed: int = Field(ge=0)
    device: Device
    record: str

    @field_validator("threshold")
    @classmethod
    def _threshold(cls, value: int) -> int:
        policy("default", value)
        return value

    @field_validator("policies")
    @classmethod
    def _policies(cls, value: list[str]) -> list[str]:
        for name in value:
            policy(name)
        if not {"default", "force-gemv"} <= set(value):
            raise ValueError("default and force-gemv must both be among them: each is the other's control.")
        if len(set(value)) < len(value):
            raise ValueError("a policy is named twice: name each once.")
        return value

    @field_validator("concurrencies")
    @classmethod
    def _concurrencies(cls, value: list[int]) -> list[int]:
        if 1 not in value or min(value) < 1 or len(set(value)) < len(value) or len(value) < 2:
            raise ValueError("give different whole numbers from 1: 1 (the solo reference) and at least one above it.")
        return value

    @field_validator("prompts")
    @classmethod
    def _prompts(cls, value: str) -> str:
        read_prompts(value)
        return value


@dataclass
class Setup:
    """What every part of the study uses: the prompts as token ids, the kernels, and the weights under study."""

    p: Parameters
    folder: Path
    tokenizer: ChatTokenizer
    texts: list[str]
    prompts: list[list[int]]
    kernels: KernelSet
    weights: object
    dense: object

    @property
    def tier(self) -> str:
        return simulated_tier(self.kernels.device)

    def model(self, name: str) -> Model:
        return Model(self.weights, self.kernels, policy(name, self.p.threshold))

    def first_ffn(self, layer: int):
        """A layer's FFN, or its first expert."""
        ffn = self.weights.layers[layer].ffn
        return ffn if self.p.ffn == "dense" else ffn.ffns[0]

    @cached_property
    def ffn_inputs(self) -> dict[int, torch.Tensor]:
        """float32 [rows, hidden] that the FFNs of every third layer see on the first prompts, by layer."""
        shape = self.weights.shape
        kept: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(1, shape.layers, 3)}

        def observe(layer: int, hidden: torch.Tensor) -> None:
            if layer + 1 in kept:
                following = self.weights.layers[layer + 1]
                kept[layer + 1].append(self.kernels.rms_norm(hidden, following.ffn_norm, shape.rms_eps))

        for prompt in self.prompts[:4]:
            prompt_logits(self.model("force-gemv"), prompt, observe)
        return {layer: torch.cat(parts) for layer, parts in kept.items() if parts}


def prepare(p: Parameters) -> Setup:
    """Load the model, quantize its FFN to NVFP4 and, for ``ffn = "moe"``, cut it into experts.

    Prompts go through the chat template with an empty system message, so that most are shorter than gllm's threshold:
    alone, their prefill takes the GEMV. Raises BadInput as the loader does.
    """
    device = resolve_device(p.device)
    folder = hf_folder(p.model)
    tokenizer, texts = ChatTokenizer(folder), read_prompts(p.prompts)
    dense = load_weights(folder, device)
    split = split_for(dense, folder, p.model, p.expert_split, p.experts, p.top_k) if p.ffn == "moe" else None
    weights = load_weights(folder, device, nvfp4=True, split=split)
    prompts = [tokenizer.chat(text, system="") for text in texts]
    return Setup(p, folder, tokenizer, texts, prompts, kernel_set(device), weights, dense)


# --- The phenomenon on the reader's own CPU ---------------------------------------------------------------------------


def native_texts(setup: Setup) -> pd.DataFrame:
    """Serve every prompt alone and all together on the CPU's own matmul, by dtype and with oneDNN on or off.

    Returns a row a (dtype, onednn, prompt): text_changed, tokens compared, margins_changed (tokens before the first
    divergence whose top-two margin moved by a bit), first_divergence (-1: none), rerun_same.
    """
    if not torch.backends.mkldnn.is_available():
        raise BadInput("this torch was built without oneDNN: the intervention on it cannot be made here.")
    rows = []
    for dtype, onednn in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        weights = load_weights(setup.folder, torch.device("cpu"), dtype=dtype)
        model = Model(weights, NativeKernels(), policy("default"))
        # allow_tf32 is Intel GPUs' and warns without one; None leaves it alone.
        with torch.backends.mkldnn.flags(enabled=onednn, allow_tf32=None):
            run = partial(_native_run, model, setup)
            alone, together, again = run(1), run(len(setup.prompts)), run(len(setup.prompts))
        for one, many, repeat in zip(alone, together, again):
            split = first_divergence(one.output, many.output)
            shared = len(one.output) if split < 0 else split
            moved = sum(x != y for x, y in zip(one.margins[:shared], many.margins[:shared]))
            rows.append({
                "dtype": str(dtype).removeprefix("torch."), "onednn": "on" if onednn else "off", "prompt": one.prompt,
                "text_changed": split >= 0, "first_divergence": split, "tokens": shared, "margins_changed": moved,
                "exact_ties": sum(margin == 0 for margin in one.margins), "rerun_same": many.output == repeat.output,
            })
    return pd.DataFrame(rows)


def _native_run(model: Model, setup: Setup, concurrency: int):
    load = Load(concurrency, len(setup.prompts), setup.p.native_tokens, seed=0, jitter=0)
    return serve(model, setup.prompts, load, _config(setup, load, max_rows=4096)).requests


def _config(setup: Setup, load: Load, **changes) -> EngineConfig:
    """A KV cache no larger than the load needs; every request runs to its full length."""
    longest = max(map(len, setup.prompts)) + load.max_tokens
    return EngineConfig(max_requests=load.concurrency, max_length=longest, ignore_eos=True, **changes)


def native_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a condition: texts changed of how many, with interval; tokens whose margin moved; exact ties."""
    rows = []
    for (dtype, onednn), part in frame.groupby(["dtype", "onednn"], sort=False):
        rate = Rate(int(part.text_changed.sum()), len(part))
        rows.append({
            "dtype": dtype, "oneDNN": onednn, "texts": len(part), "texts changed": rate.events, "low": rate.interval[0],
            "high": rate.interval[1], "tokens compared": int(part.tokens.sum()), "margins moved": int(part.margins_changed.sum()),
            "exact ties": int(part.exact_ties.sum()), "re-run same": bool(part.rerun_same.all()),
        })
    return named(pd.DataFrame(rows).sort_values(["dtype", "oneDNN"], ascending=[False, False]).reset_index(drop=True), "native")


# --- Controls ---------------------------------------------------------------------------------------------------------


def base_operations(setup: Setup) -> pd.DataFrame:
    """The negative control: rows alone against rows among others, for every operation under the policies.

    Its positive control, the last row, is a matmul with a planted fault: it cuts K in two when more than one row is
    present. Returns operation, shape, rows compared, rows that differ, planted.
    """
    shape, kernels = setup.weights.shape, setup.kernels
    layer = setup.weights.layers[0]
    ffn = setup.first_ffn(0)
    generator = torch.Generator().manual_seed(setup.p.seed)

    def random(width: int) -> torch.Tensor:
        return torch.randn(24, width, generator=generator).to(kernels.device)

    matmuls = {"qkv": layer.qkv, "attention output": layer.output, "logits": setup.weights.head}
    if setup.p.ffn == "moe":
        matmuls["router"] = layer.ffn.router
    cases = [(name, tuple(w.shape), partial(kernels.linear, weight=w), random(w.shape[1])) for name, w in matmuls.items()]
    for arithmetic, (name, w) in itertools.product((GEMV, GEMM), {"gate and up": ffn.gate_up, "down": ffn.down}.items()):
        multiply = partial(kernels.nvfp4, weight=w, arithmetic=arithmetic)
        cases.append((f"{name}, {arithmetic.name}", tuple(w.weight.shape), multiply, random(w.weight.shape[1])))
    norm = partial(kernels.rms_norm, weight=layer.ffn_norm, eps=shape.rms_eps)
    cases.append(("RMSNorm", (shape.hidden,), norm, random(shape.hidden)))
    cases.append(("attention", (shape.heads, shape.head_dim), *_attention_case(setup, generator)))
    planted = partial(_planted_fault, kernels, layer.output)
    cases.append(("planted fault", tuple(layer.output.shape), planted, random(layer.output.shape[1])))
    rows = []
    for name, size, operation, x in cases:
        with _one_thread(setup):
            differ, compared = differing_rows(operation, x, SIZES, setup.p.seed)
        rows.append({"operation": name, "shape": " x ".join(map(str, size)), "rows compared": compared, "rows that differ": differ,
                     "planted": name == "planted fault"})
    return pd.DataFrame(rows)


def _attention_case(setup: Setup, generator: torch.Generator):
    shape, device = setup.weights.shape, setup.kernels.device
    k_pages, v_pages = (torch.randn(64, 16, shape.kv_heads, shape.head_dim, generator=generator).to(device) for _ in "kv")
    tables = torch.stack([torch.randperm(64, generator=generator)[:8] for _ in range(24)]).to(device)
    lengths = torch.randint(0, 129, (24,), generator=generator).to(device)
    q = torch.randn(24, shape.heads, shape.head_dim, generator=generator).to(device)

    def operation(rows: torch.Tensor) -> torch.Tensor:
        pick = rows[:, 0].to(torch.int64)
        return setup.kernels.attend(q[pick], k_pages, v_pages, tables[pick], lengths[pick]).flatten(1)

    return operation, torch.arange(24, dtype=torch.float32, device=device).unsqueeze(1)


def _planted_fault(kernels: KernelSet, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A matmul that cuts K in two when several rows are present: what a split-K heuristic does."""
    if x.shape[0] == 1:
        return kernels.linear(x, weight)
    half = x.shape[1] // 2
    return kernels.linear(x[:, :half].contiguous(), weight[:, :half].contiguous()) + kernels.linear(
        x[:, half:].contiguous(), weight[:, half:].contiguous())


def quality(setup: Setup) -> pd.DataFrame:
    """Perplexity on Python's own help topics: the dense model as loaded, and the model under study."""
    text = python_docs(setup.tokenizer, 20_000, setup.p.perplexity_tokens)
    models = {"dense, " + str(setup.dense.embedding.dtype).removeprefix("torch."): Model(setup.dense, setup.kernels, policy("default"))}
    models[setup.weights.label] = setup.model("force-gemv")
    return pd.DataFrame([{"weights": name, "perplexity": perplexity(model, text), "tokens": len(text)} for name, model in models.items()])


# --- Serving under each policy ----------------------------------------------------------------------------------------


@dataclass
class Results:
    """Tidy tables of the serving runs. requests: a row a request; matmuls: a row a (cell, rows, decode rows, kernel)."""

    requests: pd.DataFrame
    matmuls: pd.DataFrame


def serve_policies(setup: Setup) -> Results:
    """Runs A and B of every (policy, concurrency). Concurrency 1 is the reference each request is compared with."""
    p = setup.p
    cells = list(itertools.product(p.policies, sorted(p.concurrencies), "AB"))
    longest_first = sorted(cells, key=lambda cell: -cell[1])
    served = {}
    with tqdm(total=sum(_load(setup, cell).requests for cell in cells), desc="requests", mininterval=1.0) as bar:
        with _one_thread(setup), _pool(setup, len(cells)) as pool:
            for cell, found in zip(longest_first, pool.map(_Serving(setup), longest_first)):
                served[cell] = found
                bar.update(len(found[0]))
    requests, matmuls = ([row for cell in cells for row in served[cell][part]] for part in (0, 1))
    solo = {(r["policy"], r["prompt"]): r["tokens"] for r in requests if (r["concurrency"], r["run"]) == (1, "A")}
    for row in requests:
        row["first_divergence"] = first_divergence(solo[row["policy"], row["prompt"]].split(), row["tokens"].split())
    return Results(pd.DataFrame(requests), pd.DataFrame(matmuls))


def _pool(setup: Setup, cells: int) -> Executor:
    """Workers for independent cells. On a CPU the matmuls are too small to share, so each core takes cells of its own; on CUDA
    launching from Python is the bottleneck, so several processes share the GPU."""
    cores = os.cpu_count() or 1
    if setup.kernels.device.type == "cpu":
        return ThreadPoolExecutor(cores)
    return ProcessPoolExecutor(max(1, min(cores - 2, cells)), mp_context=multiprocessing.get_context("spawn"))


class _Serving:
    """Serves a (policy, concurrency, run). Pickled to another process it takes the parameters along, not the weights,
    and loads them once there."""

    _loaded: dict[str, Setup] = {}

    def __init__(self, setup: Setup):
        self._setup, self._parameters = setup, setup.p

    def __getstate__(self) -> dict:
        return {"_parameters": self._parameters}

    @property
    def setup(self) -> Setup:
        if "_setup" in self.__dict__:
            return self._setup
        key = self._parameters.model_dump_json()
        if key not in self._loaded:
            self._loaded[key] = prepare(self._parameters)
        return self._loaded[key]

    def __call__(self, cell: tuple[str, int, str]) -> tuple[list[dict], list[dict]]:
        """Rows of the requests, without their first divergence, and of the matmuls' shapes."""
        setup, load = self.setup, _load(self.setup, cell)
        found = serve(setup.model(cell[0]), setup.prompts, load, _config(setup, load))
        named = dict(zip(("policy", "concurrency", "run"), cell))
        return _request_rows(found, named), _matmul_rows(found, named)


@contextmanager
def _one_thread(setup: Setup):
    """On a CPU, one thread an operation, as the control and the serving both run; the old number afterwards."""
    before = torch.get_num_threads()
    if setup.kernels.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(setup: Setup, cell: tuple[str, int, str]) -> Load:
    """Runs A and B of a concurrency differ in the arrival seed alone; the policies share both."""
    _, concurrency, run = cell
    requests = max(len(setup.prompts), setup.p.cycles * concurrency)
    return Load(concurrency, requests, setup.p.tokens, seed=setup.p.seed * 1000 + 2 * concurrency + (run == "B"))


def _request_rows(run: Run, cell: dict) -> list[dict]:
    beside: dict[int, list[int]] = {}
    for step in run.steps:
        for number, _, _ in step.rows:
            beside.setdefault(number, []).append(step.co_resident_rows)
    texts: dict[int, list[list[int]]] = {}
    rows = []
    for request in run.requests:
        known = texts.setdefault(request.prompt, [])
        if request.output not in known:
            known.append(request.output)
        rows.append({
            **cell, "request": request.number, "prompt": request.prompt, "variant": known.index(request.output),
            "co_resident_rows": float(np.mean(beside[request.number])), "smallest_margin": min(request.margins),
            "tokens": " ".join(map(str, request.output)),
        })
    return rows


def _matmul_rows(run: Run, cell: dict) -> list[dict]:
    counts: dict[tuple, int] = {}
    for step in run.steps:
        for m in step.matmuls:
            counts[m.rows, m.decode_rows, m.kernel] = counts.get((m.rows, m.decode_rows, m.kernel), 0) + 1
    return [{**cell, "rows": r, "decode_rows": d, "kernel": k, "ffns": n} for (r, d, k), n in sorted(counts.items())]


def variants(requests: pd.DataFrame) -> pd.DataFrame:
    """The issue's table: a row a (policy, concurrency, run) with requests, prompts with more than one greedy output,
    most variants of one prompt, and requests that differ from the same prompt served alone, with interval."""
    rows = []
    for (name, concurrency, run), part in requests.groupby(["policy", "concurrency", "run"], sort=False):
        outputs = part.groupby("prompt").variant.nunique()
        rate = Rate(int((part.first_divergence >= 0).sum()), len(part))
        rows.append({
            "policy": name, "concurrency": concurrency, "run": run, "requests": len(part), "prompts": len(outputs),
            "prompts with more than one output": int((outputs > 1).sum()), "most variants": int(outputs.max()),
            "differ from alone": rate.events, "low": rate.interval[0], "high": rate.interval[1],
            "co-resident rows": round(float(part.co_resident_rows.mean()), 1),
        })
    return named(pd.DataFrame(rows), "variants")


def pairs(requests: pd.DataFrame) -> pd.DataFrame:
    """Run A against run B request by request: requests, how many differ, with interval."""
    rows = []
    for (name, concurrency), part in requests.groupby(["policy", "concurrency"], sort=False):
        wide = part.pivot(index="request", columns="run", values="tokens")
        rate = Rate(int((wide.A != wide.B).sum()), len(wide))
        rows.append({"policy": name, "concurrency": concurrency, "requests": rate.trials, "differ between A and B": rate.events,
                     "low": rate.interval[0], "high": rate.interval[1]})
    return pd.DataFrame(rows)


def crossings(matmuls: pd.DataFrame, threshold: int) -> pd.DataFrame:
    """How often an FFN ran above the threshold, and how the rows got there.

    decode alone: its decode rows were already over; through prefill: only with prefill rows. with_decode: crossings
    that carried decode rows along. Counts are FFNs (one a layer, or one an expert and layer) over all runs.
    """
    rows = []
    for (name, concurrency), part in matmuls.groupby(["policy", "concurrency"], sort=False):
        over = part[part.rows > threshold]
        alone = over.decode_rows > threshold
        rows.append({
            "policy": name, "concurrency": concurrency, "FFNs": int(part.ffns.sum()), "over the threshold": int(over.ffns.sum()),
            "by decode rows alone": int(over.ffns[alone].sum()), "through prefill": int(over.ffns[~alone].sum()),
            "of these with decode rows": int(over.ffns[~alone & (over.decode_rows > 0)].sum()), "kernels": ", ".join(sorted(set(part.kernel))),
        })
    return named(pd.DataFrame(rows), "crossings")


def total_variants(table: pd.DataFrame, name: str) -> tuple[int, int, int]:
    """(prompts with more than one output, requests that differ from alone, requests) over a policy's cells above concurrency 1."""
    part = table[(table.policy == name) & (table.concurrency > 1)]
    return (int(part["prompts with more than one output"].sum()), int(part["differ from alone"].sum()), int(part.requests.sum()))


# --- What the two paths' difference is made of ------------------------------------------------------------------------

FACTORS = {"activation rounding": "activations", "weight rounding": "tensor_scale", "order of additions": "order"}


def decompose(setup: Setup) -> pd.DataFrame:
    """Switch each difference between the two paths on alone, and off alone, on the model's real FFN inputs.

    The matmul is the gate and up projection, on `Setup.ffn_inputs`. Weight rounding is moved by where the tensor scale is
    folded in: applied to the sum, the unpacked weight is exact in bfloat16. Returns a row a (layer, step) with the
    distances to the GEMV's output (share of values with other bits, median ULP, median and largest row-scaled ULP,
    relative size of the difference) and the output's relative error against float64.
    """
    steps = {"GEMV, run again": GEMV}
    for label, field in FACTORS.items():
        steps[f"only {label}"] = GEMV.but("variant", **_from(GEMM, field))
    for label, field in FACTORS.items():
        steps[f"all but {label}"] = GEMM.but("variant", **_from(GEMV, field))
    steps["GEMM (all three)"] = GEMM
    rows = []
    for layer, x in setup.ffn_inputs.items():
        weight = setup.first_ffn(layer).gate_up
        base, exact = setup.kernels.nvfp4(x, weight, GEMV), matmul_float64(x, weight.weight)
        size = exact.norm()
        for step, arithmetic in steps.items():
            y = setup.kernels.nvfp4(x, weight, arithmetic)
            scaled = row_scaled_ulp(base, y)
            rows.append({
                "layer": layer, "step": step, "values": y.numel(), "other_bits": float((ulp_distance(base, y) > 0).double().mean()),
                "median_ulp": int(ulp_distance(base, y).median()), "median_row_scaled_ulp": float(scaled.median()),
                "largest_row_scaled_ulp": float(scaled.max()), "relative_difference": float((y - base).double().norm() / size),
                "relative_error": float((y.double() - exact).norm() / size),
            })
    return pd.DataFrame(rows)


def _from(arithmetic, field: str) -> dict:
    """The choices that one factor moves. Weight rounding is two of them: the dtype and where the scale goes."""
    names = ("weights", "tensor_scale") if field == "tensor_scale" else (field,)
    return {name: getattr(arithmetic, name) for name in names}


def path_agreement(setup: Setup) -> pd.DataFrame:
    """For each policy with two paths, how far they lie apart on the same inputs: the answer to the issue's second question.

    Returns policy, values, share with other bits, median and largest row-scaled ULP, relative difference.
    """
    rows = []
    for name in POLICY_NAMES:
        rules = policy(name, setup.p.threshold).rules
        if len(rules) < 2:
            continue
        for layer, x in setup.ffn_inputs.items():
            weight = setup.first_ffn(layer).gate_up
            below, above = (setup.kernels.nvfp4(x, weight, rule.arithmetic) for rule in rules)
            scaled = row_scaled_ulp(below, above)
            rows.append({
                "policy": name, "layer": layer, "values": below.numel(),
                "other_bits": float((ulp_distance(below, above) > 0).double().mean()),
                "median_row_scaled_ulp": float(scaled.median()), "largest_row_scaled_ulp": float(scaled.max()),
                "relative_difference": float((below - above).double().norm() / below.double().norm()),
            })
    return pd.DataFrame(rows)


# --- Recorded results -------------------------------------------------------------------------------------------------


_STAMP = ("ffn", "model", "label", "threshold")


def save(setup: Setup, tables: dict[str, pd.DataFrame], folder: str | Path) -> list[Path]:
    """Write each table as ``<folder>/row_threshold_<ffn>_<name>.csv`` with what ran beside every row; "" writes none."""
    stamp = dict(zip(_STAMP, (setup.p.ffn, setup.p.model, setup.weights.label, setup.p.threshold)))
    return save_tables(f"{RECORDED}_{setup.p.ffn}", tables, folder, stamp)


def recorded(name: str, ffn: str) -> pd.DataFrame:
    """A table recorded on a GPU, empty where none is committed."""
    return recorded_table(f"{RECORDED}_{ffn}", name)


def unstamped(frame: pd.DataFrame) -> pd.DataFrame:
    """A recorded table without the columns that say what ran."""
    return without_columns(frame, *_STAMP, "solo_texts_differ")
