"""Every number in a result sentence leads to the row it came from, or to the rows: on pages of notebooks that really ran."""

import csv
import html
import io
import re
import shutil

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from batch_variance.common import BadInput
from batch_variance.reporting.downloads import tables_of
from batch_variance.reporting.landings import MOST_ROWS, Landings, check_sources, sentences
from batch_variance.reporting.runner import run_report
from batch_variance.studies.sources import MARK, NUMBER, cite, cite_all, given, named, plain, verdict

FRAME = pd.DataFrame({"policy": ["default", "forced", "forced"], "at": [8, 8, 32], "rate": [0.25, 0.0, 1 / 3]})

# What a sentence cites: a row, rows, a figure's frame (its last row is past those shown), a parameter, a check.
CELL = """import pandas as pd
from IPython.display import Markdown, display
from batch_variance.reporting import check, show, table
from batch_variance.reporting.plots import index as plots
from batch_variance.studies.sources import cite, given, named, verdict
class P: threshold = threshold
frame = named(pd.DataFrame({'policy': ['default', 'forced', 'forced'], 'at': [8, 8, 32], 'rate': [0.25, 0.0, 1 / 3]}), 'rates')
table(frame.round(4), 'Rates', 'emulated', 3, folded=FOLDED)
long = named(pd.DataFrame({'subject': [f's{i}' for i in range(200)], 'dispatch': 'default', 'events': range(200), 'trials': 200,
    'low': 0.0, 'high': 1.0, 'tier': 'emulated', 'table': 't'}), 'long')
fig = plots.rates(long.head(200))
show(fig, 'many', cite('199 events', long, subject='s199'), 'emulated', 200)
check('01.zero', 'None.', True, 0, 0, 3, 'emulated', None, True, True, True)
display(Markdown(f"**{cite('33%', frame, policy='forced', at=32)}** at {cite(32, frame, policy='forced', at=32)}, "
    f"{cite('0 to 33%', frame, policy='forced')} in all, {cite(199, long, subject='s199')} there, {given(P, 'threshold')} rows, "
    f"{verdict(0, '01.zero')} judged."))"""


def written(folder, name, *cells):
    notebook = new_notebook(cells=[new_markdown_cell("# A title\\n\\nA question."), *map(new_code_cell, cells)])
    notebook.cells[1].metadata["tags"] = ["parameters"]
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / f"{name}.ipynb")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A notebook whose every citation can be followed, and one that cites a row which its table, cut short, has not."""
    top = tmp_path_factory.mktemp("sources")
    folder = top / "notebooks"
    folder.mkdir()
    written(folder, "01_right", "threshold = 16  # rows", CELL.replace("FOLDED", "True"))
    wrong = CELL.replace("FOLDED", "False").replace("table(frame.round(4),", "table(frame.head(2),").replace("01.", "02.")
    written(folder, "02_wrong", "threshold = 16  # rows", wrong)
    assert run_report(out=top / "out", notebooks_folder=folder) == 1
    return top / "out"


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two of the suite's own notebooks, as they are."""
    out = tmp_path_factory.mktemp("real")
    assert run_report(out=out, only="00,02", quick=True) == 0
    return out


# The marker.


def test_a_citation_reads_as_its_number_and_names_its_row():
    frame = named(FRAME, "rates")
    said = cite("33%", frame, policy="forced", at=32)
    assert said == '<span data-source="rates?policy=forced&amp;at=32">33%</span>' and plain(said) == "33%"
    assert plain(f"A {cite(1, frame)} b") == "A 1 b" and cite(1, "figure:x") == '<span data-source="figure:x">1</span>'


def test_a_name_follows_the_frame_through_what_notebooks_do_with_it():
    frame = named(FRAME, "rates")
    for made in (frame[frame["at"] == 8], frame.drop(columns="rate"), frame.round(1), frame.head(2), frame.assign(more=1)):
        assert "data-source" in cite(1, made)
    assert cite(1, FRAME) == "1", "a frame without a name is cited in vain, and naming one leaves the original alone"


@pytest.mark.parametrize("key", [{"policy": "other"}, {"policy": "default", "at": 32}, {"column": 1}])
def test_a_row_that_the_frame_does_not_have_cannot_be_cited(key):
    with pytest.raises(ValueError, match="has no row with"):
        cite(1, named(FRAME, "rates"), **key)


def test_parameters_must_exist():
    class P:
        threshold = 1024

    assert plain(given(P, "threshold", ",")) == "1,024"
    with pytest.raises(AttributeError):
        given(P, "treshold")


def test_each_number_of_a_sentence_is_cited_and_names_are_not():
    said = cite_all("3 of 1,024 rows (0.5%, -1.5e-3) in by-length-1-4 of bf16.", "t")
    assert [text for _, text in MARK.findall(said)] == ["3", "1,024", "0.5%", "-1.5e-3"]
    assert plain(said) == "3 of 1,024 rows (0.5%, -1.5e-3) in by-length-1-4 of bf16."


# What the page makes of it.


def links(text: str) -> list[tuple[str, str, str]]:
    """(anchor, title, text) of each citation on a page."""
    found = re.findall(r'<a class="source" href="#([^"]*)" title="from ([^"]*)">(.*?)</a>', text)
    return [tuple(map(html.unescape, one)) for one in found]


def row_of(text: str, anchor: str) -> str:
    found = re.search(f'<tr id="{re.escape(html.escape(anchor))}">(.*?)</tr>', text, re.DOTALL)
    return re.sub(r"<[^>]*>", " | ", found.group(1))


def test_links_land_on_the_row_the_table_the_figure_s_data_the_parameter_and_the_check(small):
    text = (small / "01_right.html").read_text()
    found = {shown: anchor for anchor, _, shown in links(text)}
    assert found == {
        "33%": "table-1-row-3",
        "32": "table-1-row-3",
        "0 to 33%": "table-1",
        "199": "figure-many-table-row-200",
        "16": "parameter-threshold",
        "0": "data-01.zero",
    }
    assert "0.3333" in row_of(text, "table-1-row-3") and "s199" in row_of(text, found["199"])
    assert "16" in row_of(text, "parameter-threshold") and "01.zero" in row_of(text, "data-01.zero")


def test_a_long_frame_shows_its_first_rows_and_the_one_that_is_cited(small):
    text = (small / "01_right.html").read_text()
    ids = re.findall(r'<tr id="figure-many-\w+-row-(\d+)">', text)
    assert ids == [*map(str, range(1, MOST_ROWS + 1)), "200"] and f"{MOST_ROWS + 1} of 200 rows" in text


def test_alt_text_and_the_plain_notebook_have_no_links(small):
    text = (small / "01_right.html").read_text()
    assert 'alt="199 events"' in text and "data-source" not in text


def test_a_citation_that_the_page_cannot_follow_fails_the_notebook_and_leaves_no_dead_link(small):
    text = (small / "02_wrong.html").read_text()
    assert "cites 'rates' at policy=forced&amp;at=32" in text and "has no such row" in text
    assert "did not finish" in text and "33%" in text and "33%" not in [shown for _, _, shown in links(text)]


def test_a_name_that_the_page_does_not_show_is_an_error(small):
    notebook = nbformat.read(small / "01_right.ipynb", as_version=4)
    check_sources(notebook, {"threshold": 16})
    with pytest.raises(BadInput, match="cites 'parameters'"):
        check_sources(notebook, {"other": 16})
    for cell in notebook.cells:
        cell["outputs"] = [one for one in cell.get("outputs", []) if "text/csv" not in one.get("data", {})]
    with pytest.raises(BadInput, match="shows no table or figure of that name .the number '33%'"):
        check_sources(notebook, {"threshold": 16})


# The suite's own notebooks.

PAGES = ("00_index", "02_split_scheduler")
# Where a recording comes from, and a figure quoted from before this project: no table of the page holds them.
QUOTED = re.compile(r"Recorded: .*|measured before this project's schedules cost [\d.]+|`[^`]*`")


@pytest.mark.parametrize("name", PAGES)
def test_every_number_of_every_result_sentence_is_a_link(real, name):
    notebook = nbformat.read(real / f"{name}.ipynb", as_version=4)
    said = list(sentences(notebook))
    assert len(said) >= 4
    for text in said:
        assert not NUMBER.findall(MARK.sub("", QUOTED.sub("", text))), text
    page = (real / f"{name}.html").read_text()
    assert len(links(page)) == sum(len(MARK.findall(text)) for text in said) > 10


@pytest.mark.parametrize("name", PAGES)
def test_every_link_has_its_place_once(real, name):
    page = (real / f"{name}.html").read_text()
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert {anchor for anchor, _, _ in links(page)} <= set(map(html.unescape, ids))


def numbers(text: str) -> list[float]:
    return [float(one.rstrip("%").replace(",", "")) for one in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)]


def holds(row: dict[str, str], shown: str) -> bool:
    """Whether a cell, rounded as the number is shown, is that number; both may be rounded from one that is longer."""
    digits = len(shown.rstrip("%").partition(".")[2])
    value = float(shown.rstrip("%").replace(",", ""))
    scale = 100 if shown.endswith("%") else 1
    plain = [cell for cell in row.values() if re.fullmatch(r"-?\d+(\.\d+)?(e[-+]?\d+)?", cell)]
    cells = [(float(cell), 10 ** -len(cell.partition(".")[2]) if "." in cell and "e" not in cell else 0.0) for cell in plain]
    cells += [(number, 0.0) for cell in row.values() for number in numbers(cell)]
    return any(abs(cell * scale - value) <= (10**-digits + unit * scale) / 2 + 1e-9 for cell, unit in cells)


@pytest.mark.parametrize("name", PAGES)
def test_the_row_under_a_link_holds_the_number(real, name):
    """In the unrounded data. Exempt is what is computed from a row and is not in it: a share of two of its columns."""
    notebook = nbformat.read(real / f"{name}.ipynb", as_version=4)
    tables = {one["number"]: list(csv.DictReader(io.StringIO(one["csv"]))) for one in tables_of(notebook)}
    landings, looked_at = Landings(notebook), 0
    frames = {one.anchor: one for _, parts in landings.figures for one in parts}
    for anchor, title, shown in links((real / f"{name}.html").read_text()):
        found = re.fullmatch(r"(?:table-(\d+)|(figure-.*))-row-(\d+)", anchor)
        if not found:
            continue
        number, figure, place = found.groups()
        row = tables[int(number)][int(place) - 1] if number else None
        row = row or dict(zip(frames[figure].columns, frames[figure].rows[int(place) - 1]))
        for one in NUMBER.findall(shown):
            if "events" in row and one.endswith("%"):
                row["share"] = str(int(row["events"]) / int(row["trials"]))
            if "ulp_up_to" in row and row["ulp_up_to"] == "0":
                row["differ"] = str(1 - float(row["share"]))
            assert holds(row, one), (anchor, title, shown, row)
            looked_at += 1
    assert looked_at >= 8


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_the_keyboard_follows_each_link_to_what_can_be_seen(real, name, width, scheme):
    """Folded data unfold; the target stands in the window, on a desk and on a phone."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("this test follows links in Chromium, which is not installed: apt-get install chromium")
    seen = """href => {
      const box = document.getElementById(decodeURIComponent(href.slice(1))).getBoundingClientRect();
      return box.height > 0 && box.top < innerHeight && box.bottom > 0 && document.documentElement.scrollWidth <= innerWidth;
    }"""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 850}, color_scheme=scheme)
        page.goto((real / f"{name}.html").as_uri())
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        places: dict[str, int] = {}
        for index, (anchor, _, _) in enumerate(links(page.content())):
            places.setdefault(anchor, index)
        for anchor, index in places.items():
            link = page.locator("a.source").nth(index)
            link.focus()
            link.press("Enter")
            page.wait_for_function("hash => location.hash === hash", arg=f"#{anchor}")
            page.wait_for_function(seen, arg=f"#{anchor}", timeout=5000)
        assert len(places) >= 5
        browser.close()
