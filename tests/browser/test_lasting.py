"""What a notebook shows when it is saved in a run, reloaded or restarted, in JupyterLab and Notebook 7."""

from __future__ import annotations

import io
import re

import pytest
from matplotlib.image import imread
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect

from tests.support.fake_run import TRAIN
from tests.support.lab import Lab, Look
from tests.support.marks import slow

pytestmark = [pytest.mark.browser, pytest.mark.timeout(480)]

WAIT_MS = 60_000
QUICK = (
    "from dtkit._util import timeouts; timeouts.KEPT_PICTURE_FIRST_S = 0.2; timeouts.KEPT_PICTURE_INTERVAL_S = 0.5\n"
)
LOOKS = [Look("JupyterLab Light", 1200, 1000), slow(Look("JupyterLab Light", 1200, 1000, app="notebook"))]
both_apps = pytest.mark.parametrize("look", LOOKS, indirect=True, ids=["lab", "notebook7"])


def start(lab: Lab) -> Locator:
    """Start a run that stands at step 50, and return its live view."""
    run_cells(lab)
    view = lab.page.get_by_test_id("dtkit-dashboard")
    expect(view).to_have_attribute("data-step", "50", timeout=WAIT_MS)
    return view


def run_cells(lab: Lab) -> None:
    """Open a notebook that starts a run and shows it, and run its cells but the last, which stops the run."""
    cells = [new_code_cell(source) for source in (QUICK + TRAIN, "run", "run.stop()")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    for cell in (0, 1):
        lab.run_cell(cell)
        lab.wait_idle(timeout=120)


def get_pictures(lab: Lab) -> Locator:
    return lab.page.locator(".jp-OutputArea-output img[alt='the charts of the run']")


def check_no_lost_widget(lab: Lab) -> None:
    assert lab.page.get_by_text("Error displaying widget").count() == 0
    assert lab.page.get_by_text("Loading widget").count() == 0


@both_apps
def test_notebook_saved_during_a_run_shows_a_picture_after_a_restart(lab: Lab):
    view = start(lab)
    lab.wait_text(1, "base64,iVBOR", timeout=60)
    expect(get_pictures(lab)).to_be_hidden()  # the view has its place
    expect(view).to_be_visible()
    saved = lab.save()
    kinds = {kind for output in saved.cells[1].outputs for kind in output.data}
    assert kinds == {"text/html", "text/plain"}  # no widget view, which reads "model not found" without its kernel
    lab.restart()
    lab.reload()
    expect(get_pictures(lab)).to_be_visible(timeout=WAIT_MS)
    expect(lab.page.get_by_text(re.compile(r"^[A-Z]\w+, step 50 of 400 at .* loads Jupyter widgets"))).to_be_visible()
    check_no_lost_widget(lab)


def test_a_view_after_a_reload_says_that_the_saved_picture_is_older(lab: Lab):
    """A front end finds no output of before the reload, so the kernel can't replace the picture there."""
    view = start(lab)
    note = lab.page.get_by_test_id("restored")
    expect(note).to_have_count(0)
    lab.save()
    # waits: two seconds may lie between the clocks of kernel and browser
    lab.page.wait_for_function("(then) => Date.now() > then", arg=lab.page.evaluate("Date.now()") + 3000)
    lab.reload()
    expect(view).to_be_visible(timeout=WAIT_MS)
    expect(note).to_contain_text("Show the run in a new cell", timeout=WAIT_MS)
    assert note.evaluate("(el) => el === el.parentElement.firstElementChild")  # where it is seen
    lab.run_cell(2)
    expect(view).to_have_attribute("data-state", "stopped", timeout=WAIT_MS)
    lab.reload()  # the file has no picture of the end
    expect(view).to_have_attribute("data-state", "stopped", timeout=WAIT_MS)
    expect(note).to_contain_text("Saved pictures stop here")
    expect(note).to_be_visible()


@both_apps
def test_view_stays_alive_after_the_end_and_a_picture_is_saved(lab: Lab):
    view = start(lab)
    lab.run_cell(2)
    lab.wait_idle()
    lab.select(1)
    expect(view).to_have_attribute("data-state", "stopped", timeout=WAIT_MS)
    lab.wait_text(1, '"image/png":', timeout=60)  # beside the page, which has pictures, too
    saved = lab.save()
    assert "image/png" in saved.cells[1].outputs[-1].data
    view.get_by_test_id("waffle").get_by_role("option").nth(6).click()
    expect(view.get_by_test_id("loss-chart").locator("path.dtk-picked")).to_have_attribute("data-rank", "6")
    lab.reload()  # the kernel has the model
    view = lab.page.get_by_test_id("dtkit-dashboard")
    expect(view).to_have_attribute("data-step", "50", timeout=WAIT_MS)
    expect(get_pictures(lab)).to_be_hidden()
    expect(lab.page.get_by_test_id("restored")).to_be_hidden()  # the file has the picture of the end
    lab.close()  # the kernel is gone
    lab.reload()
    expect(get_pictures(lab)).to_be_visible(timeout=WAIT_MS)
    check_no_lost_widget(lab)
    lab.set_theme("JupyterLab Dark")
    pixels = imread(io.BytesIO(get_pictures(lab).screenshot()))[..., :3]
    assert pixels.mean() < 0.35, "a white slab in a dark notebook"
    assert pixels.max() > 0.6, "the letters are dark, too"


def test_front_end_without_the_widget_shows_the_refreshed_picture(lab: Lab):
    """Stands for a front end that can't load anywidget."""
    lab.page.route("**/extensions/anywidget/**", lambda route: route.abort())
    run_cells(lab)
    expect(get_pictures(lab)).to_be_visible(timeout=WAIT_MS)
    expect(lab.page.get_by_text(re.compile(r"^[A-Z]\w+, step 50 of 400 at .* refreshed now and then"))).to_be_visible()
    assert lab.page.get_by_test_id("dtkit-dashboard").count() == 0
    check_no_lost_widget(lab)
