"""All notebooks as they are committed: without outputs, with links that lead somewhere, predictions before results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.notebook import check_as_committed, check_links, check_predictions

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode

NOTEBOOKS = {  # name -> (links at least, numbers that the reader types)
    "01_quickstart": (0, 0),
    "02_data_parallel": (8, 15),
    "03_model_parallel": (7, 15),
    "04_schedules": (8, 13),
    "05_failures": (8, 9),
}


@pytest.fixture(params=NOTEBOOKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def committed(root: Path, name: str) -> NotebookNode:
    return nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)


def test_these_are_all(root: Path):
    assert {path.stem for path in (root / "notebooks").glob("*.ipynb")} == set(NOTEBOOKS)


def test_it_is_committed_without_outputs(committed: NotebookNode):
    check_as_committed(committed)


def test_its_links_lead_somewhere(committed: NotebookNode, root: Path, name: str):
    check_links(committed, root / "notebooks", NOTEBOOKS[name][0])


def test_every_prediction_is_typed_before_anything_is_measured(committed: NotebookNode, name: str):
    check_predictions(committed, NOTEBOOKS[name][1])
