"""A Llama-style decoder over flattened rows: weights, and one forward pass with the kernels injected.

A step's rows are all its tokens, of every request, in one [T, ...] tensor. The FFN is dense, or split into experts of
which each row uses the top k; either may be quantized to NVFP4. Attention and embedding keep the model's own weights.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Callable

import numpy as np
import torch

from ..common import BadInput
from ..kernels.decode import Cache, DecodeInputs, DevicePlan
from ..kernels.decode import attend as split_attend
from ..kernels.nvfp4 import Policy
from ..kernels.sets import KernelSet, PreparedExperts, PreparedNVFP4
from ..numerics import BLOCK, quantize
from ..schedules import Plan
from .checkpoint import Architecture, architecture, read_weights

Weight = torch.Tensor | PreparedNVFP4


@dataclass
class FFN:
    """gate_up: [2 x neurons, hidden], gate first; down: [hidden, neurons]."""

    gate_up: Weight
    down: Weight


@dataclass
class Experts:
    """An FFN cut into experts. router: the whole, unquantized gate_up, its neurons in the order of their experts."""

    ffns: list[FFN]
    top_k: int
    router: torch.Tensor

    def __post_init__(self):
        self.parts = {name: _together([getattr(ffn, name) for ffn in self.ffns]) for name in ("gate_up", "down")}


def _together(weights: list[Weight]) -> list[torch.Tensor] | PreparedExperts:
    return PreparedExperts(weights) if isinstance(weights[0], PreparedNVFP4) else weights


@dataclass
class Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor  # [(H + 2 KH) * D, hidden]
    output: torch.Tensor
    ffn_norm: torch.Tensor
    ffn: FFN | Experts


@dataclass
class Weights:
    """A model's tensors on one device, in one dtype."""

    shape: Architecture
    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor
    label: str


@dataclass(frozen=True)
class ExpertSplit:
    """How each layer's FFN neurons fall into experts. group: per layer int64 [neurons], each expert equally large."""

    group: list[torch.Tensor]
    experts: int
    top_k: int


@dataclass(frozen=True)
class MatmulRecord:
    """One FFN in one step: rows it ran on, how many of them were decode rows, and the arithmetic chosen."""

    layer: int
    expert: int  # -1 for a dense FFN
    rows: int
    decode_rows: int
    kernel: str


@dataclass
class StepRows:
    """What a forward pass needs to know of its rows. Decode rows come first.

    tokens, positions, slots: int64 [T], slots being flat places in the KV cache; tables: int64 [T, pages a row];
    lengths: int64 [T], position + 1; sampled: int64, the rows whose logits are wanted; splits: the plan by which the
    decode rows' attention is cut, None to fold them as prefill rows; last: the largest position, None to ask the tensor.
    The forward pass adds matmuls, and choices: how often an operation, by name, took which of its variants.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    sampled: torch.Tensor
    decode_rows: int
    splits: Plan | DevicePlan | None = None
    last: int | None = None
    matmuls: list[MatmulRecord] = field(default_factory=list)
    choices: dict[tuple[str, object], int] = field(default_factory=dict)


def load_weights(folder, device: torch.device, dtype=torch.float32, nvfp4: bool = False, split: ExpertSplit | None = None) -> Weights:
    """Load a Hugging Face Llama folder.

    nvfp4: quantize the FFN weights (gate and up as one matrix, per expert where split), each with its own tensor scale.
    Raises BadInput as checkpoint does, for a missing tensor, and where nvfp4 and the FFN's sizes are no multiples of 16.
    """
    shape = architecture(folder)
    if nvfp4 and (shape.hidden % BLOCK or shape.intermediate % BLOCK):
        raise BadInput(f"{folder} has hidden size {shape.hidden} and {shape.intermediate} FFN neurons: "
                       f"NVFP4 needs multiples of {BLOCK}.")
    raw = {name: tensor.to(device=device, dtype=dtype) for name, tensor in read_weights(folder).items()}
    try:
        return _assemble(shape, raw, device, dtype, nvfp4, split)
    except KeyError as error:
        raise BadInput(
            f"{folder} holds no tensor {error.args[0]!r}: a file may be missing, so fetch the model again."
        ) from None


def _assemble(
    shape: Architecture, raw: dict[str, torch.Tensor], device, dtype, nvfp4: bool, split: ExpertSplit | None
) -> Weights:
    def prepare(weight: torch.Tensor) -> Weight:
        return PreparedNVFP4(quantize(weight)) if nvfp4 else weight.contiguous()

    def build(gate, up, down) -> FFN:
        return FFN(prepare(torch.cat([gate, up])), prepare(down))

    layers = []
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        gate, up, down = (raw[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        if split is None:
            ffn = build(gate, up, down)
        else:
            order = split.group[index].argsort(stable=True).to(device)
            ffns = [build(gate[m], up[m], down[:, m]) for m in order.chunk(split.experts)]
            ffn = Experts(ffns, split.top_k, torch.cat([gate[order], up[order]]))
        layers.append(Layer(
            attention_norm=raw[f"{prefix}input_layernorm.weight"],
            qkv=torch.cat([raw[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]),
            output=raw[f"{prefix}self_attn.o_proj.weight"],
            ffn_norm=raw[f"{prefix}post_attention_layernorm.weight"],
            ffn=ffn,
        ))
    embedding = raw["model.embed_tokens.weight"]
    head = embedding if shape.tied_embedding else raw["lm_head.weight"]
    label = ("NVFP4 FFN" if nvfp4 else str(dtype).removeprefix("torch.")) + (
        f", derived: FFN split into {split.experts} experts, top {split.top_k}" if split else ", dense")
    return Weights(shape, embedding, layers, raw["model.norm.weight"], head, label)


class Model:
    """Weights, kernels and a policy; `forward` runs one step's rows.

    expert_order: a row adds its experts' outputs by their "number", or by their "load" in the step, the busiest first.
    """

    def __init__(self, weights: Weights, kernels: KernelSet, policy: Policy, expert_order: str = "number"):
        self.weights, self.kernels, self.policy, self.expert_order = weights, kernels, policy, expert_order
        shape = weights.shape
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        self._frequency = (shape.rope_theta**-half).float()
        self._cos, self._sin = self._rotary_table(2048)

    def _rotary_table(self, length: int):
        # Made on the CPU in float32, as transformers does, so that every device rotates by the same numbers.
        angle = torch.arange(length, dtype=torch.float32)[:, None] * self._frequency[None, :]
        device, dtype = self.weights.embedding.device, self.weights.embedding.dtype
        return angle.cos().to(device, dtype), angle.sin().to(device, dtype)

    def rotary_tables(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, D / 2], as many as the rows' positions need."""
        last = int(rows.positions.max()) if rows.last is None else rows.last
        if last >= self._cos.shape[0]:
            self._cos, self._sin = self._rotary_table(2 * last)
        return self._cos, self._sin

    def forward(self, rows: StepRows, k_pages: torch.Tensor, v_pages: torch.Tensor,
                observe: Callable[[int, torch.Tensor], None] | None = None) -> torch.Tensor:
        """Logits [sampled, vocabulary] of one step; writes the rows' keys and values into their slots.

        k_pages, v_pages: [layers, pages, page, KH, D]. observe(layer, hidden [T, hidden]) sees the residual stream after
        each layer.
        """
        w, shape, kernels = self.weights, self.weights.shape, self.kernels
        count, device = rows.tokens.shape[0], w.embedding.device
        cos, sin = (table[rows.positions][:, None, :] for table in self.rotary_tables(rows))
        split = _split(rows, device)
        kernels.watch(rows.choices)
        x = kernels.store(w.embedding[rows.tokens])
        for index, layer in enumerate(w.layers):
            normed = kernels.rms_norm(x, layer.attention_norm, shape.rms_eps)
            qkv = kernels.linear(normed, layer.qkv).view(count, -1, shape.head_dim)
            turned = kernels.store(_rotate(qkv[:, : -shape.kv_heads], cos, sin))
            q, k, v = turned[:, : shape.heads], turned[:, shape.heads :], qkv[:, -shape.kv_heads :]
            k_pages[index].flatten(0, 1)[rows.slots] = k
            v_pages[index].flatten(0, 1)[rows.slots] = v
            attended = self._attend(q.contiguous(), k_pages[index], v_pages[index], rows, split)
            x = kernels.store(x + kernels.linear(attended.reshape(count, -1), layer.output))
            normed = kernels.rms_norm(x, layer.ffn_norm, shape.rms_eps)
            x = kernels.store(x + self._ffn(normed, layer.ffn, index, rows))
            if observe:
                observe(index, x)
        return kernels.head(kernels.rms_norm(x[rows.sampled], w.norm, shape.rms_eps), w.head)

    def _attend(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, rows: StepRows,
                split) -> torch.Tensor:
        """[T, H, D]: decode rows along the split plan where there is one, all others folded page by page."""
        if split is None:
            return self.kernels.attend(q, k_pages, v_pages, rows.tables, rows.lengths)
        plan, lengths, tables = split
        cut = rows.decode_rows
        cache = Cache(k_pages, v_pages, lengths, block_table=tables)
        decoded = self.kernels.store(split_attend(DecodeInputs(q[:cut], (cache,), q.shape[-1]), plan)[0])
        if cut == q.shape[0]:
            return decoded
        return torch.cat([decoded, self.kernels.attend(q[cut:], k_pages, v_pages, rows.tables[cut:], rows.lengths[cut:])])

    def _ffn(self, x: torch.Tensor, ffn: FFN | Experts, layer: int, rows: StepRows) -> torch.Tensor:
        kernels = self.kernels
        if isinstance(ffn, FFN):
            multiply = self._multiply(ffn, layer, x.shape[0], rows.decode_rows, rows)
            hidden = kernels.store(_gated(multiply(kernels.activations(x), ffn.gate_up)))
            return multiply(kernels.activations(hidden), ffn.down)
        chosen = self._route(x, ffn).cpu().numpy()  # all else is planned on the host: a device is asked once a layer
        expert, row = chosen.T.nonzero()  # experts ascending, and rows within an expert
        counts, decode = chosen.sum(0).tolist(), chosen[: rows.decode_rows].sum(0).tolist()
        place = self._places(chosen, counts, rows)[row, expert]
        expert, row, place = torch.from_numpy(np.stack([expert, row, place])).to(x.device)
        multiply = self._multiply_each(ffn, layer, counts, decode, rows)
        hidden = kernels.store(_gated(multiply(kernels.activations(x[row], expert, len(counts)), "gate_up")))
        found = multiply(kernels.activations(hidden, expert, len(counts)), "down")
        by_row = x.new_empty(x.shape[0], ffn.top_k, x.shape[1])
        by_row[row, place] = found
        return kernels.add_in_turn(by_row)

    def _places(self, chosen: np.ndarray, counts: list[int], rows: StepRows) -> np.ndarray:
        """int [T, experts]: as the how-manieth a row adds an expert that it chose."""
        if self.expert_order == "number":  # whatever its neighbours chose
            return chosen.cumsum(1) - 1
        order = np.array(sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert)))
        # Experts of equal load keep the order of their numbers, so a row alone adds as under "number".
        taken = "number" if len({count for count in counts if count}) == 1 else "load"
        rows.choices["expert_order", taken] = rows.choices.get(("expert_order", taken), 0) + 1
        return (chosen[:, order].cumsum(1) - 1)[:, order.argsort()]

    def _route(self, x: torch.Tensor, ffn: Experts) -> torch.Tensor:
        """bool [T, experts]: the top k experts of each row by the sum of |activation| over their neurons."""
        grouped = _gated(self.kernels.linear(x, ffn.router)).abs().view(x.shape[0], len(ffn.ffns), -1).sum(-1)
        return torch.zeros_like(grouped, dtype=torch.bool).scatter_(1, grouped.topk(ffn.top_k, dim=1).indices, True)

    def _multiply(self, ffn: FFN, layer: int, count: int, decode_rows: int, rows: StepRows):
        """The matmul that a dense FFN of ``count`` rows takes, recorded in the step's trace."""
        if isinstance(ffn.down, torch.Tensor):
            rows.matmuls.append(MatmulRecord(layer, -1, count, decode_rows, "plain"))
            return self.kernels.linear
        arithmetic = self.policy.choose(count)
        rows.matmuls.append(MatmulRecord(layer, -1, count, decode_rows, arithmetic.name))
        return partial(self.kernels.nvfp4, arithmetic=arithmetic)

    def _multiply_each(self, ffn: Experts, layer: int, counts: list[int], decode: list[int], rows: StepRows):
        """(rows in the order of their experts, part of the FFN) to their products, each expert's matmul as its own count
        has it and recorded in the step's trace."""
        quantized = isinstance(ffn.ffns[0].down, PreparedNVFP4)
        chosen = [self.policy.choose(count) if quantized else None for count in counts]
        rows.matmuls += [MatmulRecord(layer, expert, count, decode[expert], kind.name if kind else "plain")
                         for expert, (count, kind) in enumerate(zip(counts, chosen)) if count]

        def multiply(values: torch.Tensor, part: str) -> torch.Tensor:
            if quantized:
                return self.kernels.experts(values, ffn.parts[part], counts, chosen)
            pieces = zip(values.split(counts), ffn.parts[part])
            return torch.cat([self.kernels.linear(piece, weight) for piece, weight in pieces if piece.shape[0]])

        return multiply


def _split(rows: StepRows, device: torch.device) -> tuple[Plan | DevicePlan, torch.Tensor, torch.Tensor] | None:
    """The plan of the step's decode rows, where the device reads it, with their lengths and page tables in int32."""
    if rows.splits is None:
        return None
    plan, cut = rows.splits, rows.decode_rows
    if isinstance(plan, Plan) and device.type == "cuda":
        plan = DevicePlan.upload(plan, device)
    return plan, rows.lengths[:cut].int(), rows.tables[:cut].int().contiguous()


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up from [T, 2 x neurons], row-invariant."""
    gate, up = gate_up.chunk(2, dim=-1)
    # F.silu computes the tail of each thread's share by another exp, and where a share ends depends on T.
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [T, heads, D], the two halves of D being the pairs."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
