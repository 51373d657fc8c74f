"""The ways in which a batch reaches a row's bits, each with a switch and an invariant twin.

A mechanism is a choice that a serving engine makes by looking at the batch: which kernel, how many pieces, which order,
which scale. Switched off, the choice is one fixed choice of the same kind. Both are compositions of the row-invariant
kernels of ``kernels.sets``, so with every mechanism off a row's bits depend on that row alone, and whatever varies with
some of them on is their doing. The dtype in which values are kept, and logits compared, is no mechanism but decides how
far a bit carries; it is a setting, the same for a row alone and in a batch.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch

from ..common import BadInput
from ..kernels.norm.reference import BLOCK as NORM_BLOCK
from ..kernels.nvfp4 import policy
from ..kernels.nvfp4.policy import GLLM_THRESHOLD
from ..kernels.sets import KernelSet
from .model import Model, StepRows, Weights

# Dispatch tables: (largest value that takes this entry, None for any, and what is taken).
SPLIT_K_BY_ROWS = ((4, 4), (32, 2), (None, 1))  # rows of a matmul: segments of K
NORM_BLOCK_BY_ROWS = ((8, 32), (None, NORM_BLOCK))  # rows of a norm: columns summed at a time
# Tokens of the step's longest decode row: tokens a block of its attention.
ATTENTION_BLOCK_BY_LONGEST = ((32, 16), (None, 32))
SPLIT_PARTS = 32  # programs that a step's decode attention is cut for
OWN_LENGTH_RULE = "never-split"
# Formats that activations are rounded to under a scale, and the value that the largest one is scaled to.
ACTIVATIONS = {"float8": (torch.float8_e4m3fn, 448.0), "float16": (torch.float16, 32768.0)}


@dataclass(frozen=True)
class Mechanisms:
    """Which choices look at the batch. False is the invariant twin. What was chosen stands in ``Step.choices`` by these
    names.

    row_threshold: an NVFP4 matmul takes another kernel above ``threshold`` rows; off: the GEMV for any number.
    batch_splits: FlashMLA's schedule cuts each decode row by the whole batch; off: by its own length, in equal blocks.
    split_k: qkv, attention output, router and logits add K in segments, by the rows of the matmul; off: in one.
    attention_dispatch: the step's longest decode row sets the block in which all of them are folded; off: one block.
    expert_order: a row adds its experts by their load in the step, the busiest first; off: by their numbers.
    norm_blocks: RMSNorm sums its squares in blocks, by the number of rows; off: in one block.
    batch_scale: an FFN's rounded activations share one scale, from the largest of the matmul's rows; off: one a row.
    """

    row_threshold: bool = False
    batch_splits: bool = False
    split_k: bool = False
    attention_dispatch: bool = False
    expert_order: bool = False
    norm_blocks: bool = False
    batch_scale: bool = False

    @classmethod
    def none(cls) -> Self:
        return cls()

    @classmethod
    def all(cls) -> Self:
        return cls.of(MECHANISMS)

    @classmethod
    def of(cls, names) -> Self:
        """These on, the others off. Raises BadInput for an unknown name."""
        return cls(**{_known(name): True for name in names})

    @classmethod
    def only(cls, name: str) -> Self:
        return cls.of([name])

    def without(self, name: str) -> Self:
        """The same with one of them off. Raises BadInput for an unknown name."""
        return replace(self, **{_known(name): False})

    @property
    def on(self) -> tuple[str, ...]:
        """Names of those that are on, in the order of MECHANISMS."""
        return tuple(name for name in MECHANISMS if getattr(self, name))

    def __str__(self) -> str:
        return "+".join(self.on) or "none"


MECHANISMS = tuple(item.name for item in fields(Mechanisms))


def _known(name: str) -> str:
    if name not in MECHANISMS:
        raise BadInput(f"mechanism {name!r} is unknown: give some of {', '.join(MECHANISMS)}.")
    return name


@dataclass(frozen=True)
class Settings:
    """What a cell of a study serves with, apart from its load.

    storage: "bfloat16" rounds each operation's output, the residual stream and the KV cache included, but not the
    logits; "float32" rounds nothing. logits: dtype in which logits are compared; ties: which token id wins among
    equals, "lowest" or "highest".
    activations: what the FFN's matmuls read is rounded under a scale to "float8" (e4m3) or "float16", or left "as
    computed"; batch_scale needs a scale. threshold: rows up to which row_threshold takes the GEMV. planted: standard
    deviation of a perturbation of the logits that depends on who shares the step, 0 for none: a mechanism of known
    strength. Raises BadInput for values outside these.
    """

    mechanisms: Mechanisms = Mechanisms()
    storage: str = "float32"
    logits: str = "float32"
    ties: str = "lowest"
    activations: str = "float16"
    threshold: int = GLLM_THRESHOLD
    planted: float = 0.0

    def __post_init__(self):
        known = {
            "storage": ("float32", "bfloat16"),
            "logits": ("float32", "bfloat16"),
            "ties": ("lowest", "highest"),
            "activations": (*ACTIVATIONS, "as computed"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise BadInput(f"{name} {getattr(self, name)!r} is unknown: give {' or '.join(values)}.")
        if self.mechanisms.batch_scale and self.activations not in ACTIVATIONS:
            raise BadInput(
                f"batch_scale needs activations {' or '.join(ACTIVATIONS)}: without a scale nothing can be shared."
            )
        if not 0 <= self.planted < float("inf"):
            raise BadInput(f"planted is {self.planted}: give a standard deviation, 0 or more.")
        policy("default", self.threshold)


def build(weights: Weights, kernels: KernelSet, settings: Settings, segments: dict | None = None) -> tuple[Model, dict]:
    """A model under ``settings``, and the changes that they need to an EngineConfig.

    weights: with an NVFP4 FFN, float32 otherwise. kernels: the device's row-invariant set. segments: a cache of cut
    weights that builds over the same weights may share.
    """
    on = settings.mechanisms
    parts = (
        weights,
        MechanismKernels(kernels, settings, {} if segments is None else segments),
        policy("default" if on.row_threshold else "force-gemv", settings.threshold),
        "load" if on.expert_order else "number",
    )
    model = PlantedModel(*parts, size=settings.planted) if settings.planted else Model(*parts)
    (longest, narrow), (_, wide) = ATTENTION_BLOCK_BY_LONGEST
    return model, {
        "split_rule": "flashmla" if on.batch_splits else OWN_LENGTH_RULE,
        "num_sm_parts": SPLIT_PARTS,
        "split_block": narrow,
        "wide_block": wide,
        "wide_from": longest + 1 if on.attention_dispatch else 0,
        "logits": settings.logits,
        "ties": settings.ties,
    }


def _taken(table, value: int):
    return next(choice for largest, choice in table if largest is None or value <= largest)


@dataclass
class MechanismKernels:
    """A row-invariant kernel set under mechanisms and storage: each operation makes its choice, notes it, and composes.

    segments: (weight's address, its shape, pieces) to the pieces of a weight, kept with the weight itself.
    """

    kernels: KernelSet
    settings: Settings
    segments: dict = field(default_factory=dict)
    choices: dict = field(default_factory=dict)

    @property
    def tier(self) -> str:
        return self.kernels.tier

    @property
    def device(self) -> torch.device:
        return self.kernels.device

    def watch(self, choices: dict) -> None:
        self.choices = choices

    def _note(self, name: str, choice) -> None:
        self.choices[name, choice] = self.choices.get((name, choice), 0) + 1

    def store(self, x: torch.Tensor) -> torch.Tensor:
        # Kept as float32, so that the same kernels run whatever the storage.
        return x.bfloat16().to(x.dtype) if self.settings.storage == "bfloat16" else x

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.store(self.head(x, weight))

    def head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pieces = _taken(SPLIT_K_BY_ROWS, x.shape[0]) if self.settings.mechanisms.split_k else 1
        self._note("split_k", pieces)
        if pieces == 1:
            return self.kernels.linear(x, weight)
        total = None
        for start, part in self._cut(weight, pieces):
            found = self.kernels.linear(x[:, start : start + part.shape[1]].contiguous(), part)
            total = found if total is None else total + found
        return total

    def _cut(self, weight: torch.Tensor, pieces: int) -> list[tuple[int, torch.Tensor]]:
        key = (weight.data_ptr(), tuple(weight.shape), pieces)
        if key not in self.segments:
            width = -(-weight.shape[1] // (16 * pieces)) * 16
            # A CPU multiplies by a view as fast; the Triton matmul would copy it at every call.
            parts = [
                (start, part.contiguous() if weight.is_cuda else part)
                for start, part in zip(range(0, weight.shape[1], width), weight.split(width, dim=1))
            ]
            self.segments[key] = (weight, parts)  # with the weight, whose address must not be used again
        return self.segments[key][1]

    def nvfp4(self, x, weight, arithmetic):
        self._note("row_threshold", arithmetic.name)
        return self.store(self.kernels.nvfp4(x, weight, arithmetic))

    def experts(self, x, weights, counts, arithmetics):
        for count, arithmetic in zip(counts, arithmetics):
            if count:
                self._note("row_threshold", arithmetic.name)
        return self.store(self.kernels.experts(x, weights, counts, arithmetics))

    def add_in_turn(self, parts: torch.Tensor) -> torch.Tensor:
        return self.kernels.add_in_turn(parts, self.settings.storage == "bfloat16")

    def attend(self, q, k_pages, v_pages, tables, lengths):
        return self.store(self.kernels.attend(q, k_pages, v_pages, tables, lengths))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        block = _taken(NORM_BLOCK_BY_ROWS, x.shape[0]) if self.settings.mechanisms.norm_blocks else NORM_BLOCK
        self._note("norm_blocks", block)
        return self.store(self.kernels.rms_norm(x, weight, eps, block))

    def activations(self, x: torch.Tensor, group: torch.Tensor | None = None, groups: int = 1) -> torch.Tensor:
        if self.settings.activations not in ACTIVATIONS or not x.shape[0]:
            return x
        dtype, target = ACTIVATIONS[self.settings.activations]
        largest = x.abs().amax(-1)
        if self.settings.mechanisms.batch_scale:
            # More rows than matmuls: some matmul has several. Fewer may still share, which need not be known here.
            self._note("batch_scale", "shared" if x.shape[0] > groups else "a row")
            if group is None:
                largest = largest.amax().expand_as(largest)
            else:
                largest = largest.new_zeros(groups).scatter_reduce(0, group, largest, "amax")[group]
        scale = (largest / target).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        return (x / scale).to(dtype).to(x.dtype) * scale


class PlantedModel(Model):
    """A model whose logits are perturbed as soon as two requests share a step, by an amount drawn from who they are.

    size: standard deviation of the perturbation, in the logits' units. Deterministic: the same batch, the same noise.
    """

    def __init__(self, *parts, size: float):
        super().__init__(*parts)
        device = self.weights.embedding.device
        self._noise = size * torch.randn(self.weights.head.shape[0], generator=torch.Generator().manual_seed(0)).to(
            device
        )

    def forward(self, rows: StepRows, k_pages, v_pages, observe=None):
        logits = super().forward(rows, k_pages, v_pages, observe)
        if len(rows.sampled) == 0 or len(set(rows.tables[:, 0].tolist())) < 2:
            return logits
        rows.choices["planted", "noise"] = 1
        pattern = int((rows.tokens * (rows.positions + 1)).sum()) % 1_000_003
        place = torch.arange(logits.shape[-1], device=logits.device)
        shift = (torch.arange(1, logits.shape[0] + 1, device=logits.device) * 7919 + pattern * 104_729)[:, None]
        return logits + self._noise[(place + shift) % logits.shape[-1]]
