"""Where a number in a sentence came from, said inside the sentence: the name of a table and the key of a row.

A sentence cites a frame that was `named`; in JupyterLab the cited number reads as any other. The exported page turns it
into a link to that very row (``reporting.landings``), and refuses what it cannot find. A frame without a name is cited
in vain, and its numbers stay plain.
"""

import html
import re
from urllib.parse import urlencode

import pandas as pd

_NAME = "source"  # key in a frame's attrs
MARK = re.compile(r'<span data-source="([^"]*)">(.*?)</span>', re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,<>-])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?(?![\w<>])")
PARAMETERS, CHECKS, FIGURE = "parameters", "checks", "figure:"


def named(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The frame under a name by which sentences cite it; a table or figure made of it, or of some of its columns or
    rows, carries the name along."""
    frame = frame.copy(deep=False)
    frame.attrs = {**frame.attrs, _NAME: name}
    return frame


def name_of(frame: pd.DataFrame) -> str | None:
    return frame.attrs.get(_NAME)


def cite(text: object, source: pd.DataFrame | str, **key: object) -> str:
    """``text`` with its source: the row, or the rows, of a named frame whose columns have the values of ``key``; without
    a key all of it. A source may be given by its name: "figure:NAME" for the data of a figure.

    Raises ValueError where the frame has no such row, so that a sentence cannot cite what it was not computed from.
    """
    name = source if isinstance(source, str) else name_of(source)
    if name is None:
        return str(text)
    plain = {column: value.item() if hasattr(value, "item") else value for column, value in key.items()}
    if not isinstance(source, str) and not _matching(source, plain):
        raise ValueError(f"table {name!r} has no row with {plain}: a number cannot be computed from it.")
    where = f"{name}?{urlencode(plain)}" if plain else name
    return f'<span data-source="{html.escape(where)}">{text}</span>'


def cite_all(text: str, source: pd.DataFrame | str, **key: object) -> str:
    """``text`` with each of its numbers cited alike."""
    return NUMBER.sub(lambda found: cite(found.group(), source, **key), text)


def given(p, name: str, form: str = "") -> str:
    """The value of a notebook's parameter, cited. Raises AttributeError for one that ``p`` does not have."""
    return cite(format(getattr(p, name), form), PARAMETERS, name=name)


def verdict(text: object, check: str) -> str:
    """A number that a check of this notebook judges, cited by the check's id."""
    return cite(text, CHECKS, id=check)


def plain(text: str) -> str:
    """A sentence without its citations, as alt text needs it."""
    return MARK.sub(r"\2", text)


def _matching(frame: pd.DataFrame, key: dict) -> bool:
    if not set(key) <= set(map(str, frame.columns)):
        return False
    rows = pd.Series(True, index=frame.index)
    for column, value in key.items():
        rows &= frame[column] == value
    return bool(rows.any())
