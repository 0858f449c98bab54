"""Notebook 01 as a user runs it: Run All in JupyterLab, watch both nodes, press the buttons."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from tests.support.lab import Lab, Look
from tests.support.marks import slow

pytestmark = pytest.mark.browser

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "01_quickstart.ipynb"
TRAINING_S = 60


def make_endless_notebook() -> nbformat.NotebookNode:
    """Return notebook 01 up to its dashboard, training until it is stopped.

    The last cell is missing, so only the lease ends the cluster; it is shortened for that.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (train,) = [k for k, cell in enumerate(notebook.cells) if "epochs=40" in cell.source]
    notebook.cells[train].source = notebook.cells[train].source.replace("epochs=40", "epochs=100_000")
    (start,) = [k for k, cell in enumerate(notebook.cells) if "dtkit.Cluster(2, threads=1)" in cell.source]
    notebook.cells[start].source = notebook.cells[start].source.replace("threads=1)", "threads=1, lease=5)")
    (end,) = [k for k, cell in enumerate(notebook.cells) if cell.source == "await run"]
    notebook.cells = notebook.cells[: end + 1]
    return notebook


def find_cell(lab: Lab, text: str) -> int:
    """Return the index of the cell with that text."""
    cells = lab.page.evaluate("() => window.dtkitLab.cells().map((cell) => cell.source)")
    (index,) = [k for k, source in enumerate(cells) if text in source]
    return index


def read_step(dashboard: Locator) -> int:
    """Return the step that the dashboard's counter shows; the charts may follow a second later."""
    return int(dashboard.get_by_test_id("progress").get_attribute("aria-valuenow") or -1)


def wait_for_step(lab: Lab, above: int) -> None:
    """Wait until the dashboard shows a later step."""
    lab.page.wait_for_function(
        "(above) => Number(document.querySelector('[data-testid=dtkit-dashboard]').dataset.step) > above",
        arg=above,
        timeout=TRAINING_S * 1000,
    )


def list_cut_off(dashboard: Locator) -> list[str]:
    """Return the large figures that are cut off."""
    return dashboard.locator(".dtk-value").evaluate_all(
        "(values) => values.filter((el) => el.scrollWidth > el.clientWidth).map((el) => el.textContent)"
    )


@pytest.mark.parametrize(
    "look",
    [Look("JupyterLab Light", 1400, 1000), slow(Look("JupyterLab Dark", 760, 1000))],
    indirect=True,
    ids=["light-wide", "dark-narrow"],
)
def test_quickstart_run_can_be_watched_paused_resumed_and_stopped(lab: Lab, tmp_path: Path, look: Look):
    shots = Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path))
    lab.open(make_endless_notebook())
    lab.run_all()
    cell = find_cell(lab, "run.resume()")
    lab.wait_text(cell, "dtkit-live", timeout=TRAINING_S)
    lab.select(cell)
    dashboard = lab.cell(cell).get_by_test_id("dtkit-dashboard")
    expect(dashboard).to_have_attribute("data-state", "running", timeout=TRAINING_S * 1000)

    # Both nodes' curves move.
    nodes = [dashboard.get_by_test_id("loss-chart").locator(f"path.dtk-line[data-rank='{k}']") for k in (0, 1)]
    wait_for_step(lab, 20)
    dashboard.get_by_test_id("loss-chart").scroll_into_view_if_needed()  # one out of sight is drawn each minute
    before = [line.get_attribute("d") for line in nodes]
    wait_for_step(lab, read_step(dashboard) + 200)
    for line, old in zip(nodes, before, strict=True):
        expect(line).not_to_have_attribute("d", old)
    lab.screenshot(shots / f"running-{look.width}.png")

    # Pause: the step stays the same while the kernel keeps answering.
    dashboard.get_by_test_id("pause").click()
    expect(dashboard).to_have_attribute("data-state", "paused")
    paused_at = read_step(dashboard)
    dashboard.get_by_test_id("step").click()
    wait_for_step(lab, paused_at)
    expect(dashboard).to_have_attribute("data-state", "paused")
    expect(dashboard).to_have_attribute("data-step", str(paused_at + 1))
    assert list_cut_off(dashboard) == []
    throughput = dashboard.get_by_test_id("throughput-chart").locator("path.dtk-line[data-rank='0']")
    assert (
        16 < len(re.findall("[ML]", throughput.get_attribute("d") or "")) <= 64
    )  # points are joined, since one per step can't be read
    lab.screenshot(shots / f"paused-{look.width}.png")

    dashboard.get_by_test_id("resume").click()
    expect(dashboard).to_have_attribute("data-state", "running")
    wait_for_step(lab, paused_at + 100)
    dashboard.get_by_test_id("stop").click()
    dashboard.get_by_test_id("stop").click()  # it asks once

    # The view stays, and below it is a picture, which a saved notebook shows without a kernel.
    expect(dashboard).to_have_attribute("data-state", "stopped", timeout=1000 * TRAINING_S)
    lab.wait_text(cell, '"image/png":', timeout=TRAINING_S)
    lab.wait_idle()
    _place, picture = [output for output in lab.outputs(cell) if "data" in output]
    assert set(picture["data"]) == {"text/html", "image/png", "text/plain"}
    assert "stopped" in "".join(picture["data"]["text/plain"])
    lab.select(cell)
    lab.screenshot(shots / f"kept-{look.width}.png")
