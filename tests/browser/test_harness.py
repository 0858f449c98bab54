"""The test harness: a real widget and kernel, in JupyterLab in a real browser."""

from __future__ import annotations

import json
import sys

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.support.lab import CellFailedError, Lab, Look

pytestmark = [pytest.mark.browser, pytest.mark.slow]

COUNTER = '''
import sys, anywidget, traitlets

class Counter(anywidget.AnyWidget):
    _esm = """
    export default {
      render({ model, el }) {
        const button = document.createElement("button");
        button.dataset.testid = "add";
        const doubled = document.createElement("output");
        doubled.dataset.testid = "doubled";
        const show = () => { doubled.textContent = model.get("doubled"); };
        button.addEventListener("click", () => {
          model.set("count", model.get("count") + 1);
          model.save_changes();
        });
        model.on("change:doubled", show);
        show();
        el.append(button, doubled);
      },
    };
    """
    count = traitlets.Int(0).tag(sync=True)
    doubled = traitlets.Int(0).tag(sync=True)

    @traitlets.observe("count")
    def _double(self, change):
        self.doubled = 2 * change.new

counter = Counter()
counter
'''


def notebook(*sources: str):
    return new_notebook(
        cells=[new_code_cell(source) for source in sources],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )


@pytest.mark.parametrize("look", [Look("JupyterLab Dark", 1000, 700)], indirect=True)
def test_widget_in_a_notebook_talks_to_its_kernel(lab: Lab, tmp_path):
    lab.open(notebook(COUNTER, "import json; print(json.dumps([counter.count, sys.executable]))"))
    lab.run_cell(0)
    lab.wait_idle()
    button = lab.cell(0).get_by_test_id("add")
    for clicks in (1, 2, 3):
        button.click()
        # The kernel doubles the number, so the page alone can't show it.
        expect(lab.cell(0).get_by_test_id("doubled")).to_have_text(str(2 * clicks))

    lab.run_cell(1)
    lab.wait_idle()
    count, executable = json.loads(lab.text(1))
    assert count == 3
    assert executable == sys.executable

    saved = lab.save()
    assert saved.cells[1].outputs == lab.outputs(1)
    assert "application/vnd.jupyter.widget-view+json" in saved.cells[0].outputs[0].data

    lab.screenshot(tmp_path / "dark.png")
    assert (tmp_path / "dark.png").read_bytes().startswith(b"\x89PNG")
    assert lab.page.evaluate("() => [innerWidth, innerHeight]") == [1000, 700]
    assert lab.page.evaluate("() => document.body.dataset.jpThemeLight") == "false"


def test_failing_cell_and_interrupt_are_reported(lab: Lab):
    wait = "import threading; print('wait' + 'ing'); threading.Event().wait(60)"
    lab.open(notebook("1 / 0", wait))
    lab.run_cell(0)
    with pytest.raises(CellFailedError, match=r"^cell 0: ZeroDivisionError: division by zero$"):
        lab.wait_idle()

    lab.run_cell(1)
    lab.wait_text(1, "waiting")
    lab.interrupt()
    with pytest.raises(CellFailedError, match=r"cell 1: KeyboardInterrupt"):
        lab.wait_idle()
