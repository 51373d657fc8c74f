"""Where a cited number of an exported page leads: the row of a table, of a figure's data, of the parameters or checks.

Sentences name their sources (``studies.sources``). Here the names meet what the page holds, and a name or a key that
it does not hold is an error, so that no link is dead and none leads to another row.
"""

import csv
import html
import io
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import nbformat
import pandas as pd

from ..common import BadInput
from ..studies.sources import CHECKS, FIGURE, MARK, PARAMETERS, plain
from .checks import MIME as CHECK
from .downloads import tables_of
from .drawings import MIME as DRAWING
from .drawings import frames_of, names_in
from .figures import METADATA, rows_html

SOURCE = "from "  # how the title of a link to a source begins
DATA = "data_html"  # where `Landings.unfold` leaves a figure's cited data
MOST_ROWS = 60  # of a figure's frame shown in the page, besides rows that a sentence cites; the CSV holds all


@dataclass
class Landing:
    """Rows of text under an id, which can be cited. words: what a reader is told; shown: rows cited, for long frames."""

    anchor: str
    words: str
    columns: list[str]
    rows: list[list[str]]
    frame: pd.DataFrame | None = None  # of a figure: drawn into the page only if a sentence cites it
    shown: set[int] = field(default_factory=set)
    cited: bool = False

    def matching(self, key: dict[str, str]) -> list[int]:
        """Numbers, from 1, of the rows whose columns have these values."""
        if not set(key) <= set(self.columns):
            return []
        places = {self.columns.index(column): value for column, value in key.items()}
        return [
            number
            for number, row in enumerate(self.rows, 1)
            if all(_same(row[place], value) for place, value in places.items())
        ]


class Landings:
    """What sentences of one executed notebook may cite, by name."""

    def __init__(self, notebook: nbformat.NotebookNode, parameters: dict[str, Any] | None = None):
        self.found: dict[str, list[Landing]] = {}
        self.figures: list[tuple[dict, list[Landing]]] = []  # a figure's output, and its frames
        for one in tables_of(notebook):
            name = one["output"]["metadata"][METADATA].get("source")
            if name:
                number = one["number"]
                self._add(name, _of_csv(f"table-{number}", f"Table {number}, {one['caption']}", one["csv"]))
        checks = [
            [output["data"][CHECK]["id"]]
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if CHECK in output.get("data", {})
        ]
        self._add(CHECKS, Landing("data", "the checks", ["id"], checks))
        names = [[name] for name in parameters or {}]
        self._add(PARAMETERS, Landing("parameters", "the parameters", ["name"], names))
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if DRAWING in output.get("data", {}):
                    self._add_figure(output)

    def _add(self, name: str, landing: Landing) -> None:
        self.found.setdefault(name, []).append(landing)

    def _add_figure(self, output: dict[str, Any]) -> None:
        figure, source = output["metadata"][METADATA]["figure"], json.loads(json.dumps(output["data"][DRAWING]))
        own, names = [], names_in(source)
        again = sum(one["metadata"][METADATA]["figure"] == figure for one, _ in self.figures)
        frames = frames_of(source)
        for argument, frame in frames.items():
            anchor = f"figure-{figure}-{argument}".replace(" ", "-") + (f"-{again + 1}" if again else "")
            words = f"data of figure {figure}" + (f", {argument}" if len(frames) > 1 else "")
            landing = _of_csv(anchor, words, frame.to_csv(index=False))
            landing.frame = frame
            own.append(landing)
            self._add(f"{FIGURE}{figure}/{argument}", landing)
            if names.get(argument) and names[argument] not in self.found:
                self._add(names[argument], landing)
        for landing in own[:1]:  # by the figure's name alone: its first frame
            self._add(f"{FIGURE}{figure}", landing)
        self.figures.append((output, own))

    def resolve(self, source: str) -> tuple[str, str]:
        """(anchor, words) of a source as `cite` writes it. Raises BadInput where the page holds no such row."""
        name, _, query = source.partition("?")
        key = dict(parse_qsl(query, keep_blank_values=True))
        places = self.found.get(name)
        if not places:
            raise BadInput(f"a sentence cites {name!r}, and the page shows no table or figure of that name.")
        for one in places:
            rows = one.matching(key)
            if not rows:
                continue
            one.cited = True
            if len(rows) > 1 or not key:
                return one.anchor, one.words
            one.shown.add(rows[0])
            return self._row(name, one, rows[0]), f"{one.words}, row {rows[0]}"
        raise BadInput(f"a sentence cites {name!r} at {query}, and {places[0].words} has no such row.")

    def _row(self, name: str, one: Landing, row: int) -> str:
        first = one.rows[row - 1][0]
        if name == CHECKS:
            return f"data-{first}"
        return f"parameter-{first}" if name == PARAMETERS else f"{one.anchor}-row-{row}"

    def linked(self, text: str) -> str:
        """Markdown in which every citation that resolves is a link, with the title that `SOURCE` begins; another stays
        plain, as `check_sources` reports it."""

        def link(found) -> str:
            try:
                anchor, words = self.resolve(html.unescape(found.group(1)))
            except BadInput:
                return found.group(2)
            words = words.replace("\\", "").replace('"', "'")
            return f'[{found.group(2)}](<#{anchor}> "{SOURCE}{words}")'

        return MARK.sub(link, text)

    def unfold(self) -> None:
        """Put the data that sentences cite, folded, into the metadata of the output that shows their figure."""
        for output, own in self.figures:
            cited = "".join(_folded(one) for one in own if one.cited)
            if cited:
                output["metadata"][METADATA][DATA] = cited


def check_sources(notebook: nbformat.NotebookNode, parameters: dict[str, Any]) -> None:
    """Raises BadInput where a sentence of an executed notebook cites what its page does not hold."""
    landings = Landings(notebook, parameters)
    for text in sentences(notebook):
        for source, shown in MARK.findall(text):
            try:
                landings.resolve(html.unescape(source))
            except BadInput as error:
                raise BadInput(f"{str(error)[:-1]} (the number {plain(shown)!r}).") from None


def sentences(notebook: nbformat.NotebookNode):
    """The markdown that cells displayed."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                yield "".join(output["data"]["text/markdown"])


def _folded(one: Landing) -> str:
    chosen = sorted(set(range(1, min(len(one.rows), MOST_ROWS) + 1)) | one.shown)
    body = rows_html(one.frame.iloc[[number - 1 for number in chosen]])
    marks = iter(chosen)
    parts = body.split("<tbody><tr>")
    body = parts[0] + "<tbody>" + "".join(
        f'<tr id="{one.anchor}-row-{next(marks)}">{row}' for row in ("<tr>".join(parts[1:])).split("<tr>")
    )
    count = f"{len(one.rows):,} rows" if len(chosen) == len(one.rows) else f"{len(chosen)} of {len(one.rows):,} rows"
    words = html.escape(one.words[0].upper() + one.words[1:])
    return (
        f'<details class="code data" id="{html.escape(one.anchor)}"><summary>{words}, {count}</summary>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{words}, {html.escape(one.anchor)}">{body}</div>'
        "</details>"
    )


def _of_csv(anchor: str, words: str, text: str) -> Landing:
    rows = list(csv.reader(io.StringIO(text)))
    return Landing(anchor, words, rows[0] if rows else [], rows[1:])


def _same(cell: str, value: str) -> bool:
    if cell == value:
        return True
    try:
        return float(cell) == float(value)
    except ValueError:
        return False
