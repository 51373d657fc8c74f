"""What a report says of each notebook, and summary.json, in the form that DESIGN.md fixes."""

import base64
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

from ..common import TIERS
from .checks import Check, collect
from .execution import Outcome
from .drawings import MIME as DRAWING
from .figures import METADATA
from .parameters import Plan

NOT_RUN = "not run"
THUMBNAIL_WIDTH = 480  # pixels: twice the width it is shown at


@dataclass
class Entry:
    """A notebook of the report: planned, then filled in when it has run."""

    plan: Plan
    status: str = NOT_RUN
    seconds: float | None = None
    message: str = ""
    notebook: nbformat.NotebookNode | None = None  # executed; None if there is no page to show
    checks: list[Check] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)  # file, alt, png
    tiers: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def file_names(self) -> list[str]:
        return [f"{self.name}.ipynb", f"{self.name}.html"]

    @property
    def page(self) -> str | None:
        return f"{self.name}.html" if self.notebook is not None else None

    def finish(self, outcome: Outcome) -> None:
        """Take in a run. Raises BadInput for checks that cannot be collected, after all else is filled in."""
        self.status, self.seconds, self.message = outcome.status, round(outcome.seconds, 2), outcome.message
        self.notebook = outcome.notebook
        if self.notebook is None:
            return
        self.figures = list(_figures(self.notebook, self.plan.number))
        marked = [output.metadata.get(METADATA, {}).get("tier") for output in _outputs(self.notebook)]
        self.checks = collect(self.notebook, self.name)
        found = set(marked) | {one.evidence_tier for one in self.checks}
        self.tiers = [tier for tier in TIERS if tier in found]

    @property
    def failed(self) -> bool:
        return self.status in ("failed", "timeout") or any(one.verdict == "fail" for one in self.checks)


def summary(entries: list[Entry], provenance: dict[str, Any]) -> dict[str, Any]:
    """The content of summary.json: plain JSON, without NaN."""
    return {
        "notebooks": [{"name": entry.name, "status": entry.status, "seconds": entry.seconds} for entry in entries],
        "checks": [one.model_dump() for entry in entries for one in entry.checks],
        "provenance": provenance,
    }


def thumbnail(png: bytes) -> str:
    """A small copy of a PNG as data URI, so that the index page is whole by itself."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.thumbnail((THUMBNAIL_WIDTH, THUMBNAIL_WIDTH))
    small = io.BytesIO()
    image.quantize(64).save(small, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(small.getvalue()).decode()


def _outputs(notebook: nbformat.NotebookNode):
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "metadata" in output:
                yield output


def _figures(notebook: nbformat.NotebookNode, number: str):
    """The figures displayed by ``show``, the later one where two share a name."""
    found = {}
    for output in _outputs(notebook):
        about = output.metadata.get(METADATA, {})
        if "figure" in about and "image/png" in output.get("data", {}):
            png = base64.b64decode(output.data["image/png"])
            stem = f"{number}_{about['figure']}"
            found[stem] = {"stem": stem, "file": f"{stem}.png", "alt": about["alt"], "png": png}
            if DRAWING in output.data:
                kept = {name: about[name] for name in ("alt", "tier", "n")}
                found[stem]["source"] = kept | json.loads(json.dumps(output.data[DRAWING]))
    return found.values()


def figure_record(figure: dict[str, Any], provenance: dict[str, Any]) -> str | None:
    """The JSON text from which ``reporting.rebuild`` draws a figure again; None where its call is not known."""
    if "source" not in figure:
        return None
    record = figure["source"] | {"commit": provenance["commit"], "date": provenance["date"]}
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in record.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def remove_stale_figures(folder: Path, entry: Entry) -> None:
    """Remove figures that an earlier report left for this notebook and this one no longer draws."""
    current = {figure["stem"] for figure in entry.figures}
    for path in folder.glob(f"{entry.plan.number}_*"):
        if path.suffix in (".png", ".json") and path.stem not in current:
            path.unlink(missing_ok=True)
