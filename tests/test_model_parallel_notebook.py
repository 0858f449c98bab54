"""Notebook 03, executed once as committed: every claim passes, and its pictures are there."""

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

NOTEBOOK = "notebooks/03_model_parallel.ipynb"
PICTURE = "data:image/png;base64,iVBOR"


@pytest.fixture(scope="module")
def done(root: Path) -> ExecutedNotebook:
    return execute_and_watch(root / NOTEBOOK)


def test_every_claim_holds(done: ExecutedNotebook):
    check_claims(done, least=20)


def test_stderr_is_empty(done: ExecutedNotebook):
    assert join_stream(done.notebook, "stderr") == ""


def test_a_model_that_does_not_fit_is_planned_and_refused(done: ExecutedNotebook):
    shown = done.outputs("plan = cluster.plan(")[-1].data
    assert "3 of 4 strategies fit" in shown["text/plain"]
    assert PICTURE in shown["text/html"]
    refusal = " ".join(done.text("except ValueError as error").split())
    assert re.search(
        r"does not fit rank \d with DataParallel\(\): it needs 169 MB .* These would fit: Sharded", refusal
    )


def test_each_strategy_is_explained(done: ExecutedNotebook):
    for source, text in (
        ("strategy=pipeline, start=False", "What arrived is what was sent, bit by bit: all 16 tensors."),
        ("strategy=tensor_parallel, start=False", "All nodes made the same collectives"),
        ("strategy=sharded, start=False", "All nodes made the same collectives"),
    ):
        page = done.outputs(source)[-1].data["text/html"]
        assert text in page
        assert PICTURE in page


def test_memory_is_shown_next_to_the_plan(done: ExecutedNotebook):
    for name in ("pipeline", "tensor", "sharded"):
        (shown,) = [
            output.data
            for cell in list_code_cells(done.notebook)
            if cell.source.endswith(f'\nmemory["{name}"]') or cell.source == f'memory["{name}"]'
            for output in cell.outputs[-1:]
        ]
        assert shown["text/plain"].count("planned ") == 2
        assert PICTURE in shown["text/html"]


def test_both_timelines_are_drawn(done: ExecutedNotebook):
    for source in ('measure(8, "GPipe")', 'measure(8, "1F1B")'):
        shown = done.outputs(source)[-1].data
        assert "image/png" in shown
        assert "11.1 % by the formula" in shown["text/plain"]


def test_the_three_strategies_are_compared(done: ExecutedNotebook):
    for source in ("peak memory   sent per step", "planned_ms = "):
        lines = done.text(source).splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["pipeline", "tensor", "sharded"]


def test_drawings_are_shown(done: ExecutedNotebook):
    for source in ("draw_pipeline(", "draw_tensor_parallel(", "draw_fsdp("):
        assert 'role="img"' in done.outputs(source)[-1].data["text/html"]


def test_no_process_is_left(done: ExecutedNotebook):
    check_nothing_is_left(done)


def test_memory_of_all_processes_fits_binder(done: ExecutedNotebook):
    check_memory(done)
