"""How a notebook shows a figure or a table: with alt text or caption, evidence tier and count, in the project's style.

It knows how to display, not what: plots are drawn in ``reporting.plots``.
"""

import html
import io
import re
from numbers import Integral, Real
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.figure import Figure

from ..common import BadInput
from ..studies.sources import name_of, plain
from .checks import counted, readable, valid_evidence
from .drawings import MIME as DRAWING
from .drawings import source_of

METADATA = "batch_variance"  # key in an output's metadata, where the runner looks for figures, tables and their tiers
_NAME = re.compile(r"[a-z0-9]+([-_][a-z0-9]+)*")
_HASHED = re.compile(rb'(?<=["#])[a-z][0-9a-f]{10}(?=[")])')  # an SVG id, where it is defined or used


def apply_style() -> None:
    """Use the project's matplotlib style: a colour-blind-safe cycle, readable sizes, constrained layout."""
    matplotlib.style.use(Path(__file__).with_name("batch_variance.mplstyle"))


def show(fig: Figure, name: str, alt: str, tier: str, n: int | str) -> None:
    """Display a figure as PNG with alt text, stamp tier and count below its right corner, and close it.

    ``name`` is the PNG's name in the report's figures folder. Raises BadInput for a name that is no file name
    (lower case, digits, - and _), empty alt text, an unknown tier, or an ``n`` that is no count.
    """
    data, metadata = bundle(fig, name, alt, tier, n)
    display(data, metadata=metadata, raw=True)


def bundle(fig: Figure, name: str, alt: str, tier: str, n: int | str) -> tuple[dict, dict]:
    """Data and metadata of ``show``'s output: the PNG and, where it is known, the call that drew it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInput(f"figure name {name!r} cannot name a file: use lower-case letters, digits, - and _.")
    where = f"figure {name}"
    if not isinstance(alt, str) or not alt.strip():
        raise BadInput(f"{where} has no alt text: say in a sentence what a reader who cannot see it should know.")
    n = valid_evidence(where, tier, n)
    stamp(fig, tier, n)
    png = png_of(fig)
    plt.close(fig)  # or the inline backend shows it a second time at the cell's end
    alt = " ".join(plain(alt).split())
    data = {"image/png": png, "text/plain": f"Figure {name}: {alt}"}
    source = source_of(fig)
    if source is not None:
        data[DRAWING] = source
    return data, {"image/png": {"alt": alt}, METADATA: {"figure": name, "alt": alt, "tier": tier, "n": n}}


def png_of(fig: Figure) -> bytes:
    """PNG cropped to the drawing, the same bytes each time."""
    png = io.BytesIO()
    fig.savefig(png, format="png", bbox_inches="tight", metadata={"Software": None})
    return png.getvalue()


def svg_of(fig: Figure) -> bytes:
    """SVG cropped to the drawing, the same bytes each time and on every CPU: no date, and ids counted in order of use.

    matplotlib's ids hash coordinates to their last bit, which numpy's log and power give otherwise on other CPUs.
    """
    svg = io.BytesIO()
    fig.savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    ids: dict[bytes, bytes] = {}
    return _HASHED.sub(lambda found: ids.setdefault(found[0], b"%c%d" % (found[0][0], len(ids))), svg.getvalue())


def table(frame: pd.DataFrame, caption: str, tier: str, n: int | str, folded: bool = False) -> None:
    """Display a frame as a table with its caption, tier and count; folded: its rows only on demand. A default index is
    left out. Sentences cite the rows of a frame that `studies.sources.named` named.

    Raises BadInput for an empty caption, an unknown tier, or an ``n`` that is no count.
    """
    if not isinstance(caption, str) or not caption.strip():
        raise BadInput("a table has no caption: say in a sentence what its rows are.")
    n = valid_evidence(f"table {caption!r}", tier, n)
    if not isinstance(frame.index, pd.RangeIndex):
        frame = frame.reset_index()
    foot, name = f"{tier} · {counted(n)}", name_of(frame)
    display(
        {
            "text/html": _table_html(frame, caption, foot, folded),
            "text/plain": f"{caption} ({foot})\n{frame.to_string(index=False)}",
            "text/csv": frame.to_csv(index=False),  # unrounded, for the page's download
        },
        metadata={METADATA: {"table": caption, "tier": tier, "n": n} | ({"source": name} if name else {})},
        raw=True,
    )


def stamp(fig: Figure, tier: str, n: int | str) -> None:
    """Write tier and count below everything drawn so far, so that no layout has to make room and nothing is covered."""
    fig.draw_without_rendering()  # lays the figure out, or the box is not yet where things will be
    box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    # In fractions of the figure: only that transform follows when savefig crops to the drawing.
    fig.text(
        box.x1 / width,
        (box.y0 - 0.05) / height,
        f"{tier} · {counted(n)}",
        ha="right",
        va="top",
        fontsize=8,
        color="#555555",
    )


def _table_html(frame: pd.DataFrame, caption: str, foot: str, folded: bool) -> str:
    # The caption stands outside the box that scrolls, so that it stays readable on a narrow screen.
    box = (
        f'<div class="scroll" style="overflow-x:auto" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f"{rows_html(frame)}</div>"
    )
    if folded:
        box = f'<details class="code data"><summary>{len(frame)} row{"s" * (len(frame) != 1)}</summary>{box}</details>'
    return (
        f'<figure class="bv-table" style="margin:0"><figcaption><strong>{html.escape(caption)}</strong> '
        f'<small style="opacity:0.75">{html.escape(foot)}</small></figcaption>{box}</figure>'
    )


def rows_html(frame: pd.DataFrame) -> str:
    """A frame as an HTML table, numbers as `readable` writes them."""
    numeric = [
        pd.api.types.is_numeric_dtype(frame.dtypes.iloc[i]) and not pd.api.types.is_bool_dtype(frame.dtypes.iloc[i])
        for i in range(frame.shape[1])
    ]
    names = [" · ".join(str(part) for part in name) if isinstance(name, tuple) else str(name) for name in frame.columns]
    side = ["right" if right else "left" for right in numeric]
    head = "".join(
        f'<th scope="col" style="text-align:{way}">{html.escape(name)}</th>' for way, name in zip(side, names)
    )
    rows = "".join(
        "<tr>" + "".join(_td(_cell(value), way) for way, value in zip(side, row)) + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _td(text: str, side: str) -> str:
    width = "white-space:nowrap" if len(text) <= 32 else "min-width:16rem"
    return f'<td style="text-align:{side};{width}">{html.escape(text)}</td>'


def _cell(value: object) -> str:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return readable(bool(value))
    if isinstance(value, Integral):
        return readable(int(value))
    if isinstance(value, Real):
        return readable(float(value))
    return str(value)
