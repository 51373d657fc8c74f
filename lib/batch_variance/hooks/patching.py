"""Putting a wrapper where a call is looked up, and taking it away again.

What is replaced is the name that the *caller* reads: ``from a import f`` in module b makes ``b:f`` another name than
``a:f``, and only the one that the engine calls is the call site. A target is ``"module:name"``,
``"module:Class.method"``, an ``(owner, name)`` pair, a mapping and its key, a bound method, a module-level function,
or a torch module (its ``forward``).
"""

import functools
import importlib
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from ..common import BadInput

_ABSENT = object()


class Target:
    """A place that holds a callable. ``read`` looks what it is, ``install`` puts a wrapper of it there, and ``remove``
    puts it back, unless by then the place holds something else, which is left there.
    """

    def __init__(self, target: Any):
        self.owner, self.name, self.site = _resolve(target)

    def read(self) -> None:
        """What the place holds now. Raises BadInput unless that can be called and has done its work when it returns."""
        self._raw = _stored(self.owner, self.name)
        self.function = self._callable()
        if inspect.iscoroutinefunction(self.function) or inspect.isgeneratorfunction(self.function):
            raise BadInput(
                f"{self.site} is a coroutine or generator: its work happens after the call, so name the plain function it calls."
            )

    def _callable(self) -> Callable:
        raw = self._raw
        if isinstance(raw, (staticmethod, classmethod)):
            return raw.__func__
        found = raw if raw is not _ABSENT else getattr(self.owner, self.name)
        if not callable(found):
            raise BadInput(f"{self.site} is a {type(found).__name__}, not something that can be called.")
        return found

    def install(self, wrap: Callable[[Callable], Callable]) -> None:
        wrapper = wrap(self.function)
        try:
            functools.update_wrapper(wrapper, self.function)
        except AttributeError:
            pass  # builtins may lack what is copied; nothing depends on it
        if isinstance(self._raw, (staticmethod, classmethod)):
            wrapper = type(self._raw)(wrapper)
        self._put(wrapper)
        self._installed = _stored(self.owner, self.name)

    def remove(self) -> None:
        if _stored(self.owner, self.name) is not self._installed:
            return
        if self._raw is not _ABSENT:
            self._put(self._raw)
        elif isinstance(self.owner, MutableMapping):
            del self.owner[self.name]
        else:
            delattr(self.owner, self.name)

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, MutableMapping):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


def _stored(owner: Any, name: str) -> Any:
    """What lies at the name itself, so that static and class methods are seen as such; absent where it is inherited."""
    if isinstance(owner, MutableMapping):
        return owner.get(name, _ABSENT)
    if inspect.ismodule(owner) or inspect.isclass(owner):
        return inspect.getattr_static(owner, name) if name in vars(owner) else _ABSENT
    return vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT


def _resolve(target: Any) -> tuple[Any, str, str]:
    if isinstance(target, str):
        return _from_path(target)
    if isinstance(target, tuple) and len(target) == 2 and isinstance(target[1], str):
        owner, name = target
        if isinstance(owner, MutableMapping):
            if name not in owner:
                raise BadInput(f"the mapping holds no {name!r}: it has {', '.join(map(str, owner))}.")
            return owner, name, f"{type(owner).__name__}[{name!r}]"
        if not hasattr(owner, name):
            raise BadInput(f"{_called(owner)} has no {name!r} to wrap.")
        return owner, name, f"{_called(owner)}.{name}"
    if isinstance(target, torch.nn.Module):
        return target, "forward", f"{type(target).__name__}.forward"
    if inspect.ismethod(target):
        return target.__self__, target.__name__, f"{_called(target.__self__)}.{target.__name__}"
    if callable(target) and getattr(target, "__module__", None) and getattr(target, "__qualname__", None):
        path = f"{target.__module__}:{target.__qualname__}"
        owner, name, site = _from_path(path) if "<locals>" not in path else (None, "", "")
        if owner is not None and getattr(owner, name) is target:
            return owner, name, site
    raise BadInput(
        f"{target!r} cannot be wrapped in place: give 'module:function', 'module:Class.method', or (owner, 'name')."
    )


def _from_path(path: str) -> tuple[Any, str, str]:
    module_name, _, inner = path.partition(":")
    if not module_name or not inner:
        raise BadInput(f"call site {path!r} is not of the form 'module:function' or 'module:Class.method'.")
    try:
        owner = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(f"call site {path!r}: module {module_name!r} cannot be imported here ({error}).") from error
    *middle, name = inner.split(".")
    for part in [*middle, name]:
        if not hasattr(owner, part):
            raise BadInput(f"call site {path!r}: {_called(owner)} has no {part!r}.")
        if part is not name:
            owner = getattr(owner, part)
    return owner, name, path


def _called(owner: Any) -> str:
    return getattr(owner, "__name__", None) or type(owner).__name__
