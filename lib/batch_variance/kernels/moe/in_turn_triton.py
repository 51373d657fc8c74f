"""The sum of a row's experts' outputs for CUDA: one launch in place of one an addition, with the bits of the reference."""

import torch
import triton
import triton.language as tl

from ..nvfp4.triton import _round_bf16


@triton.jit
def _add_in_turn(parts, total, H, PLACES: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    parts += row * PLACES * H
    found = tl.load(parts + h, mask=h < H, other=0.0)
    for place in range(1, PLACES):
        found = found + tl.load(parts + place * H + h, mask=h < H, other=0.0)
        if ROUND:
            found = _round_bf16(found)
    tl.store(total + row * H + h, found, mask=h < H)


def add_in_turn(parts: torch.Tensor, bfloat16: bool = False) -> torch.Tensor:
    """As in_turn.add_in_turn, for float32 parts on CUDA. Raises ValueError for another dtype."""
    if parts.dtype != torch.float32:
        raise ValueError(f"parts are {parts.dtype}: float32 is needed.")
    rows, places, width = parts.shape
    total = torch.empty(rows, width, dtype=parts.dtype, device=parts.device)
    if rows:
        _add_in_turn[(rows, triton.cdiv(width, 256))](
            parts.contiguous(), total, width, PLACES=places, ROUND=bfloat16, BLOCK=256, num_warps=2)
    return total
