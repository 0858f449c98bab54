"""A sample of the fault matrix on a real cluster. ``make test`` runs DAILY, ``make faults`` the whole matrix.

A seed selects ranks, steps and places. DTKIT_SEED sets it, and each failure names it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.faults.__main__ import format_row
from tests.faults.cells import CELLS, DAILY, OTHER_FAULTS, PLACES, SAMPLE
from tests.faults.runner import Ground, run_cell
from tests.faults.training import STRATEGIES
from tests.support.marks import slow

if TYPE_CHECKING:
    from collections.abc import Iterator

from tests.faults.cells import Cell

SEED = int(os.environ.get("DTKIT_SEED", "0"))


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with Ground() as ground:
        yield ground


@pytest.mark.cluster
@pytest.mark.parametrize("cell", [cell if cell in DAILY else slow(cell) for cell in SAMPLE], ids=lambda cell: cell.name)
def test_fault_has_the_expected_outcome(ground: Ground, cell: Cell):
    outcome = run_cell(cell, ground, SEED)
    assert not outcome.problems, f"seed {SEED}\n{format_row(outcome)}"


def test_the_sample_has_each_strategy_outcome_and_place():
    assert {cell.strategy for cell in SAMPLE} == set(STRATEGIES)
    assert {cell.outcome for cell in SAMPLE} == {cell.outcome for cell in CELLS}
    assert {cell.place for cell in SAMPLE} >= {"forward", "backward", "data", "optimizer", "checkpoint", "forming"}
    assert {cell.fault for cell in CELLS} == {*PLACES, *OTHER_FAULTS}
    assert set(DAILY) < set(SAMPLE) < set(CELLS)
