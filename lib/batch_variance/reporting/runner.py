"""The report: every notebook run in turn, its page, its figures, the index and summary.json, each written whole.

All that can be refused is refused before the first notebook starts. After that, what one notebook does never costs
another its page, and the index and the summary are written anew after each.
"""

import json
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Mapping

import nbformat
from tqdm import tqdm

from ..common import BadInput, environment
from ..common.data import repository, write_atomically, write_text
from .compare import read_summary
from .execution import INTERRUPTED, run_notebook
from .html import index_page, notebook_page
from .landings import check_sources
from .parameters import make_plans
from .results import NOT_RUN, Entry, figure_record, remove_stale_figures, summary

FAILED, INTERRUPT = 1, 130  # exit statuses; 2 is BadInput's


def run_report(
    quick: bool = False,
    only: str | None = None,
    device: str = "auto",
    out: Path | str = "report",
    overrides: Mapping[str, Any] | None = None,
    notebooks_folder: Path | str | None = None,
    compare_with: Path | str | None = None,
) -> int:
    """Execute notebooks and write their report under ``out``; returns the exit status.

    Args:
        quick: take the quick parameters and time limits of parameters.yaml.
        only: numbers of the notebooks to run, such as ``"01,03"``; None runs all.
        device: ``auto``, ``cpu`` or ``cuda``, for every notebook with a parameter of that name.
        out: folder for ``NN_name.ipynb`` and ``.html``, ``figures/``, ``index.html`` and ``summary.json``.
        overrides: parameter values by ``name`` or ``NN.name``.
        notebooks_folder: where the notebooks are; the checkout's by default.
        compare_with: an earlier report's folder or summary.json; the index then says what changed. It may be ``out``.

    Returns 0; 1 if a notebook failed or ran out of time or a check's verdict is ``fail``; 130 after Ctrl-C, when
    the kernel is gone, every notebook that had begun has its page, as far as it came, and summary and index say
    which were interrupted or not run.
    Raises BadInput, before anything runs, for what cannot be used; and later if ``out`` can no longer be written.
    """
    folder = Path(notebooks_folder) if notebooks_folder is not None else repository() / "notebooks"
    out = Path(out).absolute()
    earlier = read_summary(compare_with) if compare_with is not None else None
    plans = make_plans(folder.absolute(), only, quick, device, overrides or {})
    _check_writable(out, folder.absolute())
    entries = [Entry(plan) for plan in plans]
    report = Report(out, entries, environment() | {"quick": quick, "device": device}, earlier)
    with _terminated_as_interrupted():
        try:
            report.write()
            for place, entry in enumerate(entries, 1):
                report.run(entry, f"{place}/{len(entries)}")
        except KeyboardInterrupt:
            with _interrupts_held():
                report.interrupted()
            return INTERRUPT
        except OSError as error:  # a full disk, outside write_atomically
            raise BadInput(
                f"the report stopped: {error.strerror or error} ({error.filename or 'no file named'})."
            ) from error
    report.say_end()
    return FAILED if any(entry.failed for entry in entries) else 0


class Report:
    """What is known of the report so far, and how it is written."""

    def __init__(
        self, out: Path, entries: list[Entry], provenance: dict[str, Any], earlier: dict[str, Any] | None = None
    ):
        self.out, self.entries, self.provenance, self.earlier = out, entries, provenance, earlier
        self.started = time.monotonic()
        self.current: Entry | None = None
        provenance["parameters"] = {entry.name: entry.plan.values for entry in entries}

    def run(self, entry: Entry, place: str) -> None:
        """Execute one notebook and write its files, then the index and the summary.

        Raises KeyboardInterrupt after an interrupt, and only once all that is written.
        """
        self.current = entry
        bar = {"desc": f"{place} {entry.name}", "leave": False, "disable": not sys.stderr.isatty(), "file": sys.stderr}
        outcome = run_notebook(entry.plan.path, entry.plan.injected, entry.plan.time_limit_seconds, bar)
        with _interrupts_held() as came:
            try:
                entry.finish(outcome)
                if entry.status == "ok":
                    check_sources(entry.notebook, entry.plan.values)
            except BadInput as error:  # the notebook ran, but its checks cannot be told apart, or a number's row is not there
                entry.status, entry.message = "failed", str(error)
            self._write_files(entry)
            self.write()
            tqdm.write(f"{place}  {entry.name}  {entry.status}  {entry.seconds:.1f} s  {entry.message}".rstrip())
        if came or outcome.status == INTERRUPTED:
            raise KeyboardInterrupt

    def interrupted(self) -> None:
        if self.current is not None and self.current.status == NOT_RUN:
            self.current.status = INTERRUPTED
        self.write()
        tqdm.write(f"interrupted: what there is so far is in {self.out / 'index.html'}")

    def write(self) -> None:
        """Write summary.json and index.html as things stand."""
        self.provenance["seconds"] = round(time.monotonic() - self.started, 2)
        text = json.dumps(summary(self.entries, self.provenance), indent=1, allow_nan=False, ensure_ascii=False)
        index = index_page(self.entries, self.provenance, self.earlier)
        write_text(self.out / "summary.json", text + "\n")
        write_text(self.out / "index.html", index)

    def say_end(self) -> None:
        checks = [one.verdict for entry in self.entries for one in entry.checks]
        counts = ", ".join(f"{checks.count(word)} {word}" for word in ("pass", "fail", "inconclusive"))
        tqdm.write(f"checks: {counts}; {self.provenance['seconds']:.0f} s\n{self.out / 'index.html'}")

    def _write_files(self, entry: Entry) -> None:
        if entry.notebook is None and entry.status == INTERRUPTED:
            return  # before its first cell: an earlier report's page stays, as those of notebooks not run do
        if entry.notebook is None:
            for name in entry.file_names:  # an earlier report's page would pass for this run's
                (self.out / name).unlink(missing_ok=True)
            return
        page = notebook_page(entry, self.provenance)  # rendered first: nothing is replaced by half
        write_text(self.out / f"{entry.name}.ipynb", nbformat.writes(entry.notebook) + "\n")
        for figure in entry.figures:
            write_atomically(
                self.out / "figures" / figure["file"], lambda path, png=figure["png"]: path.write_bytes(png)
            )
            record = figure_record(figure, self.provenance)
            if record is not None:
                write_text(self.out / "figures" / f"{figure['stem']}.json", record)
        remove_stale_figures(self.out / "figures", entry)
        write_text(self.out / f"{entry.name}.html", page)


def _check_writable(out: Path, folder: Path) -> None:
    if out.resolve() == folder.resolve():
        raise BadInput(f"{out} holds the notebooks themselves: give another folder for the report.")
    try:
        for place in (out, out / "figures"):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=place, prefix=".writable") as probe:
                probe.write(b"\0" * 4096)
                probe.flush()
    except OSError as error:
        raise BadInput(
            f"the report cannot be written to {out} ({error.strerror or error}): "
            "give --out a folder that you may write to."
        ) from None


@contextmanager
def _terminated_as_interrupted():
    """While the report runs, SIGTERM (a cancelled CI job) ends it as Ctrl-C does. Other threads cannot set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _interrupts_held():
    """Ctrl-C and SIGTERM interrupt nothing meanwhile; a list says whether one came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
