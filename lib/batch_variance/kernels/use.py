"""Putting the invariant kernels under a torch model, and saying what that covers.

`InvariantKernels` watches every operation that torch dispatches inside a ``with`` block. Matrix products, attention,
softmax, log-softmax and sums over the last dimension are replaced, and on a CPU approximated functions too, whose
vector and scalar forms differ and whose share of each depends on the batch. Operations that work value by value, move
values or look them up cannot mix rows and are let through; all others are let through too and reported as left alone.
`claim` refuses to speak for a model in which any was left alone.
"""

from collections import Counter

import pandas as pd
import torch
import torch.nn.functional as F
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
# Of whole numbers these are exact in any order.
_SUMS = {"sum", "cumsum"}
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


KEYS = 64  # keys of a block of attention


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

    Float32, head by head: blocks of `KEYS` keys fold in turn into a running maximum, sum and product, and each block
    takes two invariant matrix products of one shape. bias is added to the scores, or selects them where it is boolean.
    A row that attends to nothing gives 0. Hidden keys add exact zeros, and a block with none to see changes nothing:
    keys hidden behind a row's last, such as padding on the right, leave no trace. Padding on the left moves the keys
    among the blocks and with them the bits.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    (batch, heads, rows_q, _), keys = q.shape, k.shape[2]
    short = -keys % KEYS
    k, v = (F.pad(t.float(), (0, 0, 0, short)) for t in (k, v))
    seen = torch.ones(rows_q, keys, dtype=torch.bool, device=q.device)
    seen = F.pad(seen.tril() if causal else seen, (0, short))
    if bias is not None:
        bias = F.pad(bias.expand(batch, heads, rows_q, keys), (0, short))
    outs, lses, group = [], [], heads // k.shape[1]
    for b in range(batch):
        for h in range(heads):
            mine, shift = seen, None
            if bias is not None and bias.dtype == torch.bool:
                mine = seen & bias[b, h]
            elif bias is not None:
                shift = bias[b, h].float()
            out, lse = _one_head(q[b, h].float(), k[b, h // group], v[b, h // group], mine, shift, scale)
            outs.append(out)
            lses.append(lse)
    out = torch.stack(outs).view(batch, heads, rows_q, v.shape[3])
    return out.to(q.dtype), torch.stack(lses).view(batch, heads, rows_q)


def _one_head(q, k, v, seen, shift, scale):
    """`attention` of one head, in float32: out [Lq, Dv] and LSE [Lq]. seen, shift: [Lq, Lk], Lk a multiple of KEYS."""
    top = q.new_full((len(q), 1), -torch.inf)
    total, acc = torch.zeros_like(top), q.new_zeros(len(q), v.shape[1])
    for start in range(0, len(k), KEYS):
        block = slice(start, start + KEYS)
        scores = linear(q, k[block]) * scale
        if shift is not None:
            scores = scores + shift[:, block]
        scores = scores.masked_fill(~seen[:, block], -torch.inf)
        here = scores.amax(1, keepdim=True)
        nothing, new = here.isneginf(), torch.maximum(top, here)
        base = new.masked_fill(new.isneginf(), 0.0)
        weights, fade = _approximated(torch.exp, scores - base), _approximated(torch.exp, top - base)
        sums = total * fade + rows.row_sum(weights).unsqueeze(1)
        products = acc * fade + linear(weights, v[block].t().contiguous())
        top, total, acc = new, torch.where(nothing, total, sums), torch.where(nothing, acc, products)
    empty = total == 0
    whole = total.masked_fill(empty, 1.0)
    lse = (top + _approximated(torch.log, whole)).squeeze(1)
    return (acc / whole).masked_fill(empty, 0.0), lse


def _approximated(func, x):
    """func of x [..., K], value by value. On a CPU by tiles, as vector and scalar forms differ there."""
    if x.device.type != "cpu":
        return func(x)
    return by_tiles(func, x.reshape(-1, x.shape[-1])).view(x.shape)


def _last(x, dim) -> bool:
    dims = [dim] if isinstance(dim, int) else list(dim or [])
    return len(dims) == 1 and x.dim() > 0 and dims[0] % x.dim() == x.dim() - 1 and _usable(x)


def _softmax_like(operation):
    return lambda x, dim, half_to_float=False: operation(x) if _last(x, dim) and not half_to_float else None


def _safe_softmax(x, dim, dtype=None):
    """Softmax that gives 0, not NaN, for a row that is minus infinity throughout."""
    if not _last(x, dim) or dtype not in (None, x.dtype):
        return None
    return rows.softmax(x).masked_fill(x.isneginf().all(-1, keepdim=True), 0.0)


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


def _cudnn_attention(
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    found = _attended(q, k, v, dropout_p, attn_bias, is_causal, scale)
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
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_attention,
    aten._safe_softmax.default: _safe_softmax,
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
        return _approximated(lambda tile: func(tile, *args[1:], **kwargs), args[0])
    return None


def _cannot_mix_rows(func, args) -> bool:
    if func in REPLACEMENTS or (_name(func).rstrip("_") in _APPROXIMATED and args[0].device.type == "cpu"):
        return False
    return torch.Tag.pointwise in func.tags or func.is_view or _name(func) in _MOVES


def _harmless(func, found) -> bool:
    """Whether a result has no rows that could mix, or is a sum of whole numbers."""
    if not isinstance(found, torch.Tensor):
        return False
    whole = not (found.is_floating_point() or found.is_complex())
    return not found.numel() or (whole and _name(func) in _SUMS)


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
        found = func(*args, **kwargs)
        apart = _cannot_mix_rows(func, args) or _harmless(func, found)
        self.calls[str(func), "cannot mix rows" if apart else "left alone"] += 1
        return found

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
        return (
            f"{replaced} of {self.calls.total()} calls were replaced, and the others cannot mix rows. That holds among"
            " batches padded alike."
        )
