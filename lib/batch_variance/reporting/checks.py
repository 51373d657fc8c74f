"""A check: one claim with its verdict and its three controls, shown in a notebook and carried to the report.

It knows the verdict rule and the form that summary.json fixes. What the claim is about, the studies know.
"""

import html
import math
import re
from pathlib import Path
from typing import Any, Literal

import nbformat
from IPython.display import display
from pydantic import BaseModel, ConfigDict

from ..common import TIERS, BadInput

MIME = "application/vnd.batch-variance.check+json"
CONTROLS = ("negative_control", "positive_control", "occurred")
_ID = re.compile(r"\d\d\.[a-z0-9]+(-[a-z0-9]+)*")
# A mark beside the word, so that a verdict does not rest on colour; the colours read on white and on black.
MARKS = {"pass": "✓", "fail": "✗", "inconclusive": "?"}
_COLOURS = {"pass": "#2e8b57", "fail": "#d1495b", "inconclusive": "#a67c00"}

Plain = int | float | str | bool | None


class Check(BaseModel):
    """One row of the verdict table; the fields are those of summary.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    notebook: str
    claim: str
    verdict: Literal["pass", "fail", "inconclusive"]
    evidence_tier: Literal[TIERS]
    value: Plain
    expected: Plain
    n: int | str
    interval: list[float] | None
    negative_control: bool | None
    positive_control: bool | None
    occurred: bool | None

    @property
    def controls(self) -> str:
        """In words, which control is missing or failed; or that all three hold."""
        said = []
        for name in CONTROLS:
            state = getattr(self, name)
            if state is not True:
                what = "occurred proof" if name == "occurred" else name.replace("_", " ")
                said.append(f"{what} {'missing' if state is None else 'failed'}")
        return ", ".join(said) or "all three controls hold"

    @property
    def facts(self) -> str:
        """Value, expectation, count, interval and tier in one line."""
        words = [f"value {readable(self.value)}, expected {readable(self.expected)}", counted(self.n)]
        if self.interval is not None:
            words.append(f"95% interval {readable_interval(self.interval)}")
        return " · ".join(words + [self.evidence_tier])

    def __str__(self) -> str:
        return f"{MARKS[self.verdict]} {self.verdict}  {self.id}  {self.claim}\n  {self.facts} · {self.controls}"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        return {MIME: self.model_dump(), "text/html": self._html(), "text/plain": str(self)}

    def _html(self) -> str:
        # Styled inline: JupyterLab shows this without the report's style sheet, in a light or a dark theme.
        colour = _COLOURS[self.verdict]
        box = f"border-left:4px solid {colour};padding:0.2em 0 0.2em 0.8em;margin:0.6em 0"
        return (
            f'<div id="check-{self.id}" style="{box}">'
            f'<strong style="color:{colour}">{MARKS[self.verdict]} {self.verdict}</strong> '
            f"{html.escape(self.claim)}<br>"
            f'<small style="opacity:0.8"><code>{self.id}</code> · {html.escape(self.facts)} · {self.controls}</small>'
            "</div>"
        )


def readable(value: Plain) -> str:
    """A number with up to four significant digits and thousands separated; other values as they come."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return f"{value:,.0f}"
        return f"{value:,.4g}" if abs(value) < 1e4 or abs(value) >= 1e15 else f"{value:,.0f}"
    return value


def readable_interval(interval: list[float]) -> str:
    return f"{readable(interval[0])} to {readable(interval[1])}"


def counted(n: int | str) -> str:
    """``n = 64`` for a number; a string, such as ``2,670 rows``, as it comes."""
    return f"n = {n:,}" if isinstance(n, int) else n


def valid_evidence(where: str, tier: str, n: Any) -> int | str:
    """The count as int or str. Raises BadInput for an unknown tier, or for a count that is no int and no words."""
    if tier not in TIERS:
        raise BadInput(f"{where}: evidence tier {tier!r} is unknown: give one of {', '.join(TIERS)}.")
    n = _plain(where, "n", n)
    if isinstance(n, bool) or not isinstance(n, (int, str)) or n == "":
        raise BadInput(f"{where}: n = {n!r} is no count: give an integer or a short string such as '2,670 rows'.")
    return n


def judge(
    id: str,
    claim: str,
    holds: bool,
    value: Any,
    expected: Any,
    n: int | str,
    tier: str,
    interval: tuple[float, float] | None = None,
    negative_control: bool | None = None,
    positive_control: bool | None = None,
    occurred: bool | None = None,
) -> Check:
    """Build a Check: ``inconclusive`` unless all three controls are True, else ``pass`` or ``fail`` by ``holds``.

    Args:
        id: notebook's number, a dot and a short name: ``02.solo-differs``.
        claim: one sentence that the value supports or refutes.
        holds: whether the measured value supports the claim.
        value, expected: a number, string, bool or None; numpy and torch scalars are unwrapped, NaN and
            infinities become None, as JSON has no word for them.
        n: what the value rests on, an integer or a short string.
        tier: one of ``common.TIERS``.
        interval: (low, high) of the value, or None.
        negative_control: what must be identical was; None if it was not looked at. Likewise
            positive_control (what must differ did) and occurred (the condition under test really happened).

    Raises BadInput for an id of another form, an empty claim, an unknown tier, or values of other kinds.
    """
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise BadInput(f"check id {id!r} is not of the form '02.solo-differs': notebook's number, a dot, a short name.")
    where = f"check {id}"
    if not isinstance(claim, str) or not claim.strip():
        raise BadInput(f"{where}: the claim is empty: say in one sentence what the value supports.")
    n = valid_evidence(where, tier, n)
    controls = {
        name: _truth(where, name, state)
        for name, state in zip(CONTROLS, (negative_control, positive_control, occurred))
    }
    holds = _truth(where, "holds", holds)
    if holds is None:
        raise BadInput(f"{where}: holds is None: say True or False, and leave a control out to stay inconclusive.")
    verdict = ("pass" if holds else "fail") if all(state is True for state in controls.values()) else "inconclusive"
    return Check(
        id=id,
        notebook=id.split(".")[0],
        claim=claim.strip(),
        verdict=verdict,
        evidence_tier=tier,
        value=_plain(where, "value", value),
        expected=_plain(where, "expected", expected),
        n=n,
        interval=_interval(where, interval),
        **controls,
    )


def check(
    id,
    claim,
    holds,
    value,
    expected,
    n,
    tier,
    interval=None,
    negative_control=None,
    positive_control=None,
    occurred=None,
) -> None:
    """Judge a claim (see ``judge``) and show it in the cell's output, from where the runner collects it."""
    display(judge(id, claim, holds, value, expected, n, tier, interval, negative_control, positive_control, occurred))


def collect(notebook: nbformat.NotebookNode | Path | str, name: str | None = None) -> list[Check]:
    """The checks in an executed notebook's outputs, in order, with ``notebook`` set to ``name``.

    ``name`` defaults to the file's stem where a path is given. Raises BadInput for an id that occurs twice or
    whose number is another notebook's.
    """
    if not isinstance(notebook, nbformat.NotebookNode):
        name = name or Path(notebook).stem
        notebook = nbformat.read(notebook, as_version=4)
    found: dict[str, Check] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if MIME not in output.get("data", {}):
                continue
            one = Check.model_validate(dict(output.data[MIME]))
            if one.id in found:
                raise BadInput(
                    f"check id {one.id} occurs twice in notebook {name or one.notebook}: give each check its own id."
                )
            if name and not name.startswith(one.notebook):
                raise BadInput(f"check {one.id} is in notebook {name}: its id must begin with that notebook's number.")
            found[one.id] = one.model_copy(update={"notebook": name or one.notebook})
    return list(found.values())


def _plain(where: str, what: str, value: Any) -> Plain:
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise BadInput(
                f"{where}: {what} is an array of several values: give one number or a short string."
            ) from None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadInput(f"{where}: {what} = {value!r} is a {type(value).__name__}: give a number, a string, a bool or None.")


def _truth(where: str, what: str, value: Any) -> bool | None:
    value = _plain(where, what, value)
    if value is None or isinstance(value, bool):
        return value
    # A count such as 3 would read as "yes" where the author may have meant "three differ".
    raise BadInput(f"{where}: {what} = {value!r} is not True, False or None: compare it with what it should be.")


def _interval(where: str, interval: Any) -> list[float] | None:
    if interval is None:
        return None
    try:
        low, high = (float(end) for end in interval)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: interval = {interval!r} is not a pair (low, high).") from None
    if math.isnan(low) or math.isnan(high):
        return None
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise BadInput(f"{where}: interval = {interval!r} is not a pair (low, high) of finite numbers in order.")
    return [low, high]
