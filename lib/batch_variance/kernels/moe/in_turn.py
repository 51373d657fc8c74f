"""The sum of a row's experts' outputs in plain torch, one addition after another."""

import torch


def add_in_turn(parts: torch.Tensor, bfloat16: bool = False) -> torch.Tensor:
    """[R, H] from [R, k, H]: each row's k parts added in their order. bfloat16: each sum is rounded to it, the dtype kept."""
    total = parts[:, 0]
    for place in range(1, parts.shape[1]):
        total = total + parts[:, place]
        if bfloat16:
            total = total.bfloat16().to(parts.dtype)
    return total
