"""The helper that executes notebooks for tests."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.notebook import execute

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.notebook


def write(path: Path, *sources: str) -> Path:
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    return path


def test_cells_run_in_this_python_and_the_file_stays_unchanged(tmp_path: Path):
    widget = "import ipywidgets; slider = ipywidgets.IntSlider(); slider"
    path = write(tmp_path / "fine.ipynb", "import os, sys; print(sys.executable, os.getcwd())", widget)
    before = path.read_bytes()
    done = execute(path, timeout=30)
    assert done.cells[0].outputs[0].text.split() == [sys.executable, str(tmp_path)]
    assert "widgets" not in done.metadata
    assert path.read_bytes() == before


def test_a_failing_cell_raises_with_its_source(tmp_path: Path):
    path = write(tmp_path / "fails.ipynb", "x = 1", "wrong = x / 0")
    with pytest.raises(CellExecutionError, match=r"(?s)wrong = x / 0.*ZeroDivisionError"):
        execute(path, timeout=30)


def test_a_cell_that_does_not_end_times_out(tmp_path: Path):
    path = write(tmp_path / "hangs.ipynb", "import threading; threading.Event().wait(60)")
    with pytest.raises(CellTimeoutError):
        execute(path, timeout=1)
