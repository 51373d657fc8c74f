"""The command line: quick help, one sentence and status 2 for bad input, and the report's exit status."""

import json
import subprocess
import sys
import time

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_notebook

from batch_variance import cli
from batch_variance.common import BadInput


@pytest.fixture
def home(tmp_path):
    """A checkout with one notebook."""
    folder = tmp_path / "home" / "notebooks"
    folder.mkdir(parents=True)
    cells = [
        new_code_cell("rows = 1\nword = 'a'", metadata={"tags": ["parameters"]}),
        new_code_cell("print(rows, word)\nassert rows < 5"),
    ]
    nbformat.write(new_notebook(cells=cells), folder / "01_a.ipynb")
    return folder.parent


@pytest.mark.parametrize("arguments", [[], ["--help"], ["report", "--help"], ["--version"]])
def test_help_needs_no_torch(arguments):
    code = f"""import sys, batch_variance.cli as cli
try: cli.main({arguments!r})
except SystemExit: pass
print('torch' in sys.modules, 'matplotlib' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False False", done.stderr


def test_help_is_there_within_a_second():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "batch_variance", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "report" in done.stdout
    assert time.monotonic() - started < 2  # measured 0.1 s; the margin is for a busy machine


def test_only_commands_that_exist_are_listed(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "later", ("batch_variance.nowhere.command:later", "Not there yet."))
    listed = CliRunner().invoke(cli.main, ["--help"]).output
    assert "later" not in listed and "report" in listed
    assert "No such command" in CliRunner().invoke(cli.main, ["later"]).output


def test_each_listed_command_loads():
    context = cli.click.Context(cli.main)
    for name in cli.main.list_commands(context):
        assert cli.main.get_command(context, name).name == name
        assert CliRunner().invoke(cli.main, [name, "--help"]).exit_code == 0


def test_bad_input_is_one_line_and_another_error_is_not_hidden(monkeypatch):
    def fails(error):
        return cli.click.command("report")(lambda: (_ for _ in ()).throw(error))

    monkeypatch.setattr(cli, "report", fails(BadInput("rows = 0: give at least one.")))
    found = CliRunner().invoke(cli.main, ["report"])
    assert found.exit_code == 2 and found.stderr == "error: rows = 0: give at least one.\n" and found.stdout == ""
    monkeypatch.setattr(cli, "report", fails(ValueError("a bug")))
    assert isinstance(CliRunner().invoke(cli.main, ["report"]).exception, ValueError)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["-p", "rwos=2"], "parameter 'rwos' is unknown: notebook 01_a has rows, word."),
        (["-p", "rows"], "parameter 'rows' is not of the form NAME=VALUE"),
        (["--only", "09"], "no notebook has number 09: give some of 01."),
        (["--device", "tpu"], "device 'tpu' is unknown: give auto, cpu or cuda."),
        (["--out", "/proc/report"], "the report cannot be written to /proc/report"),
    ],
)
def test_bad_input_to_the_report(home, tmp_path, arguments, sentence, monkeypatch):
    monkeypatch.setenv("BATCH_VARIANCE_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli.main, ["report", *arguments])
    assert found.exit_code == 2
    assert found.stderr.startswith("error: ") and sentence in found.stderr and found.stderr.count("\n") == 1
    assert "Traceback" not in found.stderr and not (tmp_path / "report").exists()


def test_a_checkout_without_notebooks_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCH_VARIANCE_HOME", str(tmp_path))
    found = CliRunner().invoke(cli.main, ["report"])
    assert found.exit_code == 2 and "holds no notebooks folder" in found.stderr


@pytest.mark.parametrize("rows, status, state", [(2, 0, "ok"), (7, 1, "failed")])
def test_the_report_by_command(home, tmp_path, monkeypatch, rows, status, state):
    monkeypatch.setenv("BATCH_VARIANCE_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli.main, ["report", "--quick", "-p", f"01.rows={rows}", "-p", "word=bare words"])
    assert found.exit_code == status, found.output
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["notebooks"][0]["status"] == state and summary["provenance"]["quick"] is True
    assert summary["provenance"]["parameters"] == {"01_a": {"rows": rows, "word": "bare words"}}
    assert f"{rows} bare words" in (tmp_path / "report" / "01_a.html").read_text()
