"""Softmax, log-softmax, mean and sum over the last dimension whose rows do not see each other, on a CPU and on CUDA.

On a CPU every call runs on tiles of one fixed number of rows; on CUDA a Triton program takes a row. Sums are float32.
"""

import torch

from ...common import BadInput
from ..tiles import by_tiles

BLOCK = 1024
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _flat(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 1 or x.dtype not in _FLOATS or x.shape[-1] == 0:
        raise BadInput(f"x is {x.dtype} {list(x.shape)}: give float32, bfloat16 or float16 [..., K], K not 0.")
    return x.contiguous().view(-1, x.shape[-1])


def _softmax(x: torch.Tensor, log: bool) -> torch.Tensor:
    rows = _flat(x)
    if x.device.type != "cuda":
        operation = torch.log_softmax if log else torch.softmax
        return by_tiles(lambda tile: operation(tile.float(), -1).to(x.dtype), rows).view(x.shape)
    from . import rows_triton

    y = torch.empty_like(rows)
    if len(rows):
        rows_triton.softmax[(len(rows),)](rows, y, rows.shape[1], BLOCK=BLOCK, LOG=log, num_warps=4)
    return y.view(x.shape)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """[..., K] in x's dtype, over the last dimension. Raises BadInput for another dtype or no columns."""
    return _softmax(x, log=False)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """[..., K] in x's dtype, over the last dimension. Raises BadInput for another dtype or no columns."""
    return _softmax(x, log=True)


def row_sum(x: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """[...] in x's dtype: the sum over the last dimension over ``divisor``. Raises BadInput as softmax does."""
    rows = _flat(x)
    if x.device.type != "cuda":
        return by_tiles(lambda tile: (tile.float().sum(-1, keepdim=True) / divisor).to(x.dtype), rows).view(
            x.shape[:-1]
        )
    from . import rows_triton

    y = torch.empty(len(rows), dtype=x.dtype, device=x.device)
    if len(rows):
        rows_triton.sum_rows[(len(rows),)](rows, y, rows.shape[1], float(divisor), BLOCK=BLOCK, num_warps=4)
    return y.view(x.shape[:-1])


def mean(x: torch.Tensor) -> torch.Tensor:
    """[...] in x's dtype: the mean over the last dimension. Raises BadInput as softmax does."""
    return row_sum(x, x.shape[-1])
