"""Notebook 05 as committed: engines are killed, stopped and taken over, and every claim holds.

The test executes it as *Run All Cells* does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.notebook import (
    ExecutedNotebook,
    check_claims,
    check_memory,
    check_nothing_is_left,
    execute_and_watch,
    join_stream,
    list_code_cells,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.notebook, pytest.mark.slow]

NOTEBOOK = "notebooks/05_failures.ipynb"


@pytest.fixture(scope="module")
def done(root: Path) -> ExecutedNotebook:
    return execute_and_watch(root / NOTEBOOK)


def test_every_claim_holds(done: ExecutedNotebook):
    check_claims(done, least=15)


def test_the_notebook_shows_who_failed_and_where(done: ExecutedNotebook):
    text = join_stream(done.notebook, "stdout")
    assert re.search(r"repair +node 1 replaced: all go on from step \d+", text)
    assert re.search(r"rank 1 on .*, step 49: ValueError: rank 1 does not like these \d+ rows", text)
    assert "node 1 is stopped (SIGSTOP)" in text
    assert "KeyboardInterrupt: paused at step" in text
    stacks = "".join(
        output.data["text/plain"]
        for cell in list_code_cells(done.notebook)
        if cell.source == "stacks"
        for output in cell.outputs
    )
    assert "rank 0" in stacks
    assert "stopped" in stacks


def test_the_steps_lost_are_counted_and_not_read_from_a_sentence(done: ExecutedNotebook):
    (cell,) = [cell for cell in list_code_cells(done.notebook) if "\nsteps_lost = " in cell.source]
    assert ".text" not in cell.source.partition("\nsteps_lost = ")[2].partition("\n")[0]


def test_the_notebook_takes_over_the_cluster_of_a_killed_kernel(done: ExecutedNotebook):
    assert "killed the kernel of" in done.text("process.kill()")
    assert re.search(r"paused\nstep [\d,]+ of 1,000,000", done.text("dtkit.attach("))


def test_the_notebook_shows_its_pictures(done: ExecutedNotebook):
    cells = [cell for cell in list_code_cells(done.notebook) if cell.source in {"run", "lesson.draw_durations()"}]
    assert len(cells) == 3
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in cells)


def test_the_notebook_leaves_no_process_behind(done: ExecutedNotebook):
    check_nothing_is_left(done, engines=3)


def test_the_notebook_fits_in_the_memory_of_binder(done: ExecutedNotebook):
    check_memory(done)
