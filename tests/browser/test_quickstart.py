"""Notebook 01 as a person meets it: Run All in JupyterLab, watch both nodes, press the buttons."""

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


def endless() -> nbformat.NotebookNode:
    """Notebook 01 up to its dashboard, training until it is stopped: else it would end before a person could press.

    Its last cell is not run, so nothing closes the cluster but the lease, which is half an hour unless made short.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (train,) = [k for k, cell in enumerate(notebook.cells) if "epochs=40" in cell.source]
    notebook.cells[train].source = notebook.cells[train].source.replace("epochs=40", "epochs=100_000")
    (start,) = [k for k, cell in enumerate(notebook.cells) if "dtkit.Cluster(2, threads=1)" in cell.source]
    notebook.cells[start].source = notebook.cells[start].source.replace("threads=1)", "threads=1, lease=5)")
    (end,) = [k for k, cell in enumerate(notebook.cells) if cell.source == "await run"]
    notebook.cells = notebook.cells[: end + 1]
    return notebook


def cell_with(lab: Lab, text: str) -> int:
    """The index of the cell with that source."""
    cells = lab.page.evaluate("() => window.dtkitLab.cells().map((cell) => cell.source)")
    (found,) = [k for k, source in enumerate(cells) if text in source]
    return found


def step_of(summary: Locator) -> int:
    """The step that the dashboard shows."""
    return int(summary.get_attribute("data-step") or -1)


def wait_for_step(lab: Lab, above: int) -> None:
    """Until the dashboard shows a later step."""
    lab.page.wait_for_function(
        "(above) => Number(document.querySelector('[data-testid=dtkit-dashboard]').dataset.step) > above",
        arg=above,
        timeout=TRAINING_S * 1000,
    )


def cut_off(dashboard: Locator) -> list[str]:
    """The large figures that don't fit where they stand."""
    return dashboard.locator(".dtk-value").evaluate_all(
        "(values) => values.filter((el) => el.scrollWidth > el.clientWidth).map((el) => el.textContent)"
    )


@pytest.mark.parametrize(
    "look",
    [Look("JupyterLab Light", 1400, 1000), slow(Look("JupyterLab Dark", 760, 1000))],
    indirect=True,
    ids=["light-wide", "dark-narrow"],
)
def test_watch_pause_resume_and_stop(lab: Lab, tmp_path: Path, look: Look):
    shots = Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path))
    lab.open(endless())
    lab.run_all()
    shown = cell_with(lab, "run.resume()")
    lab.wait_text(shown, "application/vnd.jupyter.widget-view+json", timeout=TRAINING_S)
    lab.select(shown)
    dashboard = lab.cell(shown).get_by_test_id("dtkit-dashboard")
    expect(dashboard).to_have_attribute("data-state", "running", timeout=TRAINING_S * 1000)

    # Both nodes' curves move.
    nodes = [dashboard.get_by_test_id("loss-chart").locator(f"path.dtk-line[data-rank='{k}']") for k in (0, 1)]
    wait_for_step(lab, 20)
    before = [line.get_attribute("d") for line in nodes]
    wait_for_step(lab, step_of(dashboard) + 200)
    assert all(line.get_attribute("d") != old for line, old in zip(nodes, before, strict=True))
    lab.screenshot(shots / f"running-{look.width}.png")

    # Pause: the step stands still while the kernel goes on answering.
    dashboard.get_by_test_id("pause").click()
    expect(dashboard).to_have_attribute("data-state", "paused")
    stands = step_of(dashboard)
    dashboard.get_by_test_id("step").click()
    wait_for_step(lab, stands)
    expect(dashboard).to_have_attribute("data-state", "paused")
    assert step_of(dashboard) == stands + 1
    assert cut_off(dashboard) == []
    throughput = dashboard.get_by_test_id("throughput-chart").locator("path.dtk-line[data-rank='0']")
    assert 16 < len(re.findall("[ML]", throughput.get_attribute("d") or "")) <= 64  # joined: one a step can't be read
    lab.screenshot(shots / f"paused-{look.width}.png")

    dashboard.get_by_test_id("resume").click()
    expect(dashboard).to_have_attribute("data-state", "running")
    wait_for_step(lab, stands + 100)
    dashboard.get_by_test_id("stop").click()

    # The output is a picture now, that a saved notebook shows without a kernel.
    lab.wait_text(shown, "image/png", timeout=TRAINING_S)
    lab.wait_idle()
    (kept,) = [output for output in lab.outputs(shown) if "data" in output]
    assert set(kept["data"]) == {"image/png", "text/plain"}
    assert "stopped" in "".join(kept["data"]["text/plain"])
    lab.select(shown)
    lab.screenshot(shots / f"kept-{look.width}.png")
