"""Notebook 05 as committed: engines are killed, stopped and taken over, and every claim holds.

The test executes it twice: with *Run All Cells*, and with the kernel restarted where the text asks for it.
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
FIRST = "guess_attached = None"
"""Text in the first cell after the restart."""


@pytest.fixture(scope="module", params=[None, FIRST], ids=["run all", "restarted"])
def done(root: Path, request: pytest.FixtureRequest) -> ExecutedNotebook:
    return execute_and_watch(root / NOTEBOOK, restart_before=request.param)


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


def test_a_new_kernel_or_the_same_one_takes_over_the_cluster(done: ExecutedNotebook, request: pytest.FixtureRequest):
    restarted = "[restarted]" in request.node.name
    assert done.text("restarted = ").endswith("a new kernel\n" if restarted else "the kernel was not restarted\n")
    assert ("killed the kernel of" in done.text("if not restarted:")) is not restarted
    assert re.search(r"paused\nstep [\d,]+ of 1,000,000", done.text("dtkit.attach("))


def test_the_notebook_shows_its_pictures(done: ExecutedNotebook):
    cells = [cell for cell in list_code_cells(done.notebook) if cell.source in {"run", "lesson.draw_durations()"}]
    assert len(cells) == 3
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in cells)


def test_the_notebook_leaves_no_process_behind(done: ExecutedNotebook):
    check_nothing_is_left(done, engines=3)


def test_the_notebook_fits_in_the_memory_of_binder(done: ExecutedNotebook):
    check_memory(done)
