"""Runs of a comparison that failed, diverged or were stopped: why they ended, and that none of them is the best."""

import pytest

import dtkit
from dtkit.dashboard.text import comparison_text
from dtkit.types import Evaluation, State
from tests.support.fake_source import FakeSource


@pytest.mark.parametrize("state", [State.FAILED, State.STOPPED])
def test_a_run_that_ended_early_is_never_the_best(state, tmp_path):
    runs = [FakeSource(steps=40, seed=k, name=f"run {k}") for k in range(3)]
    for run, slowness in zip(runs, (2.0, 3.0, 1.0), strict=True):
        run.slowness = {0: slowness}
        run.advance(40, loss=slowness)
        run.history.add(Evaluation(40, 100, {"accuracy": 1 / slowness}))
        run.state = State.COMPLETED
    runs[2].state = state
    comparison = dtkit.compare(*runs)
    table = comparison_text.make_table(comparison.rows)
    assert {table.header[column] for _, column in table.bold_cells} == {
        "final training loss", "best validation accuracy", "samples/s",
    }  # fmt: skip
    assert {row for row, _ in table.bold_cells} == {0}
    comparison.report(tmp_path / "runs.html")
    assert "bold: the best of the runs that did not fail" in (tmp_path / "runs.html").read_text(encoding="utf-8")


def test_a_diverged_run_is_never_the_best():
    good, other, diverged = (FakeSource(steps=40, seed=k, name=f"run {k}") for k in range(3))
    for run in (good, other, diverged):
        run.advance(40)
        run.history.add(Evaluation(40, 100, {"accuracy": 0.5 if run is good else 0.4}))
        run.state = State.COMPLETED
    diverged.history.add(Evaluation(30, 100, {"accuracy": 0.9}))
    diverged.advance(30, loss=1e4)
    table = comparison_text.make_table(dtkit.compare(good, other, diverged).rows)
    column = list(table.header).index("best validation accuracy")
    assert [row for row, k in table.bold_cells if k == column] == [0]
