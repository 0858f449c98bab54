"""All notebooks as committed: no outputs, working links, short cells, empty guesses before results."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.support.notebook import check_as_committed, check_cell_lengths, check_guesses, check_links

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode

NOTEBOOKS = {  # name -> (least number of links, of guesses)
    "01_quickstart": (5, 3),
    "02_data_parallel": (8, 15),
    "03_model_parallel": (7, 15),
    "04_schedules": (8, 13),
    "05_failures": (8, 9),
    "06_beyond_pytorch": (6, 4),
    "07_many_hosts": (7, 6),
}


@pytest.fixture(params=NOTEBOOKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def committed(root: Path, name: str) -> NotebookNode:
    return nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)


def test_all_notebooks_are_listed(root: Path):
    assert {path.stem for path in (root / "notebooks").glob("*.ipynb")} == set(NOTEBOOKS)


def test_a_notebook_is_committed_without_outputs(committed: NotebookNode):
    check_as_committed(committed)


def test_a_notebook_begins_with_a_picture_of_a_result(committed: NotebookNode):
    """GitHub shows no other result. The site has all outputs, and leaves this cell out."""
    first = committed.cells[1]
    assert re.match(r"!\[[^\]]{20,}\]\(images/[\w-]+\.png\)\n", first.source)
    assert first.metadata.tags == ["remove-cell"]


def test_links_of_a_notebook_work(committed: NotebookNode, root: Path, name: str):
    check_links(committed, root / "notebooks", NOTEBOOKS[name][0])


def test_cells_of_a_notebook_are_short(committed: NotebookNode):
    check_cell_lengths(committed)


def test_guesses_are_empty_and_come_before_their_use(committed: NotebookNode, name: str):
    check_guesses(committed, NOTEBOOKS[name][1])


def test_the_solution_of_the_puzzle_is_folded(root: Path):
    notebook = nbformat.read(root / "notebooks" / "04_schedules.ipynb", as_version=4)
    folded = [cell for cell in notebook.cells if cell.metadata.get("jupyter", {}).get("source_hidden")]
    assert [cell.metadata.jupyter.outputs_hidden for cell in folded] == [True, True]
    assert all("solution" in cell.source for cell in folded)
