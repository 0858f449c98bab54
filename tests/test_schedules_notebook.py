"""Notebook 04, executed once as committed: every claim passes, and its tables are checked, run and drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from dtkit.schedules.schedule import Schedule
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

    from nbformat import NotebookNode

pytestmark = [pytest.mark.notebook, pytest.mark.slow]

NOTEBOOK = "notebooks/04_schedules.ipynb"
MEASURED = ("baseline", "single", "gpipe", "my", "solution")


@pytest.fixture(scope="module")
def committed(root: Path) -> NotebookNode:
    return nbformat.read(root / NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def done(root: Path) -> ExecutedNotebook:
    return execute_and_watch(root / NOTEBOOK)


def tables(notebook: NotebookNode) -> dict[str, Schedule]:
    """Return the tables in the notebook, by name."""
    text = "\n".join(cell.source for cell in list_code_cells(notebook))
    matches = re.findall(r'table = """\n(.*?)"""\n(\w+) = dtkit.Schedule\(table', text, re.DOTALL)
    return {name: Schedule(table) for table, name in matches}


# -- as it is committed ---------------------------------------------------------------------------------------


def test_the_puzzle_solution_needs_less_memory_than_the_first_table(committed: NotebookNode):
    schedules = tables(committed)
    baseline = Schedule.from_name("1F1B", 2, 4).simulate()
    first, solution = schedules["my_schedule"].simulate(), schedules["solution"].simulate()
    assert (baseline.makespan, first.makespan, solution.makespan) == (15, 13, 13)
    assert first.peak_activations == 2 * baseline.peak_activations
    assert solution.peak_activations == baseline.peak_activations


def test_the_final_exercise_has_a_solution():
    """The solution's pattern takes 25 units for eight micro-batches, with the memory of 1F1B."""
    first = "F0 F1 " + " ".join(f"B{k} F{k + 2}" for k in range(6)) + " B6 B7"
    second = "F0 I0 F1 I1 " + " ".join(f"W{k} F{k + 2} I{k + 2}" for k in range(6)) + " W6 W7"
    simulation = Schedule([first, second]).simulate()
    assert simulation.makespan == 25
    assert simulation.peak_activations == Schedule.from_name("1F1B", 2, 8).simulate().peak_activations


# -- executed -------------------------------------------------------------------------------------------------


def test_every_claim_holds(done: ExecutedNotebook):
    check_claims(done, least=14)
    assert join_stream(done.notebook, "stderr") == ""


def test_each_schedule_is_drawn_as_planned_and_as_measured(done: ExecutedNotebook):
    for name in MEASURED:
        (output,) = done.outputs(f"{name}_timeline = measure(")
        assert "image/png" in output.data
        assert re.fullmatch(r"Timeline\(.* measured, .* by (the formula|simulation)\)", output.data["text/plain"])
    for source in (
        "small = dtkit.Schedule(",
        "baseline = dtkit.Schedule.from_name(",
        "my_schedule = ",
        "solution = dtkit.Schedule(",
    ):
        assert "image/png" in done.outputs(source)[-1].data
    assert "image/png" in done.outputs("ax.annotate(name")[-1].data


def test_refused_tables_name_the_rank_and_cell(done: ExecutedNotebook):
    text = done.text("errors = {}")
    assert "a deadlock: after 2 of 8 actions no rank can continue. rank 0, cell 1: 0B0 needs 1B0 of rank 1" in text
    assert "rank 1: 1B1 is missing in its 3 cells" in text
    assert "rank 1, cell 0: 1B0 is before 1F0 (cell 1)" in text


def test_the_score_of_my_schedule_is_shown(done: ExecutedNotebook):
    assert re.search(
        r"my schedule against 1F1B: time \d\.\d\d \(\d+ and \d+ ms\), memory 2\.00", done.text("memory of my schedule")
    )


def test_no_process_is_left(done: ExecutedNotebook):
    check_nothing_is_left(done)


def test_memory_of_all_processes_fits_binder(done: ExecutedNotebook):
    check_memory(done)
