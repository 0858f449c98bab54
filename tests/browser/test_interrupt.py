"""The interrupt button of JupyterLab while a cell waits for a run: one line, and the run goes on afterwards."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.support.live_run import TRAIN, get_dashboard, wait_for_step
from tests.support.marks import slow

if TYPE_CHECKING:
    from tests.support.lab import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(480)]

WAITS = ["await run", slow("run.wait()")]


@pytest.mark.parametrize("wait", WAITS)
def test_interrupted_cell_ends_in_one_line_without_a_traceback(lab: Lab, wait: str):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    sources = (TRAIN, "run", wait, "print(run.resume()); print(run.status.state.value)", "run.stop(); cluster.close()")
    lab.open(new_notebook(cells=[new_code_cell(s) for s in sources], metadata={"kernelspec": kernel}))
    for cell in (0, 1):
        lab.run_cell(cell)
        lab.wait_idle(timeout=120)
    step = wait_for_step(lab, 1, above=100)
    lab.run_cell(2)
    wait_for_step(lab, 1, above=step + 100)
    lab.interrupt()
    lab.page.wait_for_function("() => window.dtkitLab.idle()", timeout=60_000)
    errors = [output for output in lab.outputs(2) if output["output_type"] == "error"]
    shown = lab.text(2) + "".join("\n".join(error["traceback"]) for error in errors)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).strip()
    assert re.search(r"paused at step [\d,]+; run\.resume\(\) goes on$", plain), plain
    assert "Traceback" not in plain
    assert ".py" not in plain
    lab.select(1)
    expect(get_dashboard(lab, 1)).to_have_attribute("data-state", "paused")
    lab.select(3)
    lab.run_cell(3)
    lab.wait_text(3, "running", timeout=60)
    assert lab.text(3) == "None\nrunning\n"
    lab.run_cell(4)
    lab.page.wait_for_function("() => window.dtkitLab.idle()", timeout=60_000)
