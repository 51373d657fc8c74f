"""The kernels an engine runs on, as one object a tier: emulated on a CPU, the CPU's own, or Triton on CUDA.

All but `native` are row-invariant in every operation, so that under them a batch can only act through the policy.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from ..numerics import NVFP4Tensor
from .attention import reference as attention_reference
from .gemm import reference as gemm_reference
from .moe import in_turn
from .norm import reference as norm_reference
from .norm.reference import BLOCK as NORM_BLOCK
from .nvfp4 import Arithmetic
from .nvfp4 import reference as nvfp4_reference


@dataclass
class PreparedNVFP4:
    """An NVFP4 weight, and its unpacked float32 forms where a kernel set keeps them."""

    weight: NVFP4Tensor
    unpacked: dict[str, torch.Tensor] = field(default_factory=dict)

    def form(self, arithmetic: Arithmetic) -> torch.Tensor:
        """``unpacked_weight`` for this arithmetic, made once."""
        # With the scale applied after, code x block scale is exact in bfloat16 too: one form serves both dtypes.
        key = "unscaled" if arithmetic.tensor_scale == "after" else arithmetic.weights
        if key not in self.unpacked:
            self.unpacked[key] = nvfp4_reference.unpacked_weight(self.weight, arithmetic)
        return self.unpacked[key]


class PreparedExperts:
    """The NVFP4 weights of the experts of one layer, all of one shape."""

    def __init__(self, each: list[PreparedNVFP4]):
        self.each = each

    @cached_property
    def stacked(self) -> NVFP4Tensor:
        """All of them as one, the experts being the tensors' first dimension."""
        parts = ("codes", "block_scale", "tensor_scale")
        return NVFP4Tensor(*(torch.stack([getattr(w.weight, part) for w in self.each]) for part in parts))


class KernelSet(Protocol):
    """What the engine calls. Shapes as in the operations' own modules."""

    tier: str
    device: torch.device

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...
    def nvfp4(self, x: torch.Tensor, weight: PreparedNVFP4, arithmetic: Arithmetic) -> torch.Tensor: ...
    def experts(
        self, x: torch.Tensor, weights: PreparedExperts, counts: list[int], arithmetics: list[Arithmetic]
    ) -> torch.Tensor:
        """[R, N]: ``nvfp4`` of each expert's own rows; the first counts[0] rows of x are expert 0's, and so on."""

    def add_in_turn(self, parts: torch.Tensor, bfloat16: bool = False) -> torch.Tensor: ...
    def attend(self, q, k_pages, v_pages, tables, lengths) -> torch.Tensor: ...
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Logits: ``linear``, and kept as computed; in which dtype they are compared is the engine's business."""

    def watch(self, choices: dict[tuple[str, object], int]) -> None:
        """Note in ``choices`` what the coming step's operations choose by their batch."""

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """What is kept of an operation's output that the model computes itself."""

    def activations(self, x: torch.Tensor, group: torch.Tensor | None = None, groups: int = 1) -> torch.Tensor:
        """What an FFN's matmul reads of its input [R, K]. group: int64 [R], which of ``groups`` matmuls a row belongs to."""


class AsComputed:
    """A kernel set that keeps every value as computed, and chooses nothing by its batch."""

    def head(self, x, weight):
        return self.linear(x, weight)

    def watch(self, choices):
        pass

    def store(self, x):
        return x

    def activations(self, x, group=None, groups=1):
        return x

    def experts(self, x, weights, counts, arithmetics):
        pieces = zip(x.split(counts), weights.each, arithmetics)
        return torch.cat([self.nvfp4(*piece) for piece in pieces if piece[0].shape[0]])

    def add_in_turn(self, parts, bfloat16=False):
        return in_turn.add_in_turn(parts, bfloat16)


class EmulatedKernels(AsComputed):
    """GPU arithmetic modelled on the CPU: fixed tiles, float32 sums."""

    tier = "emulated"
    device = torch.device("cpu")

    def linear(self, x, weight):
        return gemm_reference.tiled_matmul(x, weight)

    def nvfp4(self, x, weight, arithmetic):
        return nvfp4_reference.emulated_matmul(x, weight.form(arithmetic), weight.weight.tensor_scale, arithmetic)

    def attend(self, q, k_pages, v_pages, tables, lengths):
        return attention_reference.attend_paged(q, k_pages, v_pages, tables, lengths)

    def rms_norm(self, x, weight, eps, block=NORM_BLOCK):
        return norm_reference.rms_norm(x, weight, eps, block)


class NativeKernels(EmulatedKernels):
    """The CPU's own matmul as torch calls it: a row's bits may depend on how many rows there are."""

    tier = "cpu-native"

    def linear(self, x, weight):
        return F.linear(x, weight)


class TritonKernels(AsComputed):
    """Triton kernels on CUDA, each with one tile shape for any number of rows."""

    tier = "live-gpu"
    device = torch.device("cuda")

    def __init__(self):
        from .attention import triton as attention
        from .gemm import triton as gemm
        from .moe import in_turn_triton as moe
        from .norm import triton as norm
        from .nvfp4 import triton as nvfp4

        self._nvfp4, self._grouped, self.add_in_turn = nvfp4.matmul, nvfp4.grouped_matmul, moe.add_in_turn
        self.linear, self.attend, self.rms_norm = gemm.matmul, attention.attend_paged, norm.rms_norm

    def nvfp4(self, x, weight, arithmetic):
        return self._nvfp4(x, weight.weight, arithmetic)

    def experts(self, x, weights, counts, arithmetics):
        return self._grouped(x, weights.stacked, counts, arithmetics)


def kernel_set(device: torch.device) -> KernelSet:
    """The row-invariant kernel set of a device."""
    return TritonKernels() if device.type == "cuda" else EmulatedKernels()
