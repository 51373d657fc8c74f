"""RMSNorm over the last dimension in float32, whatever the input's dtype."""

import torch

BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, block: int = BLOCK) -> torch.Tensor:
    """[R, K] to [R, K] in x's dtype: x / sqrt(mean(x^2) + eps) * weight. The sum is over a row alone.

    block: columns summed at a time, the blocks' sums being added from left to right; it sets the order of additions.
    """
    y = x.float()
    if block >= y.shape[-1]:
        mean = y.pow(2).mean(-1, keepdim=True)
    else:
        mean = sum(part.contiguous().sum(-1, keepdim=True) for part in y.pow(2).split(block, dim=-1)) / y.shape[-1]
    y = y * torch.rsqrt(mean + eps)
    return weight * y.to(x.dtype)
