"""What one NVFP4 matmul rounds, and where: the difference between two kernels as data.

y[m, n] = sum over k of x[m, k] * W[n, k], W = code * block scale * tensor scale. Four choices tell gllm's two paths
apart (gllm issue 98, matMulNVFP4): the activations' precision, the precision of the unpacked weights, whether the
tensor scale is folded in before that rounding or applied to the sum, and the order of additions.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute an NVFP4 matmul; sums are float32 and the result is float32.

    activations: dtype that x is rounded to before the products.
    weights: dtype of the unpacked weight. code x block scale has 6 significant bits and is exact in bfloat16; with the
        tensor scale folded in first it is not.
    tensor_scale: "before" folds it into the weight ahead of that rounding, "after" multiplies the finished sum by it.
    order: whose order of additions, the GEMV's or the GEMM's.
    """

    name: str
    activations: Literal["float32", "bfloat16"]
    weights: Literal["float32", "bfloat16"]
    tensor_scale: Literal["before", "after"]
    order: Literal["gemv", "gemm"]

    def but(self, name: str, **changes) -> "Arithmetic":
        """The same arithmetic with some choices changed, under another name."""
        return replace(self, name=name, **changes)


GEMV = Arithmetic("gemv", activations="float32", weights="float32", tensor_scale="after", order="gemv")
GEMM = Arithmetic("gemm", activations="bfloat16", weights="bfloat16", tensor_scale="before", order="gemm")
