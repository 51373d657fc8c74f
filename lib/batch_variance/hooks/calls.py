"""One call's arguments by name: bound to the function's signature, read and replaced by path, walked for tensors.

A path is a name and, after dots, keys, indices or attributes: ``q``, ``inputs.k``, ``pair.0``. Containers looked into
are tuples, named tuples, lists, dicts and dataclasses; anything else is passed on as it is.
"""

import copy
import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping

import torch

from ..common import BadInput

_PLAIN = {int, float, bool, str, type(None)}  # what is seen at once to be no container


def signature_of(function: Callable) -> inspect.Signature | None:
    """The function's signature, or None for builtins that have none (many torch operations)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


class Binder:
    """Names the arguments of one function's calls. Without a signature, positional ones are ``0``, ``1``, ..."""

    def __init__(self, signature: inspect.Signature | None):
        self._signature = signature
        parameters = signature.parameters.values() if signature is not None else ()
        self._by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._required = {p.name for p in parameters if p.default is p.empty}
        # Where each parameter has a name of its own, most calls are bound without inspect, which takes longer.
        own_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._plain = signature is not None and all(p.kind in own_name for p in parameters)

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> "Call":
        """Raises TypeError where the function itself would."""
        if self._signature is None:
            names = tuple(str(i) for i in range(len(args)))
            return Call({**dict(zip(names, args)), **kwargs}, names, None, None)
        if self._plain and len(args) <= len(self._by_position):
            values = dict(zip(self._by_position, args))
            values.update(kwargs)
            known = values.keys() <= self._signature.parameters.keys()
            if known and len(values) == len(args) + len(kwargs) and self._required <= values.keys():
                return Call({n: values[n] for n in self._signature.parameters if n in values}, (), None, None)
        values = dict(self._signature.bind(*args, **kwargs).arguments)
        kinds = {name: parameter.kind for name, parameter in self._signature.parameters.items()}
        variadic = next((n for n in values if kinds[n] is inspect.Parameter.VAR_POSITIONAL), None)
        splat = next((n for n in values if kinds[n] is inspect.Parameter.VAR_KEYWORD), None)
        before = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # With *args in use everything before it must stay positional; otherwise keywords keep the names readable.
        positional = tuple(n for n in values if kinds[n] in (before if variadic else before[:1]))
        return Call(values, positional, variadic, splat)


@dataclass(slots=True)
class Call:
    """Arguments by name. None is changed: ``replace`` gives another call."""

    values: Mapping[str, Any]
    positional: tuple[str, ...]
    variadic: str | None
    splat: str | None

    @property
    def args(self) -> tuple:
        return tuple(self.values[n] for n in self.positional) + tuple(
            self.values[self.variadic] if self.variadic else ()
        )

    @property
    def kwargs(self) -> dict[str, Any]:
        skip = {*self.positional, self.variadic, self.splat}
        named = {name: value for name, value in self.values.items() if name not in skip}
        return {**named, **(self.values[self.splat] if self.splat else {})}

    def run(self, function: Callable) -> Any:
        return function(*self.args, **self.kwargs)

    def with_values(self, values: Mapping[str, Any]) -> "Call":
        return Call(values, self.positional, self.variadic, self.splat)

    def has(self, path: str) -> bool:
        """Whether the path leads to a value other than None in this call."""
        return self.find(path) is not None

    def find(self, path: str) -> Any:
        """The value at a path, or None when there is none."""
        try:
            return self.get(path)
        except KeyError:
            return None

    def get(self, path: str) -> Any:
        """The value at a path; raises KeyError when there is none."""
        if path in self.values and path != self.splat:
            return self.values[path]
        return get_path(self.flat(), path)

    def replace(self, changes: Mapping[str, Any]) -> "Call":
        """A call with the values at these paths replaced; the containers on the way are copied, never changed."""
        values = dict(self.values)
        for path, value in changes.items():
            if path in values:
                values[path] = value
            elif self.splat and path.split(".")[0] in values[self.splat]:
                values[self.splat] = set_path(values[self.splat], path, value)
            else:
                values = set_path(values, path, value)
        return self.with_values(values)

    def flat(self) -> dict[str, Any]:
        """Arguments by name, with ``**kwargs`` spread out: what paths, checks and metadata makers go by."""
        if self.splat is None:
            return dict(self.values)
        named = {name: value for name, value in self.values.items() if name != self.splat}
        return {**named, **(self.values[self.splat] if self.splat else {})}


def get_path(tree: Any, path: str) -> Any:
    """Value at a dotted path in nested containers; raises KeyError naming the part that is missing."""
    for part in path.split(".") if path else ():
        try:
            if isinstance(tree, Mapping):
                tree = tree[part] if part in tree else tree[int(part)]
            elif isinstance(tree, (tuple, list)) and part.isdigit():
                tree = tree[int(part)]
            else:
                tree = getattr(tree, part)
        except (KeyError, IndexError, AttributeError, ValueError):
            raise KeyError(f"{path!r} (there is no {part!r})") from None
    return tree


def set_path(tree: Any, path: str, value: Any) -> Any:
    """A copy of ``tree`` with ``value`` at the path; only the containers on the way are copied."""
    if not path:
        return value
    part, _, rest = path.partition(".")
    inner = set_path(get_path(tree, part), rest, value)
    if isinstance(tree, Mapping):
        new = copy.copy(tree)
        new[part if part in tree else int(part)] = inner
        return new
    if isinstance(tree, (tuple, list)) and part.isdigit():
        items = list(tree)
        items[int(part)] = inner
        return _like(tree, items)
    if hasattr(tree, "_replace"):
        return tree._replace(**{part: inner})
    new = copy.copy(tree)
    object.__setattr__(new, part, inner)  # also where the dataclass is frozen
    return new


def _like(container: tuple | list, items: list) -> tuple | list:
    return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested containers with its path, in order."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
        return
    for part, inner in _children(tree):
        if isinstance(inner, torch.Tensor):
            yield f"{path}.{part}" if path else part, inner
        elif type(inner) not in _PLAIN:
            yield from tensors(inner, f"{path}.{part}" if path else part)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested containers with each tensor replaced. The containers are always new; what is no container is
    not.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, (tuple, list)):
        return _like(tree, [map_tensors(inner, change) for inner in tree])
    if isinstance(tree, Mapping):
        new = copy.copy(tree)
        for key in tree:
            new[key] = map_tensors(tree[key], change)
        return new
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        new = copy.copy(tree)
        for name, inner in _children(tree):
            object.__setattr__(new, name, map_tensors(inner, change))
        return new
    return tree


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (dict, Mapping)):
        yield from ((str(key), inner) for key, inner in tree.items())
    elif isinstance(tree, (tuple, list)):
        yield from ((str(i), inner) for i, inner in enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        # Fields may be unset on a half-built object: what is not there cannot carry a tensor.
        yield from ((f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree) if hasattr(tree, f.name))


def check_names(what: str, paths: Mapping[str, Any], signature: inspect.Signature | None, site: str) -> None:
    """Raise BadInput when a path's first part is no argument of the function."""
    if signature is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        return
    for path in paths:
        if path.split(".")[0] not in signature.parameters:
            names = ", ".join(signature.parameters)
            raise BadInput(f"{what} names {path!r}, but {site} has no such argument: it takes {names}.")
