"""The committed figures drawn again, PNG and SVG, from their records: ``python -m batch_variance.reporting.rebuild``.

A report leaves each figure's plot function, frames, tier and count beside its picture (``drawings``). Those records
are committed under ``figures/recorded``; ``--record REPORT`` takes over a report's. Same record, same
matplotlib: same bytes.
"""

import json
from pathlib import Path

import click
import matplotlib.pyplot as plt

from ..common import BadInput
from ..common.data import repository, write_atomically, write_text
from . import apply_style
from .compare import read_summary
from .drawings import redraw
from .figures import png_of, stamp, svg_of


def rebuild(record: Path, folder: Path) -> list[Path]:
    """Draw one record into ``folder`` as NAME.png and NAME.svg. Raises BadInput for a file that is no record."""
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        tier, n = kept["tier"], kept["n"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{record} is no record of a figure: make record-figures writes them.") from None
    fig = redraw(kept)
    stamp(fig, tier, n)
    written = []
    for suffix, save in ((".png", png_of), (".svg", svg_of)):
        data = save(fig)
        written.append(
            write_atomically(folder / f"{record.stem}{suffix}", lambda path, data=data: path.write_bytes(data))
        )
    plt.close(fig)
    return written


def take_over(report: Path, records: Path) -> list[str]:
    """Copy the figure records of a report's finished notebooks; returns their names.

    Figures that those notebooks no longer draw are dropped, all their files. Raises BadInput where there is none.
    """
    done = {one["name"][:2] for one in read_summary(report)["notebooks"] if one.get("status") == "ok"}
    found = sorted(path for path in (report / "figures").glob("*.json") if path.name[:2] in done)
    if not found:
        raise BadInput(
            f"{report} holds no figure records of a finished notebook: give the folder of a report that has run."
        )
    current, numbers = {path.stem for path in found}, {path.name[:2] for path in found}
    for old in records.glob("*.json"):
        if old.name[:2] in numbers and old.stem not in current:
            for path in (old, records.parent / f"{old.stem}.png", records.parent / f"{old.stem}.svg"):
                path.unlink(missing_ok=True)
    for path in found:
        write_text(records / path.name, path.read_text(encoding="utf-8"))
    return sorted(current)


@click.command()
@click.option(
    "--record", metavar="REPORT", type=click.Path(path_type=Path), help="First take over this report's records."
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Where to draw; the checkout's figures/ else."
)
def main(record: Path | None, out: Path | None):
    """Draw every recorded figure again, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    apply_style()
    folder = repository() / "figures"
    records = folder / "recorded"
    if record is not None:
        click.echo(f"{len(take_over(record, records))} records taken from {record}")
    count = sum(len(rebuild(path, out or folder)) for path in sorted(records.glob("*.json")))
    click.echo(f"{count} files drawn in {out or folder}")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (BadInput, click.ClickException) as error:
        raise SystemExit(f"error: {error}") from None
