"""One notebook's run: papermill, a kernel of this very interpreter, a time limit for the whole, no kernel left behind.

It knows how a run can end; what becomes of the executed notebook, ``reporting.results`` knows.
"""

import asyncio
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellTimeoutError
from nbclient.util import run_sync
from nbformat.v4 import new_output
from papermill import execute_notebook
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers

ENGINE = "batch-variance"
KERNEL = "python3"
INTERRUPTED = "interrupted"
GRACE_SECONDS = 1.0  # for a kernel to end its cell after an interrupt, so that its last outputs and traceback are kept


@dataclass
class Outcome:
    """How a notebook's run ended."""

    status: str  # "ok", "failed", "timeout" or "interrupted"
    seconds: float
    message: str  # one line saying what went wrong; empty if nothing did
    notebook: nbformat.NotebookNode | None  # executed as far as it came; None if there is nothing to show


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
    """papermill's client, which hands an interrupt on to the kernel, and then does not wait long for it to end."""

    def papermill_execute_cells(self):
        try:
            super().papermill_execute_cells()
        except BaseException:
            self.shutdown_kernel = "immediate"
            raise

    async def _async_run_cell(self, cell, index):
        others = asyncio.all_tasks()
        running = asyncio.ensure_future(self.async_execute_cell(cell, index))
        with _interrupts_noted(asyncio.get_running_loop()) as (interrupt, came):
            await asyncio.wait({running, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        if not came:
            return await running
        if not running.done():
            await self.km.interrupt_kernel()
            await asyncio.wait({running}, timeout=GRACE_SECONDS)  # a second interrupt ends this wait at once
        tasks = asyncio.all_tasks() - others  # nbclient's of this cell, of which it does not cancel all by itself
        for task in tasks:
            task.cancel()
        await asyncio.gather(running, *tasks, return_exceptions=True)
        raise KeyboardInterrupt

    _run_cell = run_sync(_async_run_cell)

    def execute_cell(self, cell, cell_index):
        try:
            return self._run_cell(cell, cell_index)
        except BaseException:
            # Otherwise papermill notes "completed" in the metadata of all cells that never began.
            self.nb_man.cell_exception(cell, cell_index=cell_index)
            raise


@contextmanager
def _interrupts_noted(loop: asyncio.AbstractEventLoop):
    """Instead of raising KeyboardInterrupt wherever the loop happens to be, complete a future and fill a list.

    Only for signals that raise it now: those of a report in the main thread.
    """
    interrupt, came = loop.create_future(), []

    def note(*_):
        came.append(True)
        loop.call_soon_threadsafe(lambda: interrupt.done() or interrupt.set_result(None))

    main = threading.current_thread() is threading.main_thread()
    raising = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if main and signal.getsignal(number) is signal.default_int_handler
    ]
    for number in raising:
        signal.signal(number, note)
    try:
        yield interrupt, came
    finally:
        for number in raising:
            signal.signal(number, signal.default_int_handler)


class Engine(NBClientEngine):
    """papermill's engine, which also hands out the notebook as far as it came and ends the kernel whatever happens."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, deadline, kept, environment, start_timeout=60, **_):
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
                # The kernel's own stderr; what cells write to theirs arrives as output.
                client.execute(stderr=complaints, env=environment)
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
    """Execute a notebook with ``parameters`` injected, for at most ``limit`` seconds in all.

    The kernel works in the caller's folder, so that a path given as a parameter means what it meant to the caller.

    ``progress`` is papermill's progress_bar. An error in a cell, a dead kernel, the time limit and KeyboardInterrupt
    all end in the Outcome, once the kernel is gone.
    """
    started = time.monotonic()
    kept: dict[str, Any] = {}
    status, message = "ok", ""
    try:
        execute_notebook(
            path.resolve(), None, parameters, engine_name=ENGINE, kernel_name=KERNEL, language="python",
            cwd=Path.cwd(), progress_bar=progress, deadline=started + limit, kept=kept,
            environment=kernel_environment(),
        )  # fmt: skip
    except PapermillExecutionError as error:
        status, message = "failed", f"{error.ename}: {first_line(error.evalue)}" if error.evalue else error.ename
    except CellTimeoutError:
        status, message = "timeout", f"stopped at its time limit of {limit:g} s"
        _mark_last_cell(kept["notebook"], "TimeLimit", f"the notebook was {message}, in this cell")
    except (RuntimeError, TimeoutError) as error:  # the kernel did not start, or died under a cell (DeadKernelError)
        status, message = "failed", kept.get("complaint") or f"{type(error).__name__}: {first_line(error)}"
        _mark_last_cell(kept.get("notebook"), *message.split(": ", 1))
    except KeyboardInterrupt:
        status, message = INTERRUPTED, _where_interrupted(kept)
    notebook = kept.get("notebook")
    if notebook is not None:
        remove_error_markers(notebook)
        notebook.metadata.get("papermill", {}).update(input_path=path.name, output_path=path.name)
    return Outcome(status, time.monotonic() - started, message, notebook)


def kernel_environment() -> dict[str, str]:
    """This process's environment for a kernel that starts in another folder: no relative entry in PYTHONPATH."""
    environment = dict(os.environ)
    if environment.get("PYTHONPATH"):
        # An empty entry is the current folder, for Python and for abspath.
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)
    return environment


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
    code = _code_cells(notebook, begun=True)
    if code:
        code[-1].outputs.append(new_output("error", ename=name, evalue=message, traceback=[f"{name}: {message}"]))


def _where_interrupted(kept: dict[str, Any]) -> str:
    """Say in which cell, and see that an error stands under it; a notebook that had not begun is not kept."""
    code = _code_cells(kept.get("notebook"), begun=True)
    if not code:
        kept.pop("notebook", None)
        return "interrupted before its first cell"
    cells = len(_code_cells(kept["notebook"]))
    message = f"interrupted in code cell {len(code)} of {cells}: {first_line(code[-1].source)}"
    if not any(output.output_type == "error" for output in code[-1].outputs):  # the kernel did not obey in time
        _mark_last_cell(kept["notebook"], "Interrupted", f"the notebook was {message}")
    return message


def _code_cells(notebook: nbformat.NotebookNode | None, begun: bool = False) -> list[nbformat.NotebookNode]:
    cells = [cell for cell in getattr(notebook, "cells", []) if cell.cell_type == "code"]
    return [cell for cell in cells if not begun or cell.metadata.get("papermill", {}).get("start_time")]


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
