"""JupyterLab's shortcuts while a control of the dashboard has the focus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.support.fake_run import TRAIN

if TYPE_CHECKING:
    from tests.support.lab import Lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

WAIT_MS = 60_000


def test_ctrl_s_saves_from_a_button_and_plain_keys_stay_in_the_view(lab: Lab):
    cells = [new_code_cell(source) for source in (TRAIN, "run", "run.stop()")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    for cell in (0, 1):
        lab.run_cell(cell)
        lab.wait_idle(timeout=120)
    view = lab.page.get_by_test_id("dtkit-dashboard")
    expect(view).to_have_attribute("data-step", "50", timeout=WAIT_MS)
    lab.page.evaluate("() => { window.dtkitLab.panel().context.model.dirty = true; }")
    button = view.get_by_test_id("panels-menu")
    button.focus()
    for key in ("b", "d", "d"):  # would insert a cell below, and delete one
        lab.page.keyboard.press(key)
    lab.page.keyboard.press("Control+s")
    lab.page.wait_for_function("() => !window.dtkitLab.panel().context.model.dirty", timeout=WAIT_MS)
    expect(button).to_be_focused()
    assert lab.page.evaluate("() => window.dtkitLab.cells().length") == 3
