"""*Restart Kernel* in JupyterLab amid a run: `attach` in the new kernel shows its dashboard, and the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect

if TYPE_CHECKING:
    from tests.support.lab import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(480)]

TRAINS = """
import torch, dtkit
from torch import nn

cluster = dtkit.Cluster(2, threads=1)
data = torch.randn(640, 8), torch.randint(3, (640,))
run = cluster.train(nn.Linear(8, 3), data, loss=nn.CrossEntropyLoss(),
                    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), batch_size=64, steps=1_000_000)
"""
ATTACHES = """
import json
import dtkit

cluster = dtkit.attach()
run = cluster.current_run
stands = run.status.step
print(json.dumps([run.status.state.value, stands, run.history.totals()["step"].tolist() == list(range(stands))]))
"""
ENDS = """
end = run.stop()
print(json.dumps([end, run.history.totals()["step"].tolist() == list(range(end))]))
cluster.close()
"""
WAIT_MS = 60_000


def test_a_restarted_kernel_shows_the_run_and_goes_on(lab: Lab, tmp_path: Path):
    shots = Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in (TRAINS, "run", ATTACHES, "run", ENDS)]
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    for cell in (0, 1):
        lab.run_cell(cell)
        lab.wait_idle(timeout=120)
    before = seen(lab, 1, above=200)

    lab.restart()
    lab.screenshot(shots / "restarted.png")
    lab.run_cell(2)
    lab.wait_idle(timeout=120)
    state, stands, whole = json.loads(lab.text(2))
    assert state == "paused"
    assert stands >= before
    assert whole

    lab.run_cell(3)
    lab.wait_idle()
    lab.select(3)
    dashboard = shown(lab, 3)
    expect(dashboard).to_have_attribute("data-state", "paused", timeout=WAIT_MS)
    expect(dashboard).to_have_attribute("data-step", str(stands))
    expect(dashboard.get_by_test_id("log")).to_contain_text(f"taken over at step {stands}")
    line = dashboard.get_by_test_id("loss-chart").locator("path.dtk-line[data-rank='0']")
    drawn = line.get_attribute("d")
    lab.screenshot(shots / "attached.png")
    dashboard.get_by_test_id("resume").click()
    expect(dashboard).to_have_attribute("data-state", "running")
    later = seen(lab, 3, above=stands + 200)
    assert line.get_attribute("d") != drawn

    lab.run_cell(4)
    lab.wait_idle(timeout=60)
    end, whole = json.loads(lab.text(4))
    assert end >= later
    assert whole


def shown(lab: Lab, cell: int) -> Locator:
    """The dashboard under a cell."""
    return lab.cell(cell).get_by_test_id("dtkit-dashboard")


def seen(lab: Lab, cell: int, above: int) -> int:
    """Wait until the dashboard under a cell shows a later step; which."""
    lab.select(cell)
    found = shown(lab, cell)
    expect(found).to_be_visible(timeout=WAIT_MS)
    element = found.element_handle()
    lab.page.wait_for_function(
        "([element, above]) => Number(element.dataset.step) > above", arg=[element, above], timeout=WAIT_MS
    )
    return int(found.get_attribute("data-step") or -1)
