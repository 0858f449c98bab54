"""Notebook 01 in JupyterLab, as a person uses it: run all, watch, pause, take steps, resume, stop."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.lab import Lab, Look

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode
    from playwright.sync_api import Locator

pytestmark = pytest.mark.browser

NOTEBOOK = "notebooks/01_quickstart.ipynb"
START_MS = 60_000
MOVE_MS = 30_000

# What the copy that is opened has in place of the notebook's own lines. Twenty epochs are over in seconds: here is
# time to press buttons. And `await run` returns when the run pauses, with which Run All would go on and close the
# cluster: here it waits for the end of the run.
PATCHES = {
    "epochs=20,\n    metrics=": "epochs=4000,\n    metrics=",
    "await run\n": "import asyncio\nwhile not run.status.state.ended:\n    await run\n    await asyncio.sleep(0.1)\n",
}


@pytest.fixture
def notebook(root: Path) -> NotebookNode:
    notebook = nbformat.read(root / NOTEBOOK, as_version=4)
    for old, new in PATCHES.items():
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        cell.source = cell.source.replace(old, new)
    return notebook


def index_of(notebook: NotebookNode, source: str) -> int:
    (index,) = [i for i, c in enumerate(notebook.cells) if c.cell_type == "code" and source in c.source]
    return index


def curves(dashboard: Locator, chart: str) -> list[str]:
    """The two nodes' lines in a chart, as SVG paths."""
    lines = dashboard.get_by_test_id(chart).locator("path.dtk-line")
    return [lines.and_(dashboard.locator(f'[data-rank="{rank}"]')).get_attribute("d") or "" for rank in (0, 1)]


def wait_until_both_move(lab: Lab, dashboard: Locator, chart: str) -> None:
    before = curves(dashboard, chart)
    lab.page.wait_for_function(
        """([chart, before]) => before.every((d, rank) => {
             const line = document.querySelector(`[data-testid="${chart}"] path.dtk-line[data-rank="${rank}"]`);
             const now = line?.getAttribute("d");
             return now && now !== d;
           })""",
        arg=[chart, before],
        timeout=MOVE_MS,
    )


def step_of(dashboard: Locator) -> int:
    return int(dashboard.get_attribute("data-step") or -1)


@pytest.mark.parametrize("look", [Look("JupyterLab Light", 1400, 1000)], indirect=True)
def test_a_person_watches_pauses_steps_resumes_and_stops(lab: Lab, notebook: NotebookNode, root: Path):
    lab.open(notebook)
    lab.run_all()
    index = index_of(notebook, "run.resume()")
    lab.wait_text(index, "widget-view", timeout=60)
    lab.select(index)
    dashboard = lab.cell(index).get_by_test_id("dtkit-dashboard")
    expect(dashboard).to_have_attribute("data-state", "running", timeout=START_MS)
    for chart in ("loss-chart", "throughput-chart"):
        wait_until_both_move(lab, dashboard, chart)

    dashboard.get_by_test_id("pause").click()
    expect(dashboard).to_have_attribute("data-state", "paused")
    paused_at = step_of(dashboard)
    assert paused_at > 3
    # It stands still: had any rank gone on, a single step from here would show a number beyond the next one.
    for step in (paused_at + 1, paused_at + 2):
        dashboard.get_by_test_id("step").click()
        expect(dashboard).to_have_attribute("data-step", str(step))
        expect(dashboard).to_have_attribute("data-state", "paused")
    for theme, width in itertools.product(("Light", "Dark"), (1400, 700)):
        look_at(lab, dashboard, theme, width)
        lab.screenshot(root / "out" / f"quickstart-{theme.lower()}-{width}.png")
    assert step_of(dashboard) == paused_at + 2

    dashboard.get_by_test_id("resume").click()
    expect(dashboard).to_have_attribute("data-state", "running")
    wait_until_both_move(lab, dashboard, "loss-chart")
    assert step_of(dashboard) > paused_at + 2

    dashboard.get_by_test_id("stop").click()
    lab.wait_text(index, "image/png")
    (kept,) = lab.outputs(index)
    assert set(kept["data"]) == {"image/png", "text/plain"}
    assert "stopped" in lab.text(index)
    lab.select(index)
    expect(lab.cell(index).locator("img")).to_be_visible()
    lab.screenshot(root / "out" / "quickstart-kept.png")
    lab.wait_idle(timeout=120)  # the cells below ran to the end, on a run that was stopped
    assert "PASS" in lab.text(index_of(notebook, "run.verify("))


def look_at(lab: Lab, dashboard: Locator, theme: str, width: int) -> None:
    """Show the dashboard so, and find nothing of it cut off or broken."""
    lab.set_theme(f"JupyterLab {theme}")
    lab.page.set_viewport_size({"width": width, "height": 1000})
    expect(dashboard).to_have_attribute("data-theme", theme.lower())
    dashboard.scroll_into_view_if_needed()
    expect(dashboard.locator(".dtk-broken")).to_have_count(0)
    for name in ("resume", "step", "stop", "lr", "loss-chart", "throughput-chart", "nodes-table"):
        expect(dashboard.get_by_test_id(name)).to_be_visible()
    lab.page.wait_for_function(
        """() => [...document.querySelectorAll('[data-testid="dtkit-dashboard"] .dtk-chart')].every((chart) =>
             chart.getBoundingClientRect().right <= chart.closest(".dtkit").getBoundingClientRect().right)"""
    )
