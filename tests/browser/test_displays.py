"""The dashboard of a real run in JupyterLab and Notebook 7: in sync, reloaded, saved, and without a kernel.

The engines are fakes, so that 16 nodes cost nothing. Kernel, widget and browser are real.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect

from tests.support.fake_run import TRAIN
from tests.support.lab import Lab, Look
from tests.support.marks import slow

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode

pytestmark = [pytest.mark.browser, pytest.mark.timeout(480)]

WAIT_MS = 60_000
LOOKS = [
    Look("JupyterLab Light", 1400, 1000),
    slow(Look("JupyterLab Dark", 760, 1000)),
    slow(Look("JupyterLab Light", 1200, 1000, app="notebook")),
]


def notebook() -> NotebookNode:
    """Return a notebook with two displays of one run, and its end."""
    return make_notebook(TRAIN, "run.dashboard(fault_injection=True)", "run", "run.stop()")


def make_notebook(*sources: str) -> NotebookNode:
    """Return a notebook with these cells."""
    cells = [new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def start(lab: Lab) -> list[Locator]:
    """Start the run and return both displays, at step 50."""
    lab.open(notebook())
    for cell in (0, 1, 2):
        lab.run_cell(cell)
        lab.wait_idle(timeout=120)
    return get_displays(lab)


def get_displays(lab: Lab) -> list[Locator]:
    views = lab.page.get_by_test_id("dtkit-dashboard")
    expect(views).to_have_count(2, timeout=WAIT_MS)
    displays = [views.nth(k) for k in range(2)]
    for view in displays:
        expect(view).to_have_attribute("data-step", "50", timeout=WAIT_MS)
    return displays


GAN = """
import time, torch, dtkit

def train(steps, end):
    for step in range(steps):
        dtkit.log(d_loss=1 / (step + 1), g_loss=float(step))
    while not end.exists():
        time.sleep(0.05)

from pathlib import Path

cluster = dtkit.Cluster(2, threads=1)  # lines of several nodes, which are described in another way than one
"""


def test_numbers_of_a_function_are_charts_while_it_runs_and_afterwards(lab: Lab, tmp_path: Path):
    end = tmp_path / "end"
    run = f"cluster.run(train, 300, Path({str(end)!r}))"
    lab.open(make_notebook(GAN, run, "cluster.last_task.to_pandas().shape"))
    lab.run_cell(0)
    lab.wait_idle(timeout=120)
    lab.run_cell(1)
    view = lab.cell(1).get_by_test_id("dtkit-call")
    expect(view.get_by_test_id("scalars-chart")).to_have_count(2, timeout=WAIT_MS)
    expect(view).to_have_attribute("data-state", "running")
    assert "L" in (view.locator("path.dtk-line").first.get_attribute("d") or "")
    end.touch()
    lab.wait_idle(timeout=60)
    expect(view).to_have_attribute("data-state", "ended", timeout=WAIT_MS)
    lab.run_cell(2)
    lab.wait_text(2, "(600, 4)")
    saved = lab.save()
    assert any("image/png" in output.get("data", {}) for output in saved.cells[1].outputs)


@pytest.mark.parametrize("look", LOOKS, indirect=True, ids=["lab-light", "lab-dark", "notebook7"])
def test_displays_stay_in_sync_and_keep_pictures(lab: Lab):
    first, second = start(lab)
    for view in (first, second):
        expect(view.get_by_test_id("slow")).to_be_visible()  # one display has fault controls, so both have them
        expect(view.get_by_test_id("log")).to_contain_text("<script>alert(1)</script>")
        expect(view.get_by_test_id("custom-panel").locator("img")).to_be_visible(timeout=WAIT_MS)
    first.get_by_test_id("step").click()
    second.get_by_test_id("waffle").get_by_role("option").nth(6).click()
    for view in (first, second):
        expect(view).to_have_attribute("data-step", "51", timeout=WAIT_MS)
        expect(view.get_by_test_id("effect")).to_have_text("✓ one step taken on all nodes")
        chart = view.get_by_test_id("loss-chart")
        chart.scroll_into_view_if_needed()  # a panel out of sight is drawn when it comes into sight
        expect(chart.locator("path.dtk-picked")).to_have_attribute("data-rank", "6")
    rate = second.get_by_test_id("lr")
    rate.fill("0.002")
    rate.press("Enter")
    for view in (first, second):
        expect(view.get_by_test_id("effect")).to_have_text("✓ learning rate 0.002 from step 51 on, on all nodes")
    assert lab.page.locator(".dtk-broken").count() == 0
    slider = first.get_by_test_id("smoothing")
    slider.press("ArrowRight")  # a key of JupyterLab elsewhere
    expect(slider).to_have_value("0.05")

    lab.run_cell(3)
    for cell in (1, 2):
        lab.wait_text(cell, '"image/png":', timeout=60)  # the picture amid a run is HTML
    lab.wait_idle()
    saved = lab.save()
    for cell in (1, 2):
        place, picture = saved.cells[cell].outputs
        assert "dtkit-live" in place.data["text/html"]
        assert set(picture.data) == {"text/html", "image/png", "text/plain"}
    lab.close()  # the kernel is gone
    lab.reload()
    pictures = lab.page.locator(".jp-OutputArea-output img[alt='the charts of the run']")
    expect(pictures).to_have_count(2, timeout=WAIT_MS)
    assert lab.page.get_by_text("Error displaying widget").count() == 0


@pytest.mark.slow
def test_reloaded_page_has_the_whole_history(lab: Lab):
    first, _ = start(lab)
    line = first.get_by_test_id("loss-chart").locator("path.dtk-line[data-rank=all]")
    drawn = len(re.findall("[ML]", line.get_attribute("d") or ""))
    assert drawn == 50
    lab.save()
    lab.reload()
    first, second = get_displays(lab)
    for view in (first, second):
        line = view.get_by_test_id("loss-chart").locator("path.dtk-line[data-rank=all]")
        assert len(re.findall("[ML]", line.get_attribute("d") or "")) == drawn
        expect(view.get_by_test_id("log")).to_contain_text("<script>alert(1)</script>")
    first.get_by_test_id("step").click()
    expect(second).to_have_attribute("data-step", "51", timeout=WAIT_MS)
