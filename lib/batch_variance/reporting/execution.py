"""One notebook's run: papermill, a kernel of this very interpreter, a time limit for the whole, no kernel left behind.

It knows how a run can end; what becomes of the executed notebook, ``reporting.results`` knows.
"""

import logging
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError
from nbformat.v4 import new_output
from papermill import execute_notebook
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers

ENGINE = "batch-variance"
KERNEL = "python3"


@dataclass
class Outcome:
    """How a notebook's run ended."""

    status: str  # "ok", "failed" or "timeout"
    seconds: float
    message: str  # one line saying what went wrong; empty if nothing did
    notebook: nbformat.NotebookNode | None  # executed as far as it came; None if its kernel never started


class ThisInterpreter(AsyncKernelManager):
    """A kernel manager that starts ``sys.executable``, whatever kernelspecs the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        # Without this variable the debugger's start prints a warning about frozen modules for each kernel.
        return KernelSpec(
            argv=argv, display_name="Python 3", language="python", env={"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        )


class Client(PapermillNotebookClient):
    """papermill's client, which does not wait for a kernel that is in the middle of a cell to end itself."""

    def papermill_execute_cells(self):
        try:
            super().papermill_execute_cells()
        except BaseException:
            self.shutdown_kernel = "immediate"
            raise


class Engine(NBClientEngine):
    """papermill's engine, which also hands out the notebook as far as it came and ends the kernel whatever happens."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, deadline, kept, start_timeout=60, **_):
        kept["notebook"] = nb_man.nb
        client = Client(
            nb_man,
            kernel_name=kernel_name,
            kernel_manager_class=ThisInterpreter,
            startup_timeout=start_timeout,
            timeout_func=lambda cell: max(deadline - time.monotonic(), 0.001),
            log=logging.getLogger("batch_variance.notebooks"),
        )
        manager = client.create_kernel_manager()
        with tempfile.TemporaryFile() as complaints:
            try:
                client.execute(stderr=complaints)  # the kernel's own; what cells write to stderr arrives as output
            except RuntimeError as error:
                complaints.seek(0)
                kept["complaint"] = (
                    f"{type(error).__name__}: {first_line(error)} {last_line(complaints.read())}".strip()
                )
                raise
            finally:
                _end(manager)


papermill_engines.register(ENGINE, Engine)
# Both report through exceptions, which become the notebook's status; papermill also warns of annotated parameters.
logging.getLogger("papermill").setLevel(logging.CRITICAL)
logging.getLogger("batch_variance.notebooks").setLevel(logging.CRITICAL)


def run_notebook(path: Path, parameters: dict[str, Any], limit: float, progress: dict | bool = False) -> Outcome:
    """Execute a notebook in its own folder, with ``parameters`` injected, for at most ``limit`` seconds in all.

    ``progress`` is papermill's progress_bar. An error in a cell, a dead kernel or the time limit end in the Outcome;
    KeyboardInterrupt passes through once the kernel is gone.
    """
    started = time.monotonic()
    kept: dict[str, Any] = {}
    status, message = "ok", ""
    try:
        execute_notebook(
            path.resolve(), None, parameters, engine_name=ENGINE, kernel_name=KERNEL, language="python",
            cwd=path.resolve().parent, progress_bar=progress, deadline=started + limit, kept=kept,
        )  # fmt: skip
    except PapermillExecutionError as error:
        status, message = "failed", f"{error.ename}: {first_line(error.evalue)}" if error.evalue else error.ename
    except CellTimeoutError:
        status, message = "timeout", f"stopped at its time limit of {limit:g} s"
        _mark_last_cell(kept["notebook"], "TimeLimit", f"the notebook was {message}, in this cell")
    except (RuntimeError, TimeoutError) as error:  # the kernel did not start, or died under a cell (DeadKernelError)
        status, message = "failed", kept.get("complaint") or f"{type(error).__name__}: {first_line(error)}"
        _mark_last_cell(kept.get("notebook"), *message.split(": ", 1))
    notebook = kept.get("notebook")
    if notebook is not None:
        remove_error_markers(notebook)
        notebook.metadata.get("papermill", {}).update(input_path=path.name, output_path=path.name)
    return Outcome(status, time.monotonic() - started, message, notebook)


def first_line(text: Any) -> str:
    """The first line that says something, without terminal colours, at most 300 characters."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(text))
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]


def last_line(text: bytes) -> str:
    """The last line that says something, at most 300 characters: where an interpreter names its error."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _mark_last_cell(notebook: nbformat.NotebookNode | None, name: str, message: str) -> None:
    """Put an error under the cell that ran last, where a cell's own error would stand."""
    begun = [cell for cell in getattr(notebook, "cells", []) if cell.metadata.get("papermill", {}).get("start_time")]
    code = [cell for cell in begun if cell.cell_type == "code"]
    if code:
        code[-1].outputs.append(new_output("error", ename=name, evalue=message, traceback=[f"{name}: {message}"]))


def _end(manager: AsyncKernelManager) -> None:
    """Kill the kernel's process group if it is still there: an interrupt can keep nbclient from cleaning up."""
    process = getattr(manager.provisioner, "process", None)
    if process is None or process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the kernel was started as leader of its own session
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
    manager.cleanup_connection_file()
