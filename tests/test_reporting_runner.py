"""The runner on tiny notebooks: what is refused before anything runs, and what one notebook's end costs the others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from batch_variance.common import BadInput
from batch_variance.reporting import judge
from batch_variance.reporting.checks import MIME
from batch_variance.reporting.figures import METADATA
from batch_variance.reporting.parameters import find_notebooks, make_plans, parse_override, read_defaults, read_settings
from batch_variance.reporting.runner import run_report

CHECK = dict(id="01.one", claim="One is one.", holds=True, value=1, expected=1, n=1, tier="cpu-native")
CONTROLS = dict(negative_control=True, positive_control=True, occurred=True)


def shown(**fields):
    """Code that displays a check without importing the library, whose import costs seconds."""
    data = judge(**CHECK | CONTROLS | fields).model_dump()
    return f"from IPython.display import display\ndisplay({{{MIME!r}: {data!r}, 'text/plain': 'check'}}, raw=True)"


def write_notebook(folder: Path, name: str, *code: str, parameters: str | None = None) -> Path:
    cells = [new_markdown_cell("# A question?\n\nSome words.")]
    if parameters is not None:
        cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [new_code_cell(source) for source in code]
    notebook = new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "notebooks"


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


def statuses(out):
    return {entry["name"]: entry["status"] for entry in summary_of(out)["notebooks"]}


# What is read from a notebook.


def test_parameters_are_read_with_annotations_and_without(folder):
    path = write_notebook(
        folder,
        "01_a",
        parameters="rows: int | None = None  # rows\nsizes = [1, -2]\nword = 'x'  # y\nrate: float = 0.5",
    )
    assert read_defaults(path) == {"rows": None, "sizes": [1, -2], "word": "x", "rate": 0.5}
    assert read_defaults(write_notebook(folder, "02_b", "x = 1")) == {}


@pytest.mark.parametrize("line", ["x = 2 * y", "import os", "x = y = 1", "x: int", "x[0] = 1", "x += 1", "print(1)"])
def test_a_parameters_cell_with_anything_but_literals_is_refused(folder, line):
    with pytest.raises(BadInput, match="01_a.ipynb: line 2 of the parameters cell"):
        read_defaults(write_notebook(folder, "01_a", parameters=f"ok = 1\n{line}"))


def test_a_file_that_is_no_notebook_is_named(folder):
    folder.mkdir()
    (folder / "01_a.ipynb").write_text("{]")
    with pytest.raises(BadInput, match="01_a.ipynb is not a notebook"):
        read_defaults(folder / "01_a.ipynb")


def test_notebooks_are_chosen_by_number(folder):
    for name in ("01_a", "02_b", "10_c"):
        write_notebook(folder, name)
    (folder / "notes.ipynb").write_text("{}")
    assert [path.stem for path in find_notebooks(folder)] == ["01_a", "02_b", "10_c"]
    assert [path.stem for path in find_notebooks(folder, "10, 1")] == ["01_a", "10_c"]
    for wrong in ("03", "01,x", ",", ""):
        with pytest.raises(BadInput, match="give some of 01,02,10"):
            find_notebooks(folder, wrong)
    with pytest.raises(BadInput, match="holds no notebook"):
        find_notebooks(folder / "elsewhere")


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("rows=16", "rows", 16), ("1.rows=16", "01.rows", 16), ("word=plain text", "word", "plain text"),
        ("sizes=[1, 2]", "sizes", [1, 2]), ("word='16'", "word", "16"), ("x=None", "x", None),
        ("x=a=b", "x", "a=b"), ("x=", "x", ""),
    ],
)  # fmt: skip
def test_overrides_are_literals_or_bare_strings(text, key, value):
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize("text", ["rows", "=3", "a b=3", "x.rows=3", "01.=3"])
def test_an_override_of_another_form_is_refused(text):
    with pytest.raises(BadInput, match="NAME=VALUE"):
        parse_override(text)


def test_stronger_values_win(folder):
    write_notebook(folder, "01_a", parameters="rows = 1\nruns = 1\ndevice = 'auto'")
    write_notebook(folder, "02_b", parameters="rows = 1")
    (folder / "parameters.yaml").write_text(
        "01_a:\n  time_limit_seconds: {quick: 7, full: 70}\n  quick: {rows: 2, runs: 2}\n"
    )

    def values(quick, **overrides):
        return [plan.values for plan in make_plans(folder, None, quick, "cpu", overrides)]

    assert values(False) == [{"rows": 1, "runs": 1, "device": "cpu"}, {"rows": 1}]
    assert values(True) == [{"rows": 2, "runs": 2, "device": "cpu"}, {"rows": 1}]
    assert values(True, **{"rows": 3}) == [{"rows": 3, "runs": 2, "device": "cpu"}, {"rows": 3}]
    assert values(True, **{"01.rows": 4, "rows": 3}) == [{"rows": 4, "runs": 2, "device": "cpu"}, {"rows": 3}]
    quick, full = make_plans(folder, "01", True, "cpu", {}), make_plans(folder, "01", False, "cpu", {})
    assert (quick[0].time_limit_seconds, full[0].time_limit_seconds) == (7, 70)
    assert quick[0].injected == {"rows": 2, "runs": 2, "device": "cpu"}


# What is refused, before anything runs or is written.


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(overrides={"rwos": 2}), "parameter 'rwos' is unknown: notebook 01_a has device, rows"),
        (dict(overrides={"01.word": 2}), "parameter 'word' is unknown: notebook 01_a has device, rows"),
        (dict(overrides={"02.rows": 2}), "notebook 02 is not among those that run"),
        (dict(only="07"), "no notebook has number 07: give some of 01"),
        (dict(device="tpu"), "device 'tpu' is unknown"),
        (dict(overrides={"device": "tpu"}), "notebook 01_a: device 'tpu' is unknown"),
        (dict(overrides={"rows": {1, 2}}), "parameter rows = {1, 2} cannot be passed on"),
        (dict(overrides={"rows": float("nan")}), "cannot be passed on"),
    ],
)
def test_what_cannot_run_is_refused_first(folder, tmp_path, arguments, sentence):
    write_notebook(folder, "01_a", "1 / 0", parameters="rows = 1\ndevice = 'cpu'")
    with pytest.raises(BadInput) as caught:
        run_report(out=tmp_path / "out", notebooks_folder=folder, **arguments)
    assert sentence in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so cuda is no bad input")
@pytest.mark.parametrize("arguments", [dict(device="cuda"), dict(overrides={"device": "cuda"})])
def test_cuda_without_a_gpu_is_refused_first(folder, tmp_path, arguments):
    write_notebook(folder, "01_a", parameters="device = 'auto'")
    with pytest.raises(BadInput, match="no usable GPU"):
        run_report(out=tmp_path / "out", notebooks_folder=folder, **arguments)
    assert not (tmp_path / "out").exists()


def test_the_study_of_the_same_name_checks_the_values(folder, tmp_path, monkeypatch):
    from pydantic import field_validator

    from batch_variance.reporting import parameters
    from batch_variance.studies.parameters import StudyParameters

    class Parameters(StudyParameters):
        rows: int

        @field_validator("rows")
        @classmethod
        def _positive(cls, value):
            if value < 1:
                raise ValueError("give at least one row.")
            return value

    asked = []
    monkeypatch.setattr(parameters, "_study", lambda name: asked.append(name) or Parameters)
    write_notebook(folder, "01_a", parameters="rows = 1")
    for value, words in ((0, "notebook 01_a: rows = 0: give at least one row."), ("many", "rows = 'many'")):
        with pytest.raises(BadInput) as caught:
            run_report(out=tmp_path / "out", notebooks_folder=folder, overrides={"rows": value})
        assert words in str(caught.value)
    assert asked == ["01_a", "01_a"] and not (tmp_path / "out").exists()


def test_a_notebook_without_a_study_goes_by_its_names():
    from batch_variance.reporting.parameters import _study

    assert _study("01_no_such_study_anywhere") is None
    assert _study("01_not-a-module") is None


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("01_a: {quick: {rwos: 2}}", "notebook 01_a has no parameter rwos"),
        ("01_a: {fast: {rows: 2}}", "01_a must hold"),
        ("01_a: {time_limit_seconds: 5}", "01_a must hold"),
        ("01_a: {time_limit_seconds: {quick: 0}}", "seconds above 0"),
        ("01_a: 3", "01_a must hold"),
        ("- 1", "must map"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_wrong_settings_are_refused(folder, tmp_path, text, sentence):
    write_notebook(folder, "01_a", parameters="rows = 1")
    (folder / "parameters.yaml").write_text(text)
    with pytest.raises(BadInput) as caught:
        run_report(quick=True, out=tmp_path / "out", notebooks_folder=folder)
    assert sentence in str(caught.value)


def test_the_repositorys_settings_are_for_its_notebooks():
    notebooks = Path(__file__).parents[1] / "notebooks"
    assert set(read_settings(notebooks)) <= {path.stem for path in notebooks.glob("*.ipynb")}


@pytest.mark.parametrize("where", ["file/below", "/proc/report"])
def test_an_unwritable_folder_is_refused_first(folder, tmp_path, where):
    marker = tmp_path / "ran"
    write_notebook(folder, "01_a", f"open({str(marker)!r}, 'w')")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written to .*: give --out a folder"):
        run_report(out=tmp_path / where, notebooks_folder=folder)
    assert not marker.exists()


def test_the_notebooks_own_folder_is_refused(folder):
    path = write_notebook(folder, "01_a", "1")
    before = path.read_bytes()
    with pytest.raises(BadInput, match="holds the notebooks themselves"):
        run_report(out=folder, notebooks_folder=folder)
    assert path.read_bytes() == before


# What happens when they run.


def test_one_failure_and_one_time_limit_keep_the_others(folder, tmp_path, capfd):
    write_notebook(
        folder, "01_good", "import sys; print(rows, sys.executable)", shown(), parameters="rows: int | None = 1"
    )
    write_notebook(folder, "02_fails", "print('before')", "def f(x): return 1 / x", "f(0)", "print('after')")
    write_notebook(folder, "03_slow", "import time; time.sleep(60)")
    write_notebook(folder, "04_dies", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    write_notebook(folder, "05_twice", shown(id="05.same"), shown(id="05.same"))
    (folder / "parameters.yaml").write_text("03_slow:\n  time_limit_seconds: {full: 3}\n")
    out = tmp_path / "out"
    assert run_report(out=out, notebooks_folder=folder, overrides={"rows": 7}) == 1
    assert statuses(out) == {
        "01_good": "ok",
        "02_fails": "failed",
        "03_slow": "timeout",
        "04_dies": "failed",
        "05_twice": "failed",
    }

    good = nbformat.read(out / "01_good.ipynb", as_version=4)
    assert any(f"7 {sys.executable}" in str(cell.get("outputs")) for cell in good.cells)
    failed = (out / "02_fails.html").read_text()
    for words in (
        "before",
        "ZeroDivisionError: division by zero",
        "def f(x): return 1 / x",
        'href="#stopped-here"',
        'id="stopped-here"',
    ):
        assert words in failed
    assert "papermill" not in failed.split('id="provenance"')[0]
    assert "stopped at its time limit of 3 s" in (out / "03_slow.html").read_text()
    assert "DeadKernelError" in (out / "04_dies.html").read_text()
    assert "05.same occurs twice" in (out / "05_twice.html").read_text()
    index = (out / "index.html").read_text()
    for words in ("ZeroDivisionError: division by zero", "stopped at its time limit", "05.same occurs twice"):
        assert words in index
    assert str(folder) not in json.dumps(nbformat.read(out / "01_good.ipynb", as_version=4).metadata)
    assert kernels() == []
    said = capfd.readouterr()
    assert "1/5  01_good  ok" in said.out and said.err == ""


def test_the_summary_has_the_fixed_form_and_no_nan(folder, tmp_path):
    write_notebook(folder, "01_a", shown(value=float("nan"), interval=(0, 0.5), occurred=None))
    write_notebook(folder, "02_b", "1")
    out = tmp_path / "out"
    assert run_report(out=out, notebooks_folder=folder) == 0
    text = (out / "summary.json").read_text()
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in summary.json"))
    assert set(found) == {"notebooks", "checks", "provenance"}
    assert [set(entry) for entry in found["notebooks"]] == [{"name", "status", "seconds"}] * 2
    assert all(entry["seconds"] > 0 for entry in found["notebooks"])
    assert found["checks"] == [
        dict(
            id="01.one", notebook="01_a", claim="One is one.", verdict="inconclusive", evidence_tier="cpu-native",
            value=None, expected=1, n=1, interval=[0.0, 0.5],
            negative_control=True, positive_control=True, occurred=None,
        )
    ]  # fmt: skip
    for key in (
        "commit",
        "date",
        "packages",
        "processor",
        "threads",
        "gpu",
        "quick",
        "device",
        "parameters",
        "seconds",
    ):
        assert key in found["provenance"]


@pytest.mark.parametrize("verdict, status", [({"holds": False}, 1), ({"holds": False, "occurred": False}, 0), ({}, 0)])
def test_a_failed_check_fails_the_report_and_an_inconclusive_one_does_not(folder, tmp_path, verdict, status):
    write_notebook(folder, "01_a", shown(**verdict))
    assert run_report(out=tmp_path / "out", notebooks_folder=folder) == status
    assert statuses(tmp_path / "out") == {"01_a": "ok"}


def test_a_new_report_replaces_figures_no_longer_drawn_and_leaves_other_notebooks_alone(folder, tmp_path):
    figures = tmp_path / "out" / "figures"
    figures.mkdir(parents=True)
    for name in ("01_old.png", "02_kept.png"):
        (figures / name).write_bytes(b"old")
    write_notebook(folder, "01_a", "1")
    assert run_report(out=tmp_path / "out", notebooks_folder=folder) == 0
    assert [path.name for path in figures.iterdir()] == ["02_kept.png"]


def test_a_disk_that_fills_up_leaves_the_old_files_whole(folder, tmp_path, monkeypatch):
    """The folder takes the probe and the first summary, and then no more."""
    import errno

    from batch_variance.common import data

    out = tmp_path / "out"
    write_notebook(folder, "01_a", "print('first')")
    assert run_report(out=out, notebooks_folder=folder) == 0
    old = {path.name: path.read_bytes() for path in out.glob("01_a.*")}
    real = Path.write_text

    def full(self, text, **kw):
        if self.name.startswith(".01_a"):
            real(self, text[: len(text) // 2], **kw)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, text, **kw)

    monkeypatch.setattr(data.Path, "write_text", full)
    write_notebook(folder, "01_a", "print('second')")
    with pytest.raises(BadInput, match="01_a.ipynb cannot be written .No space left on device"):
        run_report(out=out, notebooks_folder=folder)
    assert {path.name: path.read_bytes() for path in out.glob("01_a.*")} == old
    assert not list(out.glob(".*")) and kernels() == []


# Interrupts.


def kernels() -> list[int]:
    """Process ids of kernels that this test run started and that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes()
        except OSError:
            continue
        if b"ipykernel_launcher" in command and MARK.encode() in environment:
            found.append(int(path.name))
    return found


MARK = f"BATCH_VARIANCE_TEST_RUN={os.getpid()}"


@pytest.fixture(autouse=True)
def marked(monkeypatch):
    """Kernels inherit this, so that other test runs' kernels on the machine are not taken for ours."""
    monkeypatch.setenv(*MARK.split("="))


RUN = """import sys
from batch_variance.reporting.runner import run_report
sys.exit(run_report(out=sys.argv[1], notebooks_folder=sys.argv[2]))"""


STUBBORN = "import signal\nfor number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # one pixel
)


def drawn(name: str) -> str:
    """Code that displays a figure as ``show`` does, without importing the library."""
    metadata = {METADATA: {"figure": name, "alt": "One pixel.", "tier": "cpu-native", "n": 1}}
    return f"display({{'image/png': {PNG!r}}}, metadata={metadata!r}, raw=True)"


@pytest.mark.parametrize(
    "number, obeys, again", [(signal.SIGINT, True, False), (signal.SIGTERM, False, False), (signal.SIGINT, False, True)]
)
def test_an_interrupted_notebook_keeps_what_it_had(folder, tmp_path, number, obeys, again):
    """Whether its kernel obeys the interrupt or ignores it, and when a second interrupt does not wait for it."""
    begun, out = tmp_path / "begun", tmp_path / "out"
    write_notebook(folder, "01_done", shown())
    write_notebook(
        folder,
        "02_running",
        f"{shown(id='02.first')}\n{drawn('early')}",
        f"import sys, time\nprint('midway')\n{shown(id='02.second')}\n{drawn('late')}\n{'' if obeys else STUBBORN}"
        f"sys.stdout.flush()\nopen({str(begun)!r}, 'w')\ntime.sleep(300)",
        shown(id="02.third"),
    )
    write_notebook(folder, "03_waiting", "1")
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, out, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 90
    while not begun.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    assert begun.exists(), process.communicate()
    assert len(kernels()) == 1
    time.sleep(0.3)  # for what the cell displayed to arrive
    signalled = time.monotonic()
    process.send_signal(number)
    if again:
        time.sleep(0.3)
        process.send_signal(number)
    said, complaint = process.communicate(timeout=60)
    took = time.monotonic() - signalled
    assert process.returncode == 130, complaint
    assert kernels() == []
    assert took < 5  # 2 s where it obeys, 3 s where it does not, on two busy cores

    assert statuses(out) == {"01_done": "ok", "02_running": "interrupted", "03_waiting": "not run"}
    assert [check["id"] for check in summary_of(out)["checks"]] == ["01.one", "02.first", "02.second"]
    assert sorted(path.name for path in (out / "figures").iterdir()) == ["02_early.png", "02_late.png"]
    where = "interrupted in code cell 2 of 3: import sys, time"
    page = (out / "02_running.html").read_text()
    for words in (where, "midway\n", "check-02.first", "check-02.second", 'href="#stopped-here"'):
        assert words in page
    assert page.count('id="stopped-here"') == 1 and "check-02.third" not in page
    index = (out / "index.html").read_text()
    for words in (where, 'href="02_running.html"', 'href="02_running.html#check-02.second"'):
        assert words in index
    assert (out / "01_done.html").exists() and not (out / "03_waiting.html").exists()

    cells = [cell for cell in nbformat.read(out / "02_running.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [1, 2, None]
    assert [cell.metadata.papermill.status for cell in cells] == ["completed", "failed", "pending"]
    assert [output.ename for output in cells[1].outputs if output.output_type == "error"] == [
        "KeyboardInterrupt" if obeys else "Interrupted"
    ]
    assert "interrupted in code cell 2 of 3" in said
    assert complaint == "" and not list(out.glob(".*"))


def test_an_interrupt_while_a_page_is_written_comes_after_it(folder, tmp_path, monkeypatch):
    from batch_variance.reporting import runner

    real, handler = runner.notebook_page, signal.getsignal(signal.SIGINT)

    def page(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # Python runs the handler here at the latest
        return real(*arguments)

    monkeypatch.setattr(runner, "notebook_page", page)
    for name in ("01_a", "02_b"):
        write_notebook(folder, name, "print('computed')")
    out = tmp_path / "out"
    assert run_report(out=out, notebooks_folder=folder) == 130
    assert statuses(out) == {"01_a": "ok", "02_b": "not run"}
    assert "computed" in (out / "01_a.html").read_text()
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_before_the_first_cell_leaves_an_earlier_page_alone(folder, tmp_path, monkeypatch):
    from batch_variance.reporting import execution

    def start(self, **_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    write_notebook(folder, "01_a", "print('computed')")
    out = tmp_path / "out"
    assert run_report(out=out, notebooks_folder=folder) == 0
    old = {name: (out / name).read_bytes() for name in ("01_a.html", "01_a.ipynb")}
    monkeypatch.setattr(execution.Client, "start_new_kernel", start)
    assert run_report(out=out, notebooks_folder=folder) == 130
    assert statuses(out) == {"01_a": "interrupted"}
    assert {name: (out / name).read_bytes() for name in old} == old
    index = (out / "index.html").read_text()
    assert "interrupted before its first cell" in index and 'href="01_a.html"' not in index


# The kernel's surroundings.


def test_a_kernel_imports_the_runners_own_package_from_a_relative_path(folder, tmp_path):
    """The kernel starts in the notebooks' folder, where the entry ``lib`` would lead nowhere."""
    (tmp_path / "lib").symlink_to(Path(__file__).parents[1] / "lib")
    write_notebook(folder, "01_a", "import batch_variance\nprint(batch_variance.__file__)")
    subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "out", folder],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": "lib"}, check=True, capture_output=True,
    )  # fmt: skip
    assert f"{tmp_path}/lib/batch_variance/__init__.py" in (tmp_path / "out" / "01_a.html").read_text()


@pytest.mark.parametrize("given, absolute", [("lib:/opt/x:../y", "/a/b/lib:/opt/x:/a/y"), (":z", "/a/b:/a/b/z")])
def test_relative_entries_of_pythonpath_are_made_absolute(monkeypatch, given, absolute):
    from batch_variance.reporting.execution import kernel_environment

    monkeypatch.setattr(os, "getcwd", lambda: "/a/b")
    monkeypatch.setenv("PYTHONPATH", given)
    assert kernel_environment() == dict(os.environ) | {"PYTHONPATH": absolute}
    for unset in ("", None):
        monkeypatch.setenv("PYTHONPATH", "") if unset == "" else monkeypatch.delenv("PYTHONPATH")
        assert kernel_environment() == dict(os.environ)


def test_a_users_own_kernelspec_is_not_used(folder, tmp_path, monkeypatch):
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false"], "display_name": "broken", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    write_notebook(folder, "01_a", "1")
    assert run_report(out=tmp_path / "out", notebooks_folder=folder) == 0


def test_a_kernel_that_cannot_start_says_why(folder, tmp_path, monkeypatch):
    broken = tmp_path / "broken" / "ipykernel_launcher.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    write_notebook(folder, "01_a", "1")
    assert run_report(out=tmp_path / "out", notebooks_folder=folder) == 1
    assert "ImportError: no such thing" in (tmp_path / "out" / "index.html").read_text()


def test_the_report_runs_outside_the_main_thread(folder, tmp_path):
    """Handlers of signals can be set in the main thread only."""
    from concurrent.futures import ThreadPoolExecutor

    write_notebook(folder, "01_a", "1")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_report, out=tmp_path / "out", notebooks_folder=folder).result() == 0


def test_a_path_given_as_a_parameter_is_the_callers(folder, tmp_path, monkeypatch):
    (tmp_path / "mine.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    write_notebook(folder, "01_a", "assert open(prompts).read() == '[1]'", parameters="prompts = ''  # a path")
    assert run_report(out=tmp_path / "out", notebooks_folder=folder, overrides={"prompts": "mine.json"}) == 0
