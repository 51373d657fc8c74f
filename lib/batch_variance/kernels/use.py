"""Putting the invariant kernels under a torch model, and saying what that covers.

`InvariantKernels` watches every operation that torch dispatches inside a ``with`` block. Matrix products, attention,
softmax, log-softmax and sums over the last dimension are replaced, and on a CPU approximated functions too, whose vector and
scalar forms differ and whose share of each depends on the batch. Operations that work value by value, move values or
look them up cannot mix rows and are let through; all others are let through too and reported as left alone. `claim`
refuses to speak for a model in which any was left alone.
"""

from collections import Counter

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..common import BadInput
from .gemm.reference import tiled_matmul
from .norm import rows
from .tiles import by_tiles

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOVES = {
    "embedding",
    "index",
    "index_select",
    "gather",
    "cat",
    "stack",
    "clone",
    "copy_",
    "_to_copy",
    "constant_pad_nd",
    "repeat",
    "empty",
    "empty_like",
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
    "full",
    "full_like",
    "new_zeros",
    "new_empty",
    "new_full",
    "new_ones",
    "arange",
    "scalar_tensor",
    "lift_fresh",
    "fill_",
    "zero_",
    "slice_scatter",
    "index_put_",
    "scatter",
    "topk",
    "argmax",
    "max",
    "amax",
    "sort",
    "_local_scalar_dense",
    "tril",
    "triu",
    "masked_fill_",
    "empty_strided",
    "split_with_sizes",
    "detach",
    "roll",
    "flip",
    "any",
    "all",
    "is_nonzero",
    "_unsafe_view",
    "resize_",
    "_reshape_copy",
    "unbind",
    "equal",
    "eye",
}
# Of these a CPU computes full vectors by one approximation and the rest of a thread's share by another.
_APPROXIMATED = {
    "silu",
    "sigmoid",
    "exp",
    "gelu",
    "tanh",
    "log",
    "sin",
    "cos",
    "softplus",
    "erf",
    "expm1",
    "log1p",
    "mish",
}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, row-invariant: [..., N] from x [..., K], weight [N, K], bias [N]. On CUDA the invariant GEMM, on a
    CPU tiles."""
    flat = x.reshape(-1, x.shape[-1])
    if x.device.type == "cuda":
        from .gemm.invariant import matmul

        y = matmul(flat, weight, bias)
    else:
        y = tiled_matmul(flat, weight)
        y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("batch_variance::linear", mutates_args=())
def _linear_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear(x, weight, bias)


@_linear_op.register_fake
def _(x, weight, bias=None):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _usable(*tensors: torch.Tensor) -> bool:
    return (
        len({(t.dtype, t.device) for t in tensors}) == 1
        and tensors[0].dtype in _FLOATS
        and not any(0 in t.shape for t in tensors)
    )


def _mm(a, b):
    return linear(a, b.t()) if _usable(a, b) else None


def _addmm(bias, a, b, beta=1, alpha=1):
    plain = beta == 1 and alpha == 1 and bias.dim() == 1 and _usable(bias, a, b)
    return linear(a, b.t(), bias) if plain else None


def _bmm(a, b):
    """Matrix by matrix, so that none knows how many there are."""
    if not _usable(a, b):
        return None
    return torch.stack([linear(x, y.t().contiguous()) for x, y in zip(a, b)])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention whose rows are independent: out [B, H, Lq, Dv] in q's dtype and LSE [B, H, Lq]
    float32, from q [B, H, Lq, D], k [B, G, Lk, D], v [B, G, Lk, Dv], H a multiple of G.

    Two invariant matrix products and a softmax in float32 for each head; bias is added to the scores, or selects them
    where it is boolean. A row that attends to nothing gives 0. How many keys there are, padding included, is part of
    the sum's tree: rows agree among batches padded alike.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1) if causal else None
    outs, lses, group = [], [], q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = linear(q[b, h].float(), k[b, h // group].float()) * scale
            if bias is not None:
                mine = bias[b, h]
                scores = scores.masked_fill(~mine, -torch.inf) if mine.dtype == torch.bool else scores + mine.float()
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            nothing = scores.amax(1, keepdim=True).isneginf()
            scores = torch.where(nothing, 0.0, scores)
            weights = rows.softmax(scores).masked_fill(nothing, 0.0)
            outs.append(linear(weights, v[b, h // group].float().t().contiguous()))
            lse = scores.amax(1) - rows.log_softmax(scores).amax(1)
            lses.append(lse.masked_fill(nothing[:, 0], -torch.inf))
    out = torch.stack(outs).view(*q.shape[:2], q.shape[2], v.shape[3])
    return out.to(q.dtype), torch.stack(lses).view(q.shape[:3])


def _last(x, dim) -> bool:
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    return len(dims) == 1 and x.dim() > 0 and dims[0] % x.dim() == x.dim() - 1 and _usable(x)


def _softmax_like(operation):
    return lambda x, dim, half_to_float=False: operation(x) if _last(x, dim) and not half_to_float else None


def _reduce(operation):
    def run(x, dim=None, keepdim=False, dtype=None):
        if not _last(x, dim) or dtype not in (None, x.dtype):
            return None
        found = operation(x)
        return found.unsqueeze(-1) if keepdim else found

    return run


def _rms_norm(x, normalized_shape, weight=None, eps=None):
    """(y, 1 / root mean square), as torch's fused operation on CUDA gives them. eps: None is float32's, the dtype in
    which torch computes, and not that of x."""
    if list(normalized_shape) != [x.shape[-1]] or not _usable(x, *([] if weight is None else [weight])):
        return None
    wide = x.float()
    inverse = torch.rsqrt(rows.mean(wide * wide) + (torch.finfo(wide.dtype).eps if eps is None else eps)).unsqueeze(-1)
    y = wide * inverse
    return (y if weight is None else y * weight.float()).to(x.dtype), inverse


def _attended(q, k, v, dropout, bias, causal, scale):
    """`attention`, or None where it does not do what is asked."""
    grouped = q.dim() == k.dim() == v.dim() == 4 and q.shape[1] % max(k.shape[1], 1) == 0
    known = grouped and k.shape[:3] == v.shape[:3] and not dropout and _usable(q, k, v)
    return attention(q, k, v, bias, causal, scale) if known else None


def _attention_on_cpu(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    return _attended(q, k, v, dropout_p, attn_mask, is_causal, scale)


def _efficient_attention(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    found = _attended(q, k, v, dropout_p, attn_bias, is_causal, scale)
    return found and (*found, *_no_dropout(q))


def _flash_attention(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    found = _attended(q, k, v, dropout_p, None, is_causal, scale)
    return found and (*found, None, None, q.shape[2], k.shape[2], *_no_dropout(q), q.new_empty(0))


def _no_dropout(q):
    """The seed and offset of a dropout that does not happen, which only a backward pass would read."""
    return q.new_zeros(2, dtype=torch.int64), q.new_zeros((), dtype=torch.int64)


REPLACEMENTS = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_on_cpu,
    aten._scaled_dot_product_flash_attention.default: _flash_attention,
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._softmax.default: _softmax_like(rows.softmax),
    aten._log_softmax.default: _softmax_like(rows.log_softmax),
    aten.mean.dim: _reduce(rows.mean),
    aten.sum.dim_IntList: _reduce(rows.row_sum),
}
if hasattr(aten, "_fused_rms_norm"):
    REPLACEMENTS[aten._fused_rms_norm.default] = _rms_norm


def _name(func) -> str:
    return func._schema.name.removeprefix("aten::")


def _replaced(func, args, kwargs):
    """The replacement's result, or None where there is none for this call."""
    if func in REPLACEMENTS:
        return REPLACEMENTS[func](*args, **kwargs)
    if _name(func) in _APPROXIMATED and args[0].device.type == "cpu" and args[0].dim() and args[0].numel():
        x = args[0]
        return by_tiles(lambda tile: func(tile, *args[1:], **kwargs), x.reshape(-1, x.shape[-1])).view(x.shape)
    return None


def _cannot_mix_rows(func, args) -> bool:
    if func in REPLACEMENTS or (_name(func).rstrip("_") in _APPROXIMATED and args[0].device.type == "cpu"):
        return False
    return torch.Tag.pointwise in func.tags or func.is_view or _name(func) in _MOVES


class InvariantKernels(TorchDispatchMode):
    """``with InvariantKernels() as used: model(...)``. For inference: gradients do not flow through the
    replacements."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = _replaced(func, args, kwargs)  # dispatch modes are off in here: no recursion
        if found is not None:
            self.calls[str(func), "replaced"] += 1
            return found
        self.calls[str(func), "cannot mix rows" if _cannot_mix_rows(func, args) else "left alone"] += 1
        return func(*args, **kwargs)

    def report(self) -> pd.DataFrame:
        """One row an operation: operation, treatment (replaced, cannot mix rows, left alone), calls."""
        found = [{"operation": name, "treatment": how, "calls": calls} for (name, how), calls in self.calls.items()]
        table = pd.DataFrame(found, columns=["operation", "treatment", "calls"])
        return table.sort_values(["treatment", "calls"], ascending=[False, False], ignore_index=True)

    @property
    def left_alone(self) -> list[str]:
        """Operations that may mix rows and were not replaced."""
        return sorted({name for name, how in self.calls if how == "left alone"})

    def claim(self) -> str:
        """One sentence on what was covered. Raises BadInput where nothing ran or an operation was left alone."""
        if not self.calls:
            raise BadInput("no operation ran under the invariant kernels: run the model inside the with block.")
        if self.left_alone:
            raise BadInput(
                f"batch invariance cannot be claimed: {', '.join(self.left_alone)} may depend on the batch and "
                "was left alone."
            )
        replaced = sum(calls for (_, how), calls in self.calls.items() if how == "replaced")
        return f"{replaced} of {self.calls.total()} calls were replaced, and the others cannot mix rows."
