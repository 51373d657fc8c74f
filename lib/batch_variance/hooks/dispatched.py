"""The operations that torch dispatches while a module runs: which, in which module, on what, with what result."""

from typing import Any, Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

_BACKWARD_ONLY = frozenset({"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"})
# Their results hold whatever lay in memory.
_UNWRITTEN = ("aten.empty", "aten.new_empty")
_VIEWS = ("aten.detach.default", "aten._reshape_alias.default", "aten._unsafe_view.default")


class Recorder(TorchDispatchMode):
    """Hands each operation that computes to ``saw(recorder, function, leaves, spec, outputs)``; views and factories
    pass by.

    leaves, spec: the flattened arguments, those that the operation may write as they were before. Operations on
    tensors without strides (nested, sparse) are handed on with neither leaves nor outputs.
    """

    def __init__(self, module: torch.nn.Module, saw: Callable):
        super().__init__()
        self.phase, self._saw, self._stack, self._handles = "", saw, [], []
        for name, part in module.named_modules():
            self._handles.append(part.register_forward_pre_hook(self._entering(name)))
            self._handles.append(part.register_forward_hook(self._leaving, always_call=True))

    @property
    def where(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _entering(self, name: str):
        def hook(module, args):
            self._stack.append(name)

        return hook

    def _leaving(self, module, args, output):
        self._stack.pop()

    def __exit__(self, *exception):
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves) or _computes_nothing(function):
            return function(*args, **kwargs)
        if not all(map(_strided, tensors(leaves))):
            result = function(*args, **kwargs)
            self._saw(self, function, [], spec, [])
            return result
        before = [copied(leaf) for leaf in leaves] if function._schema.is_mutable else leaves
        result = function(*args, **kwargs)
        outputs = _results(function, result, args, kwargs)
        if not all(map(_strided, outputs)):
            self._saw(self, function, [], spec, [])
        elif any(t.numel() for t in outputs):
            self._saw(self, function, before, spec, outputs)
        return result


def _computes_nothing(function: Callable) -> bool:
    name = str(function)
    return getattr(function, "is_view", False) or name in _VIEWS or name.startswith(_UNWRITTEN)


def _strided(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested


def tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def copied(leaf: Any) -> Any:
    """A tensor's own copy with the same strides. Dimensions that share one memory get memory each, outside the others:
    kernels ask for the inner strides that a padded mask has.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    strides = list(leaf.stride())
    reach = 1 + sum((n - 1) * s for n, s in zip(leaf.shape, strides) if n)
    for d in reversed(range(leaf.dim())):
        if strides[d] == 0 and leaf.shape[d] > 1:
            strides[d] = reach = -(-reach // 16) * 16
            reach *= leaf.shape[d]
    return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device).copy_(leaf.detach())


def run_again(function: Callable, leaves: Sequence[Any], spec: Any) -> list[torch.Tensor]:
    """What the operation computes on these flattened arguments; those that it writes are written."""
    args, kwargs = tree_unflatten(list(leaves), spec)
    return _results(function, function(*args, **kwargs), args, kwargs)


def _results(function: Callable, result: Any, args: Sequence[Any], kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operation computed: what it returns, or where it returns nothing, what it writes.

    What fused attention returns for its backward pass alone is left out: seeds and offsets are not even written where
    nothing is dropped, so their bits are whatever lay in memory."""
    named = zip(function._schema.returns, result) if isinstance(result, tuple) else ((None, result),)
    kept = [value for declared, value in named if declared is None or declared.name not in _BACKWARD_ONLY]
    found = tensors(tree_flatten(kept)[0])
    if found or not function._schema.is_mutable:
        return found
    given = [
        args[i] if i < len(args) else kwargs.get(declared.name)
        for i, declared in enumerate(function._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]
    return tensors(tree_flatten(given)[0])
