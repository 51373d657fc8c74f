"""The NVFP4 matmul with one bit class over every number of rows: no threshold, tensor cores throughout.

Its arithmetic is gllm's GEMM but for the tensor scale, which multiplies the sum, so that the unpacked weights are
exact. The class is the plain GEMM's (``gemm/invariant.py``): segments by (N, K) alone; configurations are chosen by
M inside it. Unpacked weights add one condition (`in_class`): the tensor core's first operand has 64 rows or more.
"""

import torch

from ...common import BadInput
from ...numerics import NVFP4Tensor
from ..counters import arrival_counters
from ..gemm.invariant import Config, chosen, segment_steps, tuned
from .arithmetic import GEMM

INVARIANT = GEMM.but("invariant", tensor_scale="after")

DEFAULTS = (
    (16, Config("parallel", 16, 64, 128, 4, 4, swap=True)),
    (32, Config("parallel", 32, 64, 128, 4, 4, swap=True)),
    (64, Config("parallel", 64, 64, 128, 4, 3, swap=True)),
    (256, Config("in-turn", 64, 128, 64, 8, 3, swap=True)),
    (None, Config("in-turn", 128, 128, 64, 8, 3, swap=True)),
)


def segments(N: int, K: int) -> int:
    """Segments that K falls into for a weight [N, K]."""
    if (N, K) in tuned("nvfp4"):
        return tuned("nvfp4")[N, K][0]
    wanted = 1 if N > 10000 else 2 if N > 4096 else 4
    return max(min(wanted, K // 512), 1)


def configuration(M: int, N: int, K: int) -> Config:
    """What the table, or else the defaults, choose for M rows."""
    return chosen("nvfp4", DEFAULTS, M, N, K)


def in_class(config: Config) -> bool:
    """Whether the configuration adds products in the class's groups of 16 neighbours.

    A first operand of 64 rows or more becomes the warp-group instruction, whose operands Triton keeps in the order of
    k. A smaller one becomes the warp's instruction, and there Triton spreads operands that were unpacked from bytes
    over several instructions (``kWidth`` 8 in its layout, where plain bfloat16 has 2): each then adds 16 products
    from far apart, which is another tree.
    """
    return (config.block_n if config.swap else config.block_m) >= 64


def matmul(
    x: torch.Tensor, weight: NVFP4Tensor, config: Config | None = None, count: int | None = None, operand=None
) -> torch.Tensor:
    """float32 [M, N] from x [M, K] (float32, bfloat16 or float16; rounded to bfloat16) and an NVFP4 weight [N, K].

    config and count override the table's configuration and the number of segments; operand overrides the products'
    dtype, for the interpreter, whose bfloat16 is wrong, and lets any configuration run. Raises BadInput where shapes or
    dtypes do not fit, or the configuration is outside the class.
    """
    import triton.language as tl

    from . import invariant_triton as kernels

    N, K = weight.codes.shape[0], 2 * weight.codes.shape[1]
    if x.dim() != 2 or x.shape[1] != K or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise BadInput(f"x is {x.dtype} {list(x.shape)}: give float32, bfloat16 or float16 [M, {K}] for this weight.")
    M = x.shape[0]
    y = torch.empty(M, N, dtype=torch.float32, device=x.device)
    if M == 0:
        return y
    count = segments(N, K) if count is None else count
    length = segment_steps(K, count)
    config = config or configuration(M, N, K)
    if operand is None and not in_class(config):
        raise BadInput(
            f"configuration '{config}' adds in another order: the first operand (block_n under swap, else block_m) "
            "needs 64 rows or more."
        )
    if M > 64 and operand is None:
        x = x.to(torch.bfloat16)  # the rounding that the kernel would do, once and not for every tile of n
    tensors = (x.contiguous(), weight.codes, weight.block_scale, weight.tensor_scale, y)
    shape = dict(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SWAP=config.swap,
        EVEN=K % config.block_k == 0,
        OPERAND=operand or tl.bfloat16,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    tiles_m, tiles_n = -(-M // config.block_m), -(-N // config.block_n)
    if config.form == "in-turn":
        kernels.in_turn[(tiles_m, tiles_n)](*tensors, M, N, K, length, SEGMENTS=count, **shape)
        return y
    tiles = tiles_m * tiles_n if count > 1 else 1
    cells = tiles * count * config.block_m * config.block_n if count > 1 else 1
    parts = torch.empty(cells, dtype=torch.float32, device=x.device)
    arrived = arrival_counters(x.device, tiles)
    kernels.parallel[(tiles_n, count, tiles_m)](
        *tensors, parts, arrived, M, N, K, length, count, SPLIT=count > 1, **shape
    )
    return y
