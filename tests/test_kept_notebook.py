"""Dashboards without a browser: nbclient executes a notebook, and nbconvert exports it as a page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.fake_run import TRAIN
from tests.support.notebook import execute

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.notebook

COMPARE = "dtkit.compare([run, run.history], labels=['run', 'its history'])"


def test_displays_become_pictures_and_text(tmp_path: Path):
    """Live displays of a run and of a comparison become pictures when the run ends."""
    path = tmp_path / "run.ipynb"
    sources = (TRAIN, "run.dashboard()", COMPARE, "run.resume(); await run", "run.report('run.html')")
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    done = execute(path, timeout=120)
    for cell in done.cells[1:3]:
        place, output = cell.outputs
        assert "dtkit-live" in place.data["text/html"]
        assert {"text/html", "image/png", "text/plain"} <= set(output.data)
        assert "application/vnd.jupyter.widget-view+json" not in output.data
    assert "completed" in done.cells[1].outputs[-1].data["text/plain"]
    assert "its history" in done.cells[2].outputs[-1].data["text/plain"]
    page, _ = HTMLExporter().from_notebook_node(done)
    assert page.count('alt="the charts of the run"') == 1  # on the first of them
    assert len(re.findall(r"<img[^>]*data:image/png;base64,", page)) >= 4  # the run's, and two of the comparison
    report = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "<h2>Nodes</h2>" in report
