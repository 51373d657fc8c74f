"""What changed between two reports, and runs from a parameters file."""

import copy
import json

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_notebook

from batch_variance import cli
from batch_variance.common import BadInput
from batch_variance.reporting.compare import compare, read_summary
from batch_variance.reporting.parameters import read_parameters_file, stronger


def one(id, verdict="pass", value=1):
    return {
        "id": id,
        "notebook": {"01": "01_a", "02": "02_b"}[id[:2]],
        "claim": f"{id} holds",
        "verdict": verdict,
        "value": value,
    }


BEFORE = {
    "notebooks": [{"name": "01_a", "status": "ok", "seconds": 10.0}, {"name": "02_b", "status": "ok", "seconds": 5.0}],
    "checks": [one("01.same"), one("01.turns"), one("01.moves", value=0.25), one("01.goes"), one("02.elsewhere")],
    "provenance": {
        "commit": "abc",
        "date": "2026-11-01",
        "quick": True,
        "device": "cpu",
        "packages": {"torch": "2.11.0"},
        "gpu": "none",
    },
}


@pytest.fixture
def after():
    found = copy.deepcopy(BEFORE)
    found["notebooks"] = [{"name": "01_a", "status": "ok", "seconds": 12.0}]
    found["checks"] = [one("01.same"), one("01.moves", value=0.5), one("01.turns", "fail"), one("01.comes")]
    found["provenance"]["packages"]["torch"] = "2.13.0"
    return found


def test_what_changed(after):
    found = compare(BEFORE, after)
    assert [(c["id"], c["what"], c["before"], c["after"]) for c in found["changes"]] == [
        ("01.turns", "verdict", "pass", "fail"),
        ("01.comes", "new check", "–", "pass"),
        ("01.goes", "check gone", "pass", "–"),
        ("01.moves", "value", "0.25", "0.5"),
    ]
    assert (found["same"], found["absent"]) == (1, 1)
    assert found["notebooks"] == [
        {"name": "01_a", "before": 10.0, "after": 12.0, "status_before": "ok", "status": "ok"}
    ]
    assert found["versions"] == [{"what": "torch", "before": "2.11.0", "after": "2.13.0"}]


def test_a_report_against_itself_has_no_change():
    found = compare(BEFORE, copy.deepcopy(BEFORE))
    assert (found["changes"], found["same"], found["absent"], found["versions"]) == ([], 5, 0, [])


def test_checks_of_a_notebook_that_has_not_finished_are_not_called_gone(after):
    after["notebooks"][0]["status"] = "not run"
    after["checks"] = []
    assert compare(BEFORE, after)["changes"] == []


@pytest.mark.parametrize(
    "text, words",
    [(None, "there is no report"), ("{", "cannot be read as JSON"), ("[]", "no summary"), ("{}", "no summary"),
     ('{"notebooks": [], "checks": [1], "provenance": {}}', "no summary")],
)  # fmt: skip
def test_what_is_no_report_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "summary.json"
    if text is not None:
        path.write_text(text)
    for given in (path, tmp_path):
        with pytest.raises(BadInput, match=words):
            read_summary(given)


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "cannot be read"),
        ("a: [", "is not YAML"),
        ("3", "must map"),
        ("01_a: 3", "must map"),
        ("", "must map"),
        ("rows: {x: 1}", "must map"),
    ],
)
def test_a_bad_parameters_file_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "p.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=words):
        read_parameters_file(path)


def test_the_command_line_is_stronger_than_the_file(tmp_path):
    (tmp_path / "p.yaml").write_text("01_a: {rows: 1, word: b}\n2: {rows: 3}\n")
    only, kept = read_parameters_file(tmp_path / "p.yaml")
    assert only == "01,02" and kept == {"01.rows": 1, "01.word": "b", "02.rows": 3}
    assert stronger(kept, {"rows": 9}) == {"01.word": "b", "rows": 9}
    assert stronger(kept, {"02.rows": 9}) == {"01.rows": 1, "01.word": "b", "02.rows": 9}


def test_a_report_from_a_file_compared_with_the_one_before(tmp_path, monkeypatch):
    """The parameters that a report's page hands out run the notebook again, and the index says what moved."""
    folder = tmp_path / "home" / "notebooks"
    folder.mkdir(parents=True)
    cells = [
        new_code_cell("rows = 1\nword = 'a'", metadata={"tags": ["parameters"]}),
        new_code_cell(
            "from batch_variance.reporting import check\n"
            "check('01.rows', 'Rows are few.', rows < 5, rows, 1, 1, 'cpu-native', None, True, True, True)"
        ),
    ]
    nbformat.write(new_notebook(cells=cells), folder / "01_a.ipynb")
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), folder / "02_b.ipynb")
    monkeypatch.setenv("BATCH_VARIANCE_HOME", str(folder.parent))
    monkeypatch.chdir(tmp_path)
    run = lambda *arguments: CliRunner().invoke(cli.main, ["report", *arguments])  # noqa: E731
    assert run("--only", "01", "-p", "rows=7").exit_code == 1
    (tmp_path / "p.yaml").write_text("01_a: {rows: 2, word: c}")
    assert run("-f", "p.yaml", "--compare", "report").exit_code == 0, "only the file's notebook ran"
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["provenance"]["parameters"] == {"01_a": {"rows": 2, "word": "c"}}
    changes = (tmp_path / "report" / "index.html").read_text().split('id="changes"')[1].split("</section>")[0]
    assert "1 change," in changes and "<td>verdict</td><td>fail</td><td>pass</td>" in changes
    failed = run("--compare", "nowhere")
    assert failed.exit_code == 2 and "no report at nowhere" in failed.stderr
