"""FlashMLA's own sparse decode kernel, driven from here: its caches, its default schedule, and ours passed in.

``batch_invariant_decode`` is a batch-invariant mode for the unmodified kernel. FlashMLA lets a caller hand back the
schedule of an earlier call; handing it one that cuts every row by a rule of the row's own length makes a row's bits
independent of its batchmates. Nothing of FlashMLA is contained here: the kernel comes from an installed vLLM or from a
path to its extension. Measured on an NVIDIA H200 only, and refused on other architectures.
"""

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

import torch

from ..common import BadInput
from ..kernels.decode import Cache, DecodeInputs
from ..schedules import decode_lengths, flashmla_calls, num_sm_parts

EXTENSION = "_flashmla_C.abi3.so"
BLOCK = 64
RECOMMENDED_RULE = "root-length"  # the least costly measured over batches of 1 to 512: studies.split_scheduler


@dataclass(frozen=True)
class Layout:
    """An FP8 cache layout. Of ``d_qk`` numbers a token, all but the last 64 are e4m3 with one power-of-two scale for
    each ``tile`` of them; the last 64 stay bf16."""

    name: str
    d_qk: int
    tile: int
    token_bytes: int

    @property
    def quantised(self) -> int:
        return self.d_qk - 64


V32 = Layout("v32", 576, 128, 656)  # scales (float32) lie inside each token's bytes
MODEL1 = Layout("model1", 512, 64, 584)  # scales (e8m0, 7 and a padding byte) lie after a page's tokens
LAYOUTS = {layout.d_qk: layout for layout in (V32, MODEL1)}


def write_cache(latent: torch.Tensor) -> torch.Tensor:
    """Quantise ``[pages, page_size, d_qk]`` (d_qk 576 or 512) to FlashMLA's FP8 layout of that width.

    Returns uint8 ``[pages, page_size, 1, bytes per token]``. Scales are the smallest powers of two that keep e4m3 in
    range.
    Raises BadInput for another width.
    """
    layout = _layout_of(latent.shape[-1])
    pages, size, _ = latent.shape
    wide = latent[..., : layout.quantised].float().unflatten(-1, (-1, layout.tile))
    exponent = torch.ceil(torch.log2(wide.abs().amax(-1).clamp(min=1e-4) / 448.0))
    codes = (wide / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    rope = latent[..., layout.quantised :].to(torch.bfloat16).contiguous().view(torch.uint8)
    if layout is V32:
        scales = torch.exp2(exponent).float().contiguous().view(torch.uint8)
        return torch.cat([codes, scales, rope], dim=-1)[:, :, None].contiguous()
    scales = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1))
    return torch.cat([torch.cat([codes, rope], -1).flatten(1), scales.flatten(1)], -1).view(
        pages, size, 1, layout.token_bytes
    )


def read_cache(cache: torch.Tensor, d_qk: int) -> torch.Tensor:
    """The bf16 values ``[pages, page_size, d_qk]`` that a cache holds (exact: e4m3 times a power of two)."""
    layout = _layout_of(d_qk)
    pages, size = cache.shape[:2]
    if layout is V32:
        codes, scales, rope = cache[:, :, 0].split([layout.quantised, 16, 128], dim=-1)
        scales = scales.contiguous().view(torch.float32)
    else:
        flat = cache.view(pages, -1)
        codes, rope = flat[:, : size * 576].view(pages, size, 576).split([layout.quantised, 128], dim=-1)
        scales = torch.exp2(flat[:, size * 576 :].view(pages, size, 8)[..., :7].float() - 127)
    wide = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, layout.tile)) * scales[..., None]
    return torch.cat([wide.flatten(-2).to(torch.bfloat16), rope.contiguous().view(torch.bfloat16)], dim=-1)


def _layout_of(d_qk: int) -> Layout:
    if d_qk not in LAYOUTS:
        raise BadInput(f"d_qk is {d_qk}: FlashMLA's FP8 caches hold 576 (V3.2) or 512 numbers a token.")
    return LAYOUTS[d_qk]


def load(path: str | Path | None = None) -> Callable:
    """FlashMLA's ``sparse_decode_fwd`` op, from ``path``, from ``BATCH_VARIANCE_FLASHMLA``, or from an installed vLLM.

    path: the extension's file (``_flashmla_C.abi3.so``) or its folder. Raises BadInput where there is none, or it does
    not load.
    """
    given = path or os.environ.get("BATCH_VARIANCE_FLASHMLA")
    if given:
        file = Path(given) / EXTENSION if Path(given).is_dir() else Path(given)
    else:
        found = importlib.util.find_spec("vllm")
        if found is None:
            raise BadInput(
                "FlashMLA was not found: install vLLM with CUDA, or name its _flashmla_C.abi3.so in BATCH_VARIANCE_FLASHMLA."
            )
        file = Path(list(found.submodule_search_locations)[0]) / EXTENSION
    if not file.is_file():
        raise BadInput(f"{file} does not exist: give the path of FlashMLA's extension, {EXTENSION}.")
    try:
        torch.ops.load_library(str(file))
        return torch.ops._flashmla_C.sparse_decode_fwd
    except (OSError, AttributeError) as error:
        raise BadInput(f"{file} could not be loaded as FlashMLA's extension ({str(error).splitlines()[0]}).") from error


@dataclass(frozen=True)
class FlashMLAInputs:
    """A sparse decode call's tensors, as ``flash_mla_with_kvcache`` takes them. Raises BadInput for what sm90 cannot
    serve.

    q: ``[batch, s_q, heads, d_qk]`` bf16, heads 64 or 128; cache: uint8 as ``write_cache`` makes it; indices:
    ``[batch, s_q, topk]`` int32 places, -1 for none, topk a multiple of 64; topk_length: ``[batch]`` int32 valid
    leading indices (not with d_qk 576); sink: ``[heads]`` float32; the extra_ three: a second cache (not with d_qk
    576).
    """

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    extra_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    scale: float | None = None

    def __post_init__(self):
        if self.q.dim() != 4 or 0 in self.q.shape or self.q.dtype != torch.bfloat16:
            raise BadInput(
                f"q has shape {list(self.q.shape)} and dtype {self.q.dtype}: give [batch, s_q, heads, d_qk] bfloat16, none of them 0."
            )
        batch, s_q, heads, d_qk = self.q.shape
        layout = _layout_of(d_qk)
        if heads not in (64, 128):
            raise BadInput(f"q has {heads} heads: FlashMLA's sparse decode serves 64 or 128.")
        if (self.extra_cache is None) != (self.extra_indices is None):
            raise BadInput("a second cache needs both extra_cache and extra_indices.")
        if layout is V32 and (self.topk_length is not None or self.extra_cache is not None):
            raise BadInput(
                "the V3.2 layout (d_qk 576) takes no topk_length and no second cache on sm90: mark unused indices with -1."
            )
        if self.extra_topk_length is not None and self.extra_cache is None:
            raise BadInput("extra_topk_length was given without a second cache.")
        for name, cache, indices, length in (
            ("", self.cache, self.indices, self.topk_length),
            ("extra_", self.extra_cache, self.extra_indices, self.extra_topk_length),
        ):
            if cache is None:
                continue
            if cache.dim() != 4 or list(cache.shape[2:]) != [1, layout.token_bytes]:
                raise BadInput(
                    f"{name}cache has shape {list(cache.shape)}: give [pages, page_size, 1, {layout.token_bytes}]."
                )
            if (
                indices.dim() != 3
                or list(indices.shape[:2]) != [batch, s_q]
                or indices.shape[2] % BLOCK
                or not indices.shape[2]
            ):
                raise BadInput(
                    f"{name}indices has shape {list(indices.shape)}: give [{batch}, {s_q}, a multiple of {BLOCK}]."
                )
            if length is not None and list(length.shape) != [batch]:
                raise BadInput(f"{name}topk_length has shape {list(length.shape)}: give [{batch}].")
            if any(t is not None and t.dtype != torch.int32 for t in (indices, length)):
                raise BadInput(f"{name}indices and {name}topk_length must be int32.")
        if self.sink is not None and (list(self.sink.shape) != [heads] or self.sink.dtype != torch.float32):
            raise BadInput(f"sink has shape {list(self.sink.shape)}: give [{heads}] float32.")

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    def parts(self, num_sms: int) -> int:
        return num_sm_parts(self.q.shape[2], self.q.shape[1], num_sms)

    def rows(self, first: int, end: int) -> "FlashMLAInputs":
        """Rows ``first`` to ``end`` (exclusive) as views over the same caches."""
        cut = {
            name: getattr(self, name)[first:end]
            for name in ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
            if getattr(self, name) is not None
        }
        return replace(self, **cut)

    def lengths(self) -> list[int]:
        """Tokens a row that FlashMLA plans on. Copies lengths to the host where they are given."""

        def listed(length):
            return None if length is None else length.tolist()

        extra = 0 if self.extra_indices is None else self.extra_indices.shape[2]
        return decode_lengths(
            self.indices.shape[2], listed(self.topk_length), extra, listed(self.extra_topk_length), BLOCK, self.batch
        )

    def as_decode_inputs(self) -> DecodeInputs:
        """The same attention for this project's own kernels and references: caches read back to bf16 (s_q must be
        1)."""
        if self.q.shape[1] != 1:
            raise BadInput(f"s_q is {self.q.shape[1]}: this project's decode kernels take one query position a row.")

        def cache(stored, indices, length):
            counts = (
                length
                if length is not None
                else torch.full((self.batch,), indices.shape[2], dtype=torch.int32, device=self.q.device)
            )
            return Cache(
                read_cache(stored, self.q.shape[3])[:, :, None], None, counts, indices=indices[:, 0].contiguous()
            )

        caches = (cache(self.cache, self.indices, self.topk_length),)
        if self.extra_cache is not None:
            caches += (cache(self.extra_cache, self.extra_indices, self.extra_topk_length),)
        return DecodeInputs(self.q[:, 0].contiguous(), caches, 512, self.scale, self.sink)


def decode(op: Callable, inputs: FlashMLAInputs, metadata=None, num_splits=None, out=None):
    """One call of FlashMLA. Without metadata it plans for itself.

    Returns out ``[batch, s_q, heads, 512]`` bf16, LSE ``[batch, heads, s_q]`` float32 (plus infinity for an empty
    row), and the schedule it used: metadata ``[parts, 8]`` (``schedules.Part``'s fields and padding) and num_splits
    ``[batch + 1]``, int32.
    """
    scale = inputs.q.shape[3] ** -0.5 if inputs.scale is None else inputs.scale
    arguments = [
        inputs.q,
        inputs.cache,
        inputs.indices,
        inputs.topk_length,
        inputs.sink,
        metadata,
        num_splits,
        inputs.extra_cache,
        inputs.extra_indices,
        inputs.extra_topk_length,
        512,
        scale,
    ]
    if _takes_out(op):
        return op(*arguments, out)
    got, lse, metadata, num_splits = op(*arguments)
    return (got if out is None else out.copy_(got)), lse, metadata, num_splits


def _takes_out(op) -> bool:
    schema = getattr(getattr(op, "default", None), "_schema", None)
    return schema is None or len(schema.arguments) > 12


@dataclass(frozen=True)
class InvariantPlan:
    """Own-length schedules on the device, reusable while lengths and shapes stay (all layers of a step, a CUDA graph).

    calls: (first row, end row, metadata ``[parts, 8]``, num_splits) each; the eighth column is padding.
    """

    rule: str
    batch: int
    calls: tuple[tuple[int, int, torch.Tensor, torch.Tensor], ...]


def batch_invariant_plan(
    inputs: FlashMLAInputs, rule: str = RECOMMENDED_RULE, num_sms: int | None = None
) -> InvariantPlan:
    """Plan ``batch_invariant_decode`` for these inputs. Copies the lengths to the host.

    rule: an own-length rule (``schedules.own_length_rule``); ``free`` is none of FlashMLA's. num_sms: multiprocessors,
    those of q's device if None. Raises BadInput for a rule that FlashMLA cannot follow: a free one, or more pieces
    than parts.
    """
    if str(rule).startswith("free"):
        raise BadInput(
            f"rule {rule} cannot be given to FlashMLA: it has no way to fold pieces in place; use fixed-chunk instead."
        )
    device = inputs.q.device
    if num_sms is None:
        if device.type != "cuda":
            raise BadInput("the inputs lie on the CPU: FlashMLA needs a CUDA device.")
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    calls = flashmla_calls(rule, inputs.lengths(), inputs.parts(num_sms), BLOCK)
    tables = [
        torch.tensor([[*part, 0] for part in c.parts], dtype=torch.int32).to(device) for c in calls
    ]  # 32 bytes a part
    splits = [torch.tensor(c.num_splits, dtype=torch.int32).to(device) for c in calls]
    return InvariantPlan(
        str(rule), inputs.batch, tuple((c.first_row, c.end_row, t, s) for c, t, s in zip(calls, tables, splits))
    )


def batch_invariant_decode(
    op: Callable,
    inputs: FlashMLAInputs,
    rule: str = RECOMMENDED_RULE,
    plan: InvariantPlan | None = None,
    streams: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA sparse decode whose rows do not depend on their batchmates: same row, same bits, in any batch.

    op: from ``load``. rule: how a row is cut, from its own length alone. plan: from ``batch_invariant_plan``, to plan
    once for many layers. Where the parts or the split buffer of one call do not suffice, the batch is served in several
    calls, spread over ``streams`` CUDA streams (the current one and side streams that join it again).
    Returns out ``[batch, s_q, heads, 512]`` bf16 and LSE ``[batch, heads, s_q]`` float32.
    Raises BadInput for shapes that it cannot serve, another plan's batch, or a GPU that is not of compute capability
    9.0, where none of this was measured. A result is comparable only with one of the same rule, GPU and FlashMLA build.
    """
    if inputs.q.device.type != "cuda" or torch.cuda.get_device_capability(inputs.q.device) != (9, 0):
        raise BadInput("the batch-invariant mode was proven on compute capability 9.0 (H100, H200) only: run it there.")
    plan = plan or batch_invariant_plan(inputs, rule)
    return run_plan(op, inputs, plan, streams)


def run_plan(
    op: Callable, inputs: FlashMLAInputs, plan: InvariantPlan, streams: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the plan's calls. The whole batch's output is one tensor, each call writing its rows."""
    if plan.batch != inputs.batch:
        raise BadInput(f"the plan is for {plan.batch} rows, the inputs have {inputs.batch}: plan this batch.")
    batch, s_q, heads, _ = inputs.q.shape
    out = torch.empty(batch, s_q, heads, 512, dtype=inputs.q.dtype, device=inputs.q.device)
    lse = torch.empty(batch, heads, s_q, dtype=torch.float32, device=inputs.q.device)
    if len(plan.calls) == 1:
        _, _, metadata, num_splits = plan.calls[0]
        _, lse, _, _ = decode(op, inputs, metadata, num_splits, out)
        return out, lse
    lanes = _lanes(inputs.q.device, min(streams, len(plan.calls)))
    for number, (first, end, metadata, num_splits) in enumerate(plan.calls):
        with lanes(number):
            got = decode(op, inputs.rows(first, end), metadata, num_splits, out[first:end])
            lse[first:end].copy_(got[1])
    lanes.join()
    return out, lse


class _lanes:
    """The current stream and side streams forked from it, by call number; ``join`` makes the current one wait for
    all."""

    _side: dict = {}

    def __init__(self, device, count: int):
        if count < 2 or device.type != "cuda":
            self.streams = [None]
            return
        self.main = torch.cuda.current_stream(device)
        side = self._side.setdefault(device, [])
        while len(side) < count - 1:
            side.append(torch.cuda.Stream(device))
        self.streams = [None, *side[: count - 1]]
        for stream in self.streams[1:]:
            stream.wait_stream(self.main)

    def __call__(self, number: int):
        stream = self.streams[number % len(self.streams)]
        return torch.cuda.stream(stream)  # None: stay on the current stream

    def join(self) -> None:
        for stream in self.streams[1:]:
            self.main.wait_stream(stream)


def random_flashmla_inputs(
    batch: int,
    heads: int = 64,
    d_qk: int = 576,
    topk: int = 2048,
    extra_topk: int = 0,
    ragged: bool = False,
    sink: bool = False,
    invalid: float = 0.0,
    pages: int = 512,
    device: torch.device | str = "cuda",
    seed: int = 0,
) -> FlashMLAInputs:
    """Random inputs over a pool of ``pages`` pages of 64 tokens; ragged draws each row's lengths from 1 (second cache:
    0) to topk."""
    generator = torch.Generator(device).manual_seed(seed)

    def cache():
        latent = torch.randn(pages, BLOCK, d_qk, generator=generator, device=device, dtype=torch.bfloat16)
        return write_cache(latent)

    def indices(count):
        drawn = torch.randint(
            0, pages * BLOCK, (batch, 1, count), generator=generator, device=device, dtype=torch.int32
        )
        gone = torch.rand(batch, 1, count, generator=generator, device=device) < invalid
        return torch.where(gone, -1, drawn).to(torch.int32)

    def lengths(low, high):
        return (
            torch.randint(low, high + 1, (batch,), generator=generator, device=device, dtype=torch.int32)
            if ragged
            else None
        )

    q = torch.randn(batch, 1, heads, d_qk, generator=generator, device=device, dtype=torch.bfloat16)
    extra = (
        dict(extra_cache=cache(), extra_indices=indices(extra_topk), extra_topk_length=lengths(0, extra_topk))
        if extra_topk
        else {}
    )
    return FlashMLAInputs(
        q,
        cache(),
        indices(topk),
        lengths(1, topk),
        torch.randn(heads, generator=generator, device=device) if sink else None,
        **extra,
    )
