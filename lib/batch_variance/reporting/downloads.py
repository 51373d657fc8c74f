"""What a page hands out: the notebook, the parameters that reproduce it, and its numbers as CSV.

All but the executed notebook travel inside the page, so that they are still there when the page is mailed alone.
"""

import base64
import csv
import io
import json
import re
import zipfile
from typing import Any

import nbformat
import pandas as pd
import yaml

from .checks import Check
from .drawings import MIME as DRAWING
from .drawings import frames_of
from .figures import METADATA
from .results import Entry

_FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # zip's earliest: the same numbers make the same archive


def data_uri(kind: str, content: str | bytes) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def parameters_text(entry: Entry, provenance: dict[str, Any]) -> str:
    """YAML that ``batch-variance report -f`` takes: this notebook, with every value that this run had."""
    head = (
        f"# batch-variance report -f {entry.name}.parameters.yaml\n# as run at commit {provenance['commit']} on "
        f"{provenance['date']}\n"
    )
    return head + yaml.safe_dump({entry.name: entry.plan.values}, sort_keys=False, allow_unicode=True, width=120)


def checks_csv(checks: list[Check]) -> str:
    """The checks in full precision, a row each, with the fields of summary.json."""
    rows = [one.model_dump() | dict(zip(("low", "high"), one.interval or (None, None))) for one in checks]
    for row in rows:
        del row["interval"]
    return _csv(rows)


def _csv(rows: list[dict]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def tables_of(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Tables that ``table`` displayed, in order: number (from 1), caption, csv, section (count of headings before)."""
    found, section = [], 0
    for cell in notebook.cells:
        section += cell.cell_type == "markdown" and bool(re.search(r"^#{1,6} ", cell.source, re.MULTILINE))
        for output in cell.get("outputs", []):
            about = output.get("metadata", {}).get(METADATA, {})
            if "table" in about and "text/csv" in output.get("data", {}):
                text = "".join(output.data["text/csv"])
                found.append(
                    {
                        "number": len(found) + 1,
                        "caption": about["table"],
                        "csv": text,
                        "section": section,
                        "output": output,
                    }
                )
    return found


def archive(entry: Entry) -> bytes:
    """A zip of all CSV: checks, tables by number, and the frames behind each figure."""
    files = {"checks.csv": checks_csv(entry.checks)} if entry.checks else {}
    for one in tables_of(entry.notebook):
        files[f"table-{one['number']:02d}-{_slug(one['caption'])}.csv"] = one["csv"]
    for cell in entry.notebook.cells:
        for output in cell.get("outputs", []):
            source = output.get("data", {}).get(DRAWING)
            if source:
                name = output.metadata[METADATA]["figure"]
                frames: dict[str, pd.DataFrame] = frames_of(json.loads(json.dumps(source)))
                files |= {f"figure-{name}-{_slug(key)}.csv": frame.to_csv(index=False) for key, frame in frames.items()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for name, text in files.items():
            out.writestr(zipfile.ZipInfo(name, _FIXED_DATE), text, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def downloads(entry: Entry, provenance: dict[str, Any]) -> list[dict[str, str]]:
    """Links of a page: label, file name, href."""
    source = entry.plan.path.read_text(encoding="utf-8")
    found = [
        ("Notebook, to run", f"{entry.name}.ipynb", data_uri("application/x-ipynb+json", source)),
        (
            "Parameters of this run",
            f"{entry.name}.parameters.yaml",
            data_uri("application/yaml", parameters_text(entry, provenance)),
        ),
        ("All its data as CSV", f"{entry.name}.data.zip", data_uri("application/zip", archive(entry))),
    ]
    return [dict(zip(("label", "name", "href"), one)) for one in found]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].rstrip("-") or "frame"
