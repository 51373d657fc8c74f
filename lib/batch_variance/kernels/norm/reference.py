"""RMSNorm over the last dimension in float32, whatever the input's dtype."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[R, K] to [R, K] in x's dtype: x / sqrt(mean(x^2) + eps) * weight. The sum is over a row alone."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)
