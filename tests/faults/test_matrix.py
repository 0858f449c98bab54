"""A sample of the fault matrix on a real cluster; ``make faults`` plays all of it.

The seed draws ranks, steps and places: DTKIT_SEED gives another one, and each failure names it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.faults.__main__ import line
from tests.faults.cells import BESIDES, CELLS, PLACES, SAMPLE
from tests.faults.runner import Ground, play
from tests.faults.training import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator

from tests.faults.cells import Cell

SEED = int(os.environ.get("DTKIT_SEED", "0"))
SAMPLE_S = 360.0
"""What the sample may take. It took 250 s on two cores that 13 processes wanted to have."""


@pytest.fixture(scope="module")
def took() -> dict[str, float]:
    """Seconds of each cell that was played."""
    return {}


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with Ground() as made:
        yield made


@pytest.mark.cluster
@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.name)
def test_cell(ground: Ground, took: dict[str, float], cell: Cell):
    outcome = play(cell, ground, SEED)
    took[cell.name] = outcome.took_s
    assert not outcome.problems, f"seed {SEED}\n{line(outcome)}"


@pytest.mark.cluster
def test_the_sample_takes_less_than_six_minutes(took: dict[str, float]):
    if len(took) < len(SAMPLE):
        pytest.skip(f"{len(took)} of its {len(SAMPLE)} cells were played")
    print(f"the sample took {sum(took.values()):.0f} s")
    assert sum(took.values()) <= SAMPLE_S


def test_the_sample_has_each_strategy_outcome_and_place():
    assert {cell.strategy for cell in SAMPLE} == set(STRATEGIES)
    assert {cell.outcome for cell in SAMPLE} == {cell.outcome for cell in CELLS}
    assert {cell.place for cell in SAMPLE} >= {"forward", "backward", "data", "optimiser", "checkpoint", "forming"}
    assert {cell.fault for cell in CELLS} == {*PLACES, *BESIDES}
    assert set(SAMPLE) <= set(CELLS)
