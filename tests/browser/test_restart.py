"""*Restart Kernel* in JupyterLab during a run: `attach` in the new kernel shows and continues the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.support.live_run import TRAIN, WAIT_MS, get_dashboard, wait_for_step

if TYPE_CHECKING:
    from tests.support.lab import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(480)]

LOST_MS = 5_000

ATTACH = """
import json
import dtkit

cluster = dtkit.attach()
run = cluster.current_run
step = run.status.step
print(json.dumps([run.status.state.value, step, run.history.totals()["step"].tolist() == list(range(step))]))
"""
END = """
end = run.stop()
print(json.dumps([end, run.history.totals()["step"].tolist() == list(range(end))]))
cluster.close()
"""


def test_restarted_kernel_shows_and_continues_the_run(lab: Lab, tmp_path: Path):
    shots = Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in (TRAIN, "run", ATTACH, "run", END)]
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    for cell in (0, 1):
        lab.run_cell(cell)
        lab.wait_idle(timeout=120)
    before = wait_for_step(lab, 1, above=200)

    lab.restart()
    lab.select(1)
    expect(get_dashboard(lab, 1)).to_have_attribute("data-state", "lost", timeout=LOST_MS)
    expect(get_dashboard(lab, 1).get_by_test_id("error")).to_contain_text("dtkit.attach()")
    lab.screenshot(shots / "restarted.png")
    lab.run_cell(2)
    lab.wait_idle(timeout=120)
    taken, back, result = lab.text(2).splitlines()
    assert taken.startswith("took over dtkit-")
    assert "(paused at step " in taken
    assert "; cluster.current_run.resume() or its dashboard's Resume button continues it)" in taken
    assert back.startswith("Another notebook takes it back by dtkit.attach(")  # a line of its own, which fits a cell
    state, step, is_complete = json.loads(result)
    assert state == "paused"
    assert step >= before
    assert is_complete

    lab.run_cell(3)
    lab.wait_idle()
    lab.select(3)
    dashboard = get_dashboard(lab, 3)
    expect(dashboard).to_have_attribute("data-state", "paused", timeout=WAIT_MS)
    expect(dashboard).to_have_attribute("data-step", str(step))
    expect(dashboard.get_by_test_id("log")).to_contain_text(
        f"taken over at step {step:,}; it pauses until run.resume()"
    )
    marks = dashboard.get_by_test_id("loss-chart").locator("text", has_text="‖")
    expect(marks).to_have_count(1)  # the pause of the takeover
    line = dashboard.get_by_test_id("loss-chart").locator("path.dtk-line[data-rank='0']")
    drawn = line.get_attribute("d")
    lab.screenshot(shots / "attached.png")
    dashboard.get_by_test_id("resume").click()
    expect(dashboard).to_have_attribute("data-state", "running")
    later = wait_for_step(lab, 3, above=step + 200)
    line.scroll_into_view_if_needed()  # panels out of sight are drawn each minute
    expect(line).not_to_have_attribute("d", drawn or "", timeout=WAIT_MS)

    lab.run_cell(4)
    lab.wait_idle(timeout=60)
    end, is_complete = json.loads(lab.text(4))
    assert end >= later
    assert is_complete
