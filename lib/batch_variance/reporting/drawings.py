"""A figure kept as data: which plot function drew it, and the tidy frames it was given, as JSON.

So a committed figure is redrawn without running what measured it, and a page hands out the numbers behind a picture.
It knows how frames become JSON and back without losing a bit; what they mean, the plot functions know.
"""

import functools
import importlib
import inspect
import math
from typing import Any, Callable

import pandas as pd
from matplotlib.figure import Figure

from ..common import BadInput
from ..studies.sources import name_of

MIME = "application/vnd.batch-variance.figure+json"
_PLOTS = "batch_variance.reporting.plots."


def drawn(function: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorator for a plot function of ``reporting.plots``: its figures remember the call that drew them.

    Arguments are frames, plain values, and lists and dicts of these. Raises TypeError for others.
    """
    signature = inspect.signature(function)
    module = function.__module__.removeprefix(_PLOTS)

    @functools.wraps(function)
    def draw(*args, **kw):
        call = signature.bind(*args, **kw).arguments
        kept = {name: _pack(value, name) for name, value in call.items()}
        fig = function(*args, **kw)
        fig.drawn_by = {"draw": f"{module}.{function.__name__}", "arguments": kept}
        return fig

    return draw


def source_of(fig: Figure) -> dict[str, Any] | None:
    """The call that drew a figure, as plain JSON; None if its function is not marked ``drawn``."""
    return getattr(fig, "drawn_by", None)


def redraw(source: dict[str, Any]) -> Figure:
    """Draw a figure again from ``source_of``'s record. Raises BadInput where the plot function is not there."""
    module, _, name = str(source.get("draw")).rpartition(".")
    try:
        function = getattr(importlib.import_module(_PLOTS + module), name)
    except (ImportError, AttributeError):
        raise BadInput(f"no plot function {source.get('draw')!r}: record this figure again.") from None
    return function(**{key: _unpack(value) for key, value in source["arguments"].items()})


def names_in(source: dict[str, Any]) -> dict[str, str]:
    """The names under which sentences cite the frames in a record, by argument; arguments without one are left out."""
    values = source["arguments"].items()
    return {name: value["source"] for name, value in values if isinstance(value, dict) and "source" in value}


def frames_of(source: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """The frames in a record, by argument (and key, for a dict of frames)."""
    found: dict[str, pd.DataFrame] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, dict) and "columns" in value:
            frame = _unpack(value)
            found[name] = frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index()
        elif isinstance(value, dict):
            for key, inner in value["pairs"]:
                visit(f"{name}-{key}", inner)
        elif isinstance(value, list):
            for place, inner in enumerate(value):
                visit(f"{name}-{place}", inner)

    for name, value in source["arguments"].items():
        visit(name, value)
    return found


def _pack(value: Any, where: str) -> Any:
    if isinstance(value, pd.DataFrame):
        plain = isinstance(value.index, pd.RangeIndex) and value.index.start == 0 and value.index.step == 1
        columns = [value.iloc[:, place] for place in range(value.shape[1])]
        name = name_of(value)
        return ({"source": name} if name else {}) | {
            "columns": [_pack(name, where) for name in value.columns],
            "types": [str(column.dtype) for column in columns],
            "index": None if plain else [_pack(name, where) for name in value.index],
            "index_name": value.index.name,
            "values": [[_pack(item, where) for item in column.tolist()] for column in columns],
        }
    if isinstance(value, dict):
        return {"pairs": [[_pack(key, where), _pack(inner, where)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_pack(item, where) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # JSON has no word for it
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"argument {where} holds a {type(value).__name__}: a drawn figure's arguments are frames and plain values."
    )


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "pairs" in value:
        return {_unpack(key): _unpack(inner) for key, inner in value["pairs"]}
    index = None if value["index"] is None else pd.Index(_unpack(value["index"]), name=value["index_name"])
    columns = [
        pd.Series(_unpack(items), index=index, dtype=kind) for items, kind in zip(value["values"], value["types"])
    ]
    frame = pd.concat(columns, axis=1) if columns else pd.DataFrame(index=index)
    frame.columns = [_unpack(name) for name in value["columns"]]
    return frame
