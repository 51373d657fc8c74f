"""The exported pages: whole in themselves, readable without sight, without scripts, wide and narrow, light and dark."""

import base64
import hashlib
import io
import json
import re
import shutil
import threading
import zipfile
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from batch_variance.reporting.html import WIDGET, without_progress
from batch_variance.reporting.parameters import read_parameters_file
from batch_variance.reporting.runner import run_report

PARAMETERS = "threshold = 32  # rows\nmodel: str | None = None  # folder"
IMPORTS = """import matplotlib.pyplot as plt, pandas as pd
from IPython.display import HTML, Markdown, display
from batch_variance.reporting import check, show, table"""
FIGURE = """fig, axes = plt.subplots()
axes.plot([1, 2, 3])
show(fig, 'variants', 'A line that <rises> & rises.', 'emulated', 192)"""
TABLE = """frame = pd.DataFrame({f'a rather long column name, number {i}': [0.123456, 2.0] for i in range(9)})
table(frame, 'A wide table', 'recorded-gpu', 2)
display(frame)"""
CHECKS = """check('01.varies', 'Some prompts & <texts> vary.', True, 7, '> 0', '8 prompts', 'emulated',
      (0.4735, 0.9968), True, True, True)
check('01.agrees', 'Both paths agree.', False, 0.4531, 1.0, 256, 'cpu-native', None, True, True, True)
check('01.crossed', 'Prefill crosses too.', True, 3, '> 0', 12, 'emulated',
      negative_control=True, positive_control=False)"""
NOISE = """import sys
from tqdm.auto import tqdm
for _ in tqdm(range(5), desc='noisy'): pass
from tqdm import tqdm as plain
for _ in plain(range(5), desc='plain-noisy'): pass
print('a true warning', file=sys.stderr)
print('printed <b>words</b>', 'papermill' in sys.modules, 'nbconvert' in sys.modules)"""
EXPLORER = """from IPython.display import Markdown
from batch_variance.reporting.widgets import tree_explorer
Markdown(tree_explorer({'chain': (((0, 1), 2), 3), 'pairs': ((0, 1), (2, 3))}, 'emulated', 2))"""
INLINE = """fig, axes = plt.subplots()
axes.plot([1, 2])
display(fig)
plt.close(fig)"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One report: a notebook with one of everything, and one that fails half-way."""
    top = tmp_path_factory.mktemp("pages")
    folder = top / "notebooks"
    folder.mkdir()
    picture = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(picture, "png")
    (folder / "local.png").write_bytes(picture.getvalue())
    cells = [
        new_markdown_cell("# Which *rows* vary?\n\nThe `question` in a sentence.\n\nMore of it."),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        new_code_cell(IMPORTS),
        new_markdown_cell(
            "## First\n\nMaths $a_i \\le b < c$ and [a link](https://example.org).\n\n"
            "#### Too deep\n\n![a red square](local.png)"
        ),
        *(new_code_cell(source) for source in (FIGURE, TABLE, CHECKS, NOISE, INLINE)),
        new_code_cell("display(Markdown('### Found\\n\\n**7 of 8** vary.'))"),
    ]
    fails = [
        new_markdown_cell("No heading here."),
        new_code_cell("1 / 0"),
        new_markdown_cell("## Later"),
        new_code_cell("print('x')"),
    ]
    explores = [new_markdown_cell("# Two orders?"), new_code_cell(EXPLORER)]
    for name, some in (("01_rows", cells), ("02_fails", fails), ("03_explores", explores)):
        notebook = new_notebook(cells=some)
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, folder / f"{name}.ipynb")
    assert run_report(out=top / "out", notebooks_folder=folder, overrides={"threshold": 16}) == 1
    return top / "out"


class Page(HTMLParser):
    """Elements in order, with attributes and the text directly inside."""

    def __init__(self, path: Path):
        super().__init__()
        self.text = path.read_text()
        self.elements: list[tuple[str, dict]] = []
        self.styles = ""
        self._in_style = False
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_data(self, data):
        if self._in_style:
            self.styles += data

    def handle_endtag(self, tag):
        self._in_style = False


PAGES = ("index", "01_rows", "02_fails", "03_explores")


@pytest.fixture(params=PAGES)
def page(request, report):
    return Page(report / f"{request.param}.html")


def test_nothing_is_loaded_from_elsewhere(page):
    assert [attrs for tag, attrs in page.elements if tag == "script"] == [{}], "one script, inline, ours"
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed"), tag
        for name, value in attrs.items():
            if name in ("src", "srcset", "data", "poster", "action", "background") or (name == "href" and tag != "a"):
                assert value.startswith("data:"), (tag, name, value[:80])
            assert not name.startswith("on"), (tag, name)
        assert "url(" not in attrs.get("style", "")
    assert "@import" not in page.styles and "url(" not in page.styles and "@font-face" not in page.styles
    policies = [
        attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1 and "default-src 'none'" in policies[0]
    script = re.search(r"<script>(.*?)</script>", page.text, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policies[0]


def test_each_image_has_alt_text(page):
    images = [attrs for tag, attrs in page.elements if tag == "img"]
    assert all(image.get("alt", "").strip() for image in images)


def test_alt_text_is_the_notebooks_own(report):
    alts = [attrs["alt"] for tag, attrs in Page(report / "01_rows.html").elements if tag == "img"]
    assert alts == ["a red square", "A line that <rises> & rises.", "A figure without a description."]


def test_headings_are_in_order_and_ids_are_unique(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:]))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_links_inside_the_report_lead_somewhere(report):
    for name in PAGES:
        for tag, attrs in Page(report / f"{name}.html").elements:
            target = attrs.get("href", "")
            if tag != "a" or target.startswith(("https://example.org", "data:")):
                continue
            file, _, anchor = target.partition("#")
            path = report / (file or f"{name}.html")
            assert path.exists(), (name, target)
            if anchor:
                assert f'id="{anchor}"' in path.read_text(), (name, target)


def test_code_is_folded_and_there(report):
    text = (report / "01_rows.html").read_text()
    page = Page(report / "01_rows.html")
    folds = [attrs for tag, attrs in page.elements if tag == "details" and attrs.get("class") == "code"]
    assert len(folds) == 9 and not any("open" in attrs for attrs in folds)
    assert "Parameters given to this run" in text and "rises" in text.split('<details class="code">')[4]


def test_progress_bars_are_left_out_and_warnings_are_not(report):
    text = (report / "01_rows.html").read_text()
    outside_code = re.sub(r'<details class="code">.*?</details>', "", text, flags=re.DOTALL)
    assert "noisy" not in outside_code and "it/s" not in outside_code
    assert "a true warning" in outside_code
    # The two words: a notebook's kernel has not loaded what only the runner needs.
    assert "printed &lt;b&gt;words&lt;/b&gt; False False" in outside_code


@pytest.mark.parametrize(
    "text, left",
    [
        ("\r  0%|          | 0/5 [00:00<?, ?it/s]\r100%|██████████| 5/5 [00:00<00:00, 999.00it/s]\n", ""),
        ("12it [00:03,  4.0it/s]\n", ""),
        ("\x1b[Anoisy:  40%|████      | 2/5 [00:01<00:01,  1.9s/it]", ""),
        ("UserWarning: 50% of rows were dropped\n", "UserWarning: 50% of rows were dropped"),
        ("a\r 10%|█         | 1/10\nb\n\n", "a\nb"),
    ],
)
def test_what_counts_as_a_progress_bar(text, left):
    assert without_progress(text) == left


def test_the_page_says_where_it_comes_from(report):
    provenance = (report / "01_rows.html").read_text().split('id="provenance"')[1]
    found = json.loads((report / "summary.json").read_text())["provenance"]
    for words in (
        found["commit"],
        found["date"],
        found["processor"],
        found["packages"]["torch"],
        "recorded-gpu, cpu-native, emulated",
    ):
        assert words in provenance
    assert re.search(r"threshold</code></td><td><code>16</code></td><td><code>32<", provenance)


def test_verdicts_are_on_both_pages_with_their_words(report):
    index, page = (report / "index.html").read_text(), (report / "01_rows.html").read_text()
    for text in (index, page):
        assert "Some prompts &amp; &lt;texts&gt; vary." in text
        assert "0.4735 to 0.9968" in text
    assert 'href="01_rows.html#check-01.agrees"' in index
    assert "positive failed" in index and "occurred missing" in index
    assert "positive control failed, occurred proof missing" in page
    assert "ZeroDivisionError: division by zero" in index


def test_the_figures_are_files_too_and_the_index_has_a_thumbnail(report):
    names = sorted(path.name for path in (report / "figures").iterdir())
    assert names == ["01_variants.png", "03_tree-explorer.json", "03_tree-explorer.png"]
    sources = [attrs["src"] for tag, attrs in Page(report / "index.html").elements if tag == "img"]
    assert len(sources) == 2
    small = Image.open(io.BytesIO(base64.b64decode(sources[0].split(",")[1])))
    assert small.width <= 480 and len(sources[0]) < 60_000


# Data and downloads.


def download(path: Path, name: str) -> bytes:
    """What a page's link that saves ``name`` holds, decoded."""
    found = [attrs["href"] for tag, attrs in Page(path).elements if tag == "a" and attrs.get("download") == name]
    assert len(found) == 1, name
    return base64.b64decode(found[0].split("base64,")[1])


def test_each_verdict_leads_to_its_row_in_the_data(report):
    index = (report / "index.html").read_text()
    rows = dict(re.findall(r'<tr id="data-([^"]+)">(.*?)</tr>', (report / "01_rows.html").read_text(), re.DOTALL))
    assert set(rows) == {"01.varies", "01.agrees", "01.crossed"}
    for id, row in rows.items():
        assert index.count(f'href="01_rows.html#data-{id}"') == (4 if id == "01.varies" else 3), "a number a link"
        assert 'href="#table-1"' in row, "the table under the same heading"
    assert "<td>0.4531</td>" in rows["01.agrees"] and "<td>0.4735</td><td>0.9968</td>" in rows["01.varies"]


def test_table_rows_have_addresses_and_csv_in_full_precision(report):
    page = Page(report / "01_rows.html")
    ids = [attrs["id"] for _, attrs in page.elements if attrs.get("id", "").startswith("table-")]
    assert ids == ["table-1", "table-1-row-1", "table-1-row-2"]
    frame = pd.read_csv(io.BytesIO(download(report / "01_rows.html", "table-1.csv")))
    assert frame.shape == (2, 9) and frame.iloc[0, 0] == 0.123456
    assert "0.1235" in page.text


def test_the_page_hands_out_notebook_parameters_and_data(report, tmp_path):
    path = report / "01_rows.html"
    notebook = nbformat.reads(download(path, "01_rows.ipynb").decode(), as_version=4)
    assert notebook.cells[0].source.startswith("# Which *rows* vary?") and not any(
        c.get("outputs") for c in notebook.cells
    )
    (tmp_path / "p.yaml").write_bytes(download(path, "01_rows.parameters.yaml"))
    assert read_parameters_file(tmp_path / "p.yaml") == ("01", {"01.threshold": 16, "01.model": None})
    with zipfile.ZipFile(io.BytesIO(download(path, "01_rows.data.zip"))) as packed:
        assert packed.namelist() == ["checks.csv", "table-01-a-wide-table.csv"]
        checks = pd.read_csv(packed.open("checks.csv")).set_index("id")
    assert checks.loc["01.varies", ["low", "high"]].tolist() == [0.4735, 0.9968]
    assert checks.verdict.to_dict() == {"01.varies": "pass", "01.agrees": "fail", "01.crossed": "inconclusive"}
    assert download(report / "index.html", "checks.csv").decode().count("\n") == 4


def test_an_explorer_is_its_twin_on_the_page_and_live_in_the_notebook(report):
    """No blank where a control was: a figure with alt text and its data. The executed notebook keeps the control."""
    page = Page(report / "03_explores.html")
    (image,) = [attrs for tag, attrs in page.elements if tag == "img"]
    assert image["src"].startswith("data:image/png") and "3 additions, 3 deep" in image["alt"]
    assert "in JupyterLab its controls move the figure" in page.text and "jupyter-widgets" not in page.text.lower()
    with zipfile.ZipFile(io.BytesIO(download(report / "03_explores.html", "03_explores.data.zip"))) as packed:
        assert packed.namelist() == ["figure-tree-explorer-lines.csv"]
        assert len(pd.read_csv(packed.open("figure-tree-explorer-lines.csv"))) == 2 * 3 * 3, (
            "trees, additions, lines of each"
        )
    notebook = nbformat.read(report / "03_explores.ipynb", as_version=4)
    views = [
        output.data for cell in notebook.cells for output in cell.get("outputs", []) if WIDGET in output.get("data", {})
    ]
    state = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"].state
    assert len(views) == 1 and views[0][WIDGET]["model_id"] in state


# A real browser.


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("this test looks at the pages in Chromium, which is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield launched
        launched.close()


def open_page(browser, path, width, scheme="light", **kw):
    """A page opened with the network off; returns it with what it asked for and what the console said."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **kw)
    context.set_offline(True)
    page = context.new_page()
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url) if not request.url.startswith("data:") else None)
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri(), wait_until="networkidle")
    return page, requests, complaints


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_browser_asks_for_nothing_and_complains_of_nothing(report, browser, name, width, tmp_path):
    path = report / f"{name}.html"
    page, requests, complaints = open_page(browser, path, width)
    assert requests == [path.as_uri()] and complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    page.screenshot(path=tmp_path / f"{name}-{width}.png", full_page=True)  # to look at
    page.context.close()


def test_wide_tables_scroll_in_their_own_box(report, browser):
    page, _, _ = open_page(browser, report / "01_rows.html", 390)
    assert page.evaluate(
        "[...document.querySelectorAll('.bv-table .scroll')].every(box => box.scrollWidth > box.clientWidth)"
    )
    page.context.close()


def test_code_unfolds_by_click_and_by_keyboard(report, browser):
    page, _, _ = open_page(browser, report / "01_rows.html", 1280)
    code = page.locator("details.code").first
    assert not code.locator("pre").is_visible()
    code.locator("summary").click()
    assert code.locator("pre").is_visible()
    code.locator("summary").focus()
    page.keyboard.press("Enter")
    assert not code.locator("pre").is_visible()
    page.context.close()


def test_tables_sort_by_click_and_by_keyboard(report, browser):
    page, _, complaints = open_page(browser, report / "index.html", 1280)
    names = "[...document.querySelectorAll('.verdicts tbody tr')].map(row => row.cells[0].textContent.trim().slice(1))"
    heads = page.locator(".verdicts thead th")
    before = page.evaluate(names)
    assert before == ["pass", "fail", "inconclusive"]
    heads.nth(0).locator("button").click()
    assert page.evaluate(names) == sorted(before) and heads.nth(0).get_attribute("aria-sort") == "ascending"
    heads.nth(0).locator("button").focus()
    page.keyboard.press("Enter")
    assert (
        page.evaluate(names) == sorted(before, reverse=True) and heads.nth(0).get_attribute("aria-sort") == "descending"
    )
    heads.nth(2).locator("button").click()  # numbers as numbers: 0.4531, 3, 7
    assert page.evaluate(names) == ["fail", "inconclusive", "pass"] and heads.nth(0).get_attribute("aria-sort") is None
    assert complaints == []
    page.context.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(report, browser, name, width):
    """axe-core's rules, none excepted, with the code unfolded."""
    page, _, _ = open_page(browser, report / f"{name}.html", width)
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    found = Axe().run(page).response["violations"]
    assert [(one["impact"], one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
    page.context.close()


def test_axe_can_find_something(report, browser, tmp_path):
    """The control: an image without alt text and a level skipped are found."""
    text = (report / "index.html").read_text().replace("<main>", '<main><img src="data:,"><h5>x</h5>')
    (tmp_path / "bad.html").write_text(text)
    page, _, _ = open_page(browser, tmp_path / "bad.html", 1280)
    assert {"image-alt", "heading-order"} <= {one["id"] for one in Axe().run(page).response["violations"]}
    page.context.close()


@pytest.mark.parametrize(
    "label, name", [("Parameters of this run", "01_rows.parameters.yaml"), ("Table 1 as CSV", "table-1.csv")]
)
def test_a_download_is_saved_with_the_network_off(report, browser, label, name):
    """By a page that lies alone in a folder, as one from a mail does, under the page's own policy."""
    page, requests, complaints = open_page(browser, report / "01_rows.html", 1280, accept_downloads=True)
    with page.expect_download() as saving:
        page.get_by_role("link", name=label).click()
    assert saving.value.suggested_filename == name
    assert Path(saving.value.path()).read_bytes() == download(report / "01_rows.html", name)
    assert complaints == []
    page.context.close()


def test_a_page_prints_its_argument(report, browser):
    """On paper the code and the buttons go, figures and verdicts stay, and nothing is cut off at the side."""
    page, _, _ = open_page(browser, report / "01_rows.html", 720)
    page.emulate_media(media="print")
    assert not page.locator("details.code").first.is_visible() and not page.locator("nav.top").is_visible()
    assert page.locator("figure.plot img").first.is_visible() and page.locator(".check").first.is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    page.context.close()


CONTRAST = """() => {
  const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 };
  const light = c => {
    const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (!c.startsWith('rgba(0, 0, 0, 0')) return c;
    }
  };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.closest('.skip, .hidden')) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([e.tagName, e.className, e.textContent.slice(0, 30), ratio.toFixed(2)].join(' '));
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "01_rows"])
def test_text_stands_out_from_its_ground_in_light_and_dark(report, browser, name, scheme):
    """WCAG 2.1's contrast ratio, 4.5 for text, with the code unfolded; and the two schemes really differ."""
    page, _, _ = open_page(browser, report / f"{name}.html", 1280, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    assert page.evaluate(CONTRAST) == []
    ground = np.array(
        [int(v) for v in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))]
    )
    assert (ground.mean() > 200) == (scheme == "light")
    page.context.close()


@pytest.fixture
def server():
    """A web server that remembers what it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("protected", [True, False])
def test_what_a_notebook_displays_cannot_make_the_page_load_anything(report, browser, server, tmp_path, protected):
    """The page's policy holds against a hostile output; without the policy the same output does reach the server."""
    address, asked = server
    bait = f'<img alt="x" src="{address}/a.png"><script src="{address}/b.js"></script>'
    bait += f'<link rel="stylesheet" href="{address}/c.css">'
    text = (report / "02_fails.html").read_text().replace("</main>", bait + "</main>")
    if not protected:
        text = re.sub(r"<meta [^>]*Content-Security-Policy[^>]*>", "", text)
    path = tmp_path / "bait.html"
    path.write_text(text)
    context = browser.new_context()
    context.new_page().goto(path.as_uri(), wait_until="networkidle")
    context.close()
    assert sorted(asked) == ([] if protected else ["/a.png", "/b.js", "/c.css"])


def test_a_duration_never_has_sixty_seconds():
    from batch_variance.reporting.html import duration

    assert [duration(s) for s in (None, 8.04, 89.9, 119.8, 125.2)] == ["–", "8.0 s", "89.9 s", "2 min 00 s", "2 min 05 s"]
