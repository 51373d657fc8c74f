"""The explorers in a running JupyterLab: a control moves by keyboard, the figure follows, the saved notebook keeps it.

One server, one browser, one notebook for all tests.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbformat.v4 import new_code_cell, new_notebook

from batch_variance.common.data import repository
from batch_variance.reporting.parameters import read_defaults

SETUP = """import numpy as np, pandas as pd
from batch_variance.reporting.widgets import *
from batch_variance.studies import split_scheduler
from batch_variance.studies.row_threshold_routing import Routing
p = split_scheduler.Parameters.checked({parameters!r})
scores = np.random.default_rng(0).lognormal(size=(2, 60, 48))
routing = Routing(scores, [1, 4], np.repeat([0, 1, 2], 20), "random scores")
class RowThreshold: threshold, experts, top_k = 32, 16, 12
tokens = pd.DataFrame([
    dict(prompt=text, concurrency=level, position=i, alone=f" w{{i}}", together=f" w{{i}}" if i < 3 * level else " x",
         margin_alone=1 + i % 5, margin_together=1.5 + i % 4)
    for text in ("One?", "Two?") for level in (2, 4) for i in range(20)])"""
# name: cell, a label, the keys that move its control. Space opens a list, whose arrows JupyterLab would take otherwise.
EXPLORERS = {
    "schedule": ("schedule_explorer(p);", "SM parts (programs)", ["ArrowDown"]),
    "threshold": ('threshold_explorer(routing, RowThreshold, "emulated");', "requests in the step", ["ArrowUp"]),
    "divergence": ('divergence_explorer(tokens, "emulated", 4);', "requests in flight", ["Space", "ArrowUp", "Enter"]),
    "tree": ('tree_explorer(fold_trees(p), "emulated", 6);', "second tree", ["Space", "ArrowDown", "Enter"]),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("this test looks at widgets in Chromium, which is not installed: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab on a notebook with the four explorers; its address and the notebook's path."""
    top = tmp_path_factory.mktemp("lab")
    parameters = read_defaults(repository() / "notebooks" / "02_split_scheduler.ipynb") | {"longest": 1024}
    cells = [new_code_cell(SETUP.format(parameters=parameters))]
    cells += [new_code_cell(source, metadata={"trusted": True}) for source, _, _ in EXPLORERS.values()]
    notebook = new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, top / "explore.ipynb")
    # The settings that `make setup` writes beside JupyterLab, here as the user's own, however this was installed.
    made = re.search(r"^KEEP_WIDGETS := (.*)$", (repository() / "Makefile").read_text(), re.MULTILINE).group(1)
    for plugin, setting in json.loads(made).items():
        folder, name = plugin.split(":")
        path = top / "settings" / folder / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(setting))
    port = free_port()
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(top / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(top / "spaces"),
        "JUPYTER_CONFIG_DIR": str(top / "config"),
        "JUPYTER_RUNTIME_DIR": str(top / "runtime"),
        "IPYTHONDIR": str(top / "ipython"),
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={top}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = open(top / "log", "w")
    process = subprocess.Popen(command, env=environment, cwd=top, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (top / "log").read_text()[-2000:]
                time.sleep(0.1)
        yield address, top / "explore.ipynb"
    finally:
        process.send_signal(signal.SIGTERM)  # twice would ask; once, without a terminal, shuts kernels down too
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


@pytest.fixture(scope="module")
def page(lab, chromium):
    """The notebook, opened and run to its end."""
    from playwright.sync_api import sync_playwright

    address, _ = lab
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = browser.new_page(
            viewport={"width": 1400, "height": 3600}
        )  # tall: JupyterLab builds what is in view only
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto(f"{address}/lab/tree/explore.ipynb?reset", wait_until="load")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.wait_for_function(
            "() => { const w = window.jupyterapp?.shell.currentWidget;"
            " return w?.context?.isReady && w.sessionContext.session?.kernel?.status === 'idle' }",
            timeout=60_000,
        )
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        page.wait_for_function("document.querySelectorAll('.bv-explorer-picture img').length === 4", timeout=90_000)
        yield page
        browser.close()


def explorer(page, name):
    return page.locator(".bv-explorer").nth(list(EXPLORERS).index(name))


def settled(page, one, before) -> str:
    """The picture's source once it is another than before."""
    image = one.locator(".bv-explorer-picture img")
    page.wait_for_function(
        "([image, before]) => image.isConnected === false || image.src !== before",
        arg=[image.element_handle(), before],
        timeout=20_000,
    )
    return image.get_attribute("src")


@pytest.mark.parametrize("name", EXPLORERS)
def test_a_control_moved_by_keyboard_moves_the_figure(page, name):
    _, label, keys = EXPLORERS[name]
    one = explorer(page, name)
    image = one.locator(".bv-explorer-picture img")
    before, sentence, alt = (
        image.get_attribute("src"),
        one.locator("[role=status]").inner_text(),
        image.get_attribute("alt"),
    )
    one.get_by_label(label, exact=True).focus()
    for key in keys:
        page.keyboard.press(key)
    after = settled(page, one, before)
    assert after != before and after.startswith("data:image/png;base64,")
    assert one.locator("[role=status]").inner_text() != sentence
    assert image.get_attribute("alt") != alt and image.get_attribute("alt").strip()


def test_a_row_is_added_and_its_length_dragged(page):
    one = explorer(page, "schedule")
    image = one.locator(".bv-explorer-picture img")
    rows = one.get_by_label(re.compile(r"row \d+ \(tokens\)"))
    count, before = rows.count(), image.get_attribute("src")
    one.get_by_role("button", name="Add a row").click()
    before = settled(page, one, before)
    assert rows.count() == count + 1
    box = one.locator("[role=slider]").last.bounding_box()
    length = rows.last.input_value()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    assert settled(page, one, before) != before and int(rows.last.input_value()) > int(length)


def test_controls_have_names_and_axe_finds_nothing_serious(page):
    """But for ipywidgets' slider handle, which has no name: a field that has one stands beside each."""
    found = Axe().run(page, context=".bv-explorer").response["violations"]
    nodes = [
        (one["id"], node["html"]) for one in found if one["impact"] in ("serious", "critical") for node in one["nodes"]
    ]
    assert [
        (id, text[:200]) for id, text in nodes if id != "aria-input-field-name" or 'class="noUi-handle' not in text
    ] == []
    fields = page.locator(".bv-explorer input[type=number]")
    assert fields.count() == page.locator(".bv-explorer [role=slider]").count() > 10
    assert page.evaluate(
        "[...document.querySelectorAll('.bv-explorer input, .bv-explorer select')].every(e => e.labels.length === 1 "
        "&& e.labels[0].textContent.trim())"
    )


def test_the_saved_notebook_keeps_the_state_and_the_twin(page, lab):
    """The slider's value and the picture are in the file, for a reader without a kernel, and no error came up."""
    value = int(explorer(page, "threshold").get_by_label("requests in the step").input_value())
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    deadline = time.monotonic() + 20
    while "widgets" not in (saved := json.loads(lab[1].read_text()))["metadata"] and time.monotonic() < deadline:
        time.sleep(0.2)
    state = saved["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"].values()
    assert value in [
        one["state"].get("value") for one in state if one["state"].get("description") == "requests in the step"
    ]
    assert sum("<img" in str(one["state"].get("value")) for one in state) == 4
    outputs = [
        output for cell in saved["cells"] for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(outputs) == 4 and all("application/vnd.jupyter.widget-view+json" in one["data"] for one in outputs)
    assert page.errors == []
    page.screenshot(path=lab[1].with_name("lab.png"))  # to look at
