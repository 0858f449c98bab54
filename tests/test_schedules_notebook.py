"""Notebook 04 as it is committed, executed once: every claim in it holds, its tables are checked, run and drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from dtkit.schedules.schedule import Schedule
from tests.notebook import Done, check_claims, check_memory, check_nothing_is_left, code_of, printed, watched

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode

pytestmark = pytest.mark.notebook

NOTEBOOK = "notebooks/04_schedules.ipynb"
PLAYED = ("usual", "single", "gpipe", "my", "solution")


@pytest.fixture(scope="module")
def committed(root: Path) -> NotebookNode:
    return nbformat.read(root / NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def done(root: Path) -> Done:
    return watched(root / NOTEBOOK)


def tables(notebook: NotebookNode) -> dict[str, Schedule]:
    """The tables that are written in it, by name."""
    text = "\n".join(cell.source for cell in code_of(notebook))
    found = re.findall(r'table = """\n(.*?)"""\n(\w+) = dtkit.Schedule\(table', text, re.DOTALL)
    return {name: Schedule(table) for table, name in found}


# -- as it is committed ---------------------------------------------------------------------------------------


def test_the_puzzle_can_be_solved_and_what_stands_there_does_not_give_it_away(committed: NotebookNode):
    found = tables(committed)
    usual = Schedule.from_name("1F1B", 2, 4).simulate()
    mine, solution = found["mine"].simulate(), found["solution"].simulate()
    assert (usual.makespan, mine.makespan, solution.makespan) == (15, 13, 13)
    assert mine.peak_activations == 2 * usual.peak_activations
    assert solution.peak_activations == usual.peak_activations


def test_what_to_do_next_can_be_done():
    """25 units for eight micro-batches, with the memory of 1F1B: the solution's pattern goes on."""
    first = "F0 F1 " + " ".join(f"B{k} F{k + 2}" for k in range(6)) + " B6 B7"
    second = "F0 I0 F1 I1 " + " ".join(f"W{k} F{k + 2} I{k + 2}" for k in range(6)) + " W6 W7"
    played = Schedule([first, second]).simulate()
    assert played.makespan == 25
    assert played.peak_activations == Schedule.from_name("1F1B", 2, 8).simulate().peak_activations


# -- executed -------------------------------------------------------------------------------------------------


def test_every_claim_passes_and_every_prediction_is_right(done: Done):
    check_claims(done, least=14)
    assert printed(done.notebook, "stderr") == ""


def test_each_schedule_is_drawn_as_planned_and_as_measured(done: Done):
    for name in PLAYED:
        (shown,) = done.outputs(f"{name}_timeline = play(")
        assert "image/png" in shown.data
        assert re.fullmatch(r"Timeline\(.* measured, .* by (the formula|simulation)\)", shown.data["text/plain"])
    for source in ("small = dtkit.Schedule(", "usual = dtkit.Schedule.named(", "mine = ", "solution = dtkit.Schedule("):
        assert "image/png" in done.outputs(source)[-1].data
    assert "image/png" in done.outputs("ax.annotate(name")[-1].data


def test_what_can_t_be_run_says_where_and_what_to_do(done: Done):
    text = done.text("refused = {}")
    assert "a deadlock, after 2 of 8 actions no rank can go on. rank 0, cell 1: 0B0 needs 1B0 of rank 1" in text
    assert "rank 1: 1B1 is missing in its 3 cells" in text
    assert "rank 1, cell 0: 1B0 stands before 1F0 (cell 1)" in text


def test_the_score_is_told(done: Done):
    assert re.search(r"mine against 1F1B: time \d\.\d\d \(\d+ and \d+ ms\), memory 2\.00", done.text("my memory"))


def test_no_process_is_left(done: Done):
    check_nothing_is_left(done)


def test_all_processes_together_stay_under_what_binder_gives(done: Done):
    check_memory(done)
