"""Executed notebooks and the index as HTML pages that are whole in themselves: no request leaves them, light or dark.

nbconvert walks the notebook; the templates are ours (``templates/``), because its own pull scripts from elsewhere and
lose alt text. The only script is ours, which sorts tables; a Content-Security-Policy in each page admits it by its hash
and nothing else, whatever a notebook displays.
"""

import base64
import copy
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from markupsafe import Markup
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from traitlets.config import Config

from ..studies.sources import plain
from .checks import CONTROLS, MARKS, MIME, Check, counted, readable, readable_interval
from .compare import compare
from .downloads import checks_csv, data_uri, downloads, tables_of
from .figures import METADATA
from .landings import DATA, SOURCE, Landings, sentences
from .results import Entry, summary, thumbnail

TEMPLATES = Path(__file__).with_name("templates")
WIDGET = "application/vnd.jupyter.widget-view+json"
# What tqdm writes: "40%|####  | 4/10 [00:01<00:02, 3.1it/s]" or "12it [00:03, 4.0it/s]".
_PROGRESS = re.compile(r"\d+%\|.*\||\d+it \[|\[\d+:\d\d<|(it/s|s/it)\]")

TIER_WORDS = {
    "live-gpu": "measured on a GPU in this very run",
    "recorded-gpu": "measured on a GPU earlier, recorded with its provenance",
    "cpu-native": "the CPU's own kernels, as they come",
    "emulated": "a GPU's arithmetic modelled on the CPU: what is rounded where, not its speed or its timing",
}
STATUS_MARKS = {"ok": "✓", "failed": "✗", "timeout": "✗", "interrupted": "–", "not run": "–"}


class Renderer(IPythonRenderer):
    """Markdown with maths as plain text, and headings that never skip a level on one page."""

    levels: list[int]

    def heading(self, text, level, **attributes):
        level = min(level, self.levels[-1] + 1 if self.levels else 1)
        self.levels.append(level)
        anchor = re.sub(r"[^a-z0-9]+", "-", re.sub(r"<[^>]*>|&\w+;", "", text).lower()).strip("-") or "section"
        return f'<h{level} id="{anchor}-{len(self.levels)}">{text}</h{level}>\n'

    def link(self, text, url, title=None):
        kind = ' class="source"' if url.startswith("#") and (title or "").startswith(SOURCE) else ""
        return super().link(text, url, title).replace("<a ", f"<a{kind} ", 1)

    def inline_math(self, body):
        return f'<span class="maths">{self.escape_html(body)}</span>'

    def block_math(self, body):
        return f'<p class="maths">{self.escape_html(body.strip())}</p>'

    def latex_environment(self, name, body):
        return self.block_math(body)


class PageExporter(HTMLExporter):
    """nbconvert's walk through a notebook with this project's template."""

    def __init__(self, folder: Path, **kw):
        super().__init__(template_name="page", extra_template_basedirs=[str(TEMPLATES)], **kw)
        self.folder = folder  # where images that the notebook's markdown names are found, to be taken into the page
        self.levels: list[int] = []
        self.landings: Landings | None = None  # what sentences may cite; without it citations read as plain text

    @property
    def default_config(self):
        order = [
            MIME,
            "text/html",
            "text/markdown",
            "image/svg+xml",
            "image/png",  # an explorer's static twin, before the control that no kernel would answer
            "image/jpeg",
            WIDGET,
            "text/latex",
            "text/plain",
        ]
        config = Config(
            {"NbConvertBase": {"display_data_priority": order}, "HighlightMagicsPreprocessor": {"enabled": True}}
        )
        inherited = super().default_config.copy()
        inherited.merge(config)
        return inherited

    def render_markdown(self, source: str, attachments: dict[str, Any] | None = None) -> str:
        renderer = Renderer(
            escape=False, exclude_anchor_links=True, embed_images=True, path=str(self.folder), attachments=attachments
        )
        renderer.levels = self.levels
        source = self.landings.linked(source) if self.landings else plain(source)
        return MarkdownWithMath(renderer=renderer).render(source)

    def default_filters(self):
        yield from super().default_filters()
        yield "markdown2html", self.render_markdown
        yield from FILTERS.items()

    def _create_environment(self):
        environment = super()._create_environment()
        environment.globals.update(GLOBALS)
        return environment


def without_progress(text: str) -> str:
    """What is left of a stderr stream without progress bars and blank lines."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    lines = (line.rstrip() for line in re.split(r"[\r\n]", text))
    return "\n".join(line for line in lines if line and not _PROGRESS.search(line))


def plain_traceback(output: dict[str, Any]) -> str:
    lines = "\n".join(output.get("traceback") or [f"{output.get('ename')}: {output.get('evalue')}"])
    return re.sub(r"\x1b\[[0-9;]*m", "", lines)


def about(output: dict[str, Any]) -> dict[str, Any]:
    """The metadata that ``show`` and ``table`` left in an output."""
    return output.get("metadata", {}).get(METADATA, {})


def alt_text(output: dict[str, Any], kind: str) -> str:
    """Alt text of an image; where a notebook gave none, that is said."""
    metadata = output.get("metadata", {})
    return metadata.get(kind, {}).get("alt") or about(output).get("alt") or "A figure without a description."


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)  # rounded first: 119.8 s are two minutes, not "1 min 60 s"
    return f"{seconds:.1f} s" if seconds < 90 else f"{minutes} min {rest:02d} s"


FILTERS = {
    "without_progress": without_progress,
    "is_progress": lambda text: bool(_PROGRESS.search(text or "")),
    "plain_traceback": plain_traceback,
    "alt_text": alt_text,
    "is_explorer": lambda output: bool(about(output).get("explorer")),
    "data_of_figure": lambda output: Markup(about(output).get(DATA, "")),
    "readable": readable,
    "readable_interval": readable_interval,
    "counted": counted,
    "duration": duration,
    "as_check": lambda data: Check.model_validate(dict(data)),
}
SCRIPT = (TEMPLATES / "page" / "script.js").read_text(encoding="utf-8")
SCRIPT_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
GLOBALS = {
    "SCRIPT": Markup(SCRIPT),
    "SCRIPT_HASH": SCRIPT_HASH,
    "CONTROLS": CONTROLS,
    "MARKS": MARKS,
    "STATUS_MARKS": STATUS_MARKS,
    "TIER_WORDS": TIER_WORDS,
    "MIME": MIME,
}


def notebook_page(entry: Entry, provenance: dict[str, Any]) -> str:
    """The page of one executed notebook."""
    exporter = PageExporter(entry.plan.path.parent)
    title, _ = headline(entry.notebook, entry)
    if not any(
        cell.cell_type == "markdown" and re.match(r"#\s", cell.source.lstrip()) for cell in entry.notebook.cells[:3]
    ):
        exporter.levels.append(1)  # the template gives the page its own first heading
    plan = entry.plan
    notebook, sections = with_numbered_tables(entry.notebook)
    exporter.landings = landings = Landings(notebook, plan.values)
    for text in sentences(notebook):  # a figure stands before the sentence that cites it
        landings.linked(text)
    landings.unfold()
    resources = {
        "page": {
            "checks": [(one, sections.get(one.id, [])) for one in entry.checks],
            "checks_href": data_uri("text/csv", checks_csv(entry.checks)),
            "downloads": downloads(entry, provenance),
            "name": entry.name,
            "title": title,
            "own_heading": bool(exporter.levels),
            "status": entry.status,
            "message": entry.message,
            "seconds": entry.seconds,
            "limit": plan.time_limit_seconds,
            "tiers": entry.tiers,
            "parameters": [(name, repr(value), repr(plan.defaults[name])) for name, value in plan.values.items()],
            "provenance": provenance,
        }
    }
    text, _ = exporter.from_notebook_node(notebook, resources=resources)
    return text


def with_numbered_tables(notebook: nbformat.NotebookNode) -> tuple[nbformat.NotebookNode, dict[str, list[int]]]:
    """A copy in which each table has a number, an id a row, and its CSV as a link; and, by check id, the numbers of the
    tables that stand under the same heading as the check."""
    notebook = copy.deepcopy(notebook)
    tables = tables_of(notebook)
    for one in tables:
        one["output"].data["text/html"] = _numbered("".join(one["output"].data["text/html"]), one)
    sections, section = {}, 0
    for cell in notebook.cells:
        section += cell.cell_type == "markdown" and bool(re.search(r"^#{1,6} ", cell.source, re.MULTILINE))
        for output in cell.get("outputs", []):
            if MIME in output.get("data", {}):
                sections[output.data[MIME]["id"]] = [one["number"] for one in tables if one["section"] == section]
    return notebook, sections


def _numbered(text: str, one: dict[str, Any]) -> str:
    number = one["number"]
    head, start, body = text.partition("<tbody>")
    rows = iter(range(1, body.count("<tr>") + 1))
    body = re.sub("<tr>", lambda _: f'<tr id="table-{number}-row-{next(rows)}">', body)
    head = head.replace("<figure ", f'<figure id="table-{number}" ', 1).replace(
        "<strong>", f"<strong>Table {number}. ", 1
    )
    head = head.replace('aria-label="', f'aria-label="Table {number}. ', 1)
    link = (
        f'<p class="csv"><a download="table-{number}.csv" href="{data_uri("text/csv", one["csv"])}">Table '
        f"{number} as CSV</a></p>"
    )
    return f"{head}{start}{body.removesuffix('</figure>')}{link}</figure>"


def index_page(entries: list[Entry], provenance: dict[str, Any], earlier: dict[str, Any] | None = None) -> str:
    """The page that opens a report: verdicts, notebooks, provenance, and what changed against an earlier summary."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES / "page"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(FILTERS)
    environment.globals.update(GLOBALS)
    rows = []
    for entry in entries:
        title, question = headline(entry.notebook or nbformat.read(entry.plan.path, as_version=4), entry)
        first = entry.figures[0] if entry.figures else None
        rows.append(
            {
                "entry": entry,
                "title": title,
                "question": question,
                "thumbnail": first and {"src": thumbnail(first["png"]), "alt": first["alt"]},
            }
        )
    checks = [(entry, one) for entry in entries for one in entry.checks]
    verdicts = {word: sum(one.verdict == word for _, one in checks) for word in MARKS}
    finished = sum(entry.status == "ok" for entry in entries)
    tiers = {tier: [entry for entry in entries if tier in entry.tiers] for tier in TIER_WORDS}
    page = environment.get_template("report.html.j2")
    return page.render(
        rows=rows,
        checks=checks,
        verdicts=verdicts,
        finished=finished,
        provenance=provenance,
        tiers=tiers,
        checks_href=data_uri("text/csv", checks_csv([one for _, one in checks])),
        compared=compare(earlier, summary(entries, provenance)) if earlier is not None else None,
    )


def headline(notebook: nbformat.NotebookNode, entry: Entry) -> tuple[str, Markup]:
    """A notebook's title (its first ``#`` heading, or else its name) and its first paragraph as HTML."""
    text = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    found = re.search(r"^#\s+(.+)$", text, re.MULTILINE)
    title = (
        re.sub(r"[`*_]", "", found.group(1)).strip()
        if found
        else entry.name.split("_", 1)[-1].replace("_", " ").capitalize()
    )
    rest = text[found.end() :] if found else ""
    paragraph = next(
        (part for part in re.split(r"\n\s*\n", rest) if part.strip() and not part.lstrip().startswith("#")), ""
    )
    return title, Markup(PageExporter(entry.plan.path.parent).render_markdown(paragraph))
