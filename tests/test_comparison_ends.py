"""Runs of a comparison that failed or diverged: why they ended, and that none of them is the best."""

import pytest

import dtkit
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.text import comparison_text
from dtkit.errors import EngineError, NonFiniteError, PausedError
from dtkit.history.divergence import find_divergence
from dtkit.types import Evaluation, Event, Failure, State
from tests.support.fake_source import FakeSource


@pytest.mark.parametrize("state", [State.FAILED])
def test_a_run_that_an_error_ended_is_never_the_best(state, tmp_path):
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


def test_a_stopped_run_may_be_the_best():
    """`EarlyStopping` stops a run that was good."""
    runs = [FakeSource(steps=40, seed=k, name=f"run {k}") for k in range(2)]
    for run, loss, state in zip(runs, (2.0, 1.0), (State.COMPLETED, State.STOPPED), strict=True):
        run.advance(40, loss=loss)
        run.state = state
    table = comparison_text.make_table(dtkit.compare(*runs).rows)
    column = list(table.header).index("final training loss")
    assert [row for row, k in table.bold_cells if k == column] == [1]


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


def make_failed_pair():
    """Return a completed run, and one whose user's code raised an error in step 4."""
    good, crashed = (FakeSource(steps=40, name=name) for name in ("good", "crash"))
    good.advance(40)
    good.state = State.COMPLETED
    crashed.advance(4)
    failure = Failure(1, "host", "ValueError", "boom <in> loss\nand more of it", "Traceback", step=4)
    crashed.exception, crashed.state = EngineError([failure]), State.FAILED
    return good, crashed


def test_every_view_of_a_comparison_names_the_cause_of_a_failure(tmp_path):
    comparison = dtkit.compare(*make_failed_pair())
    line, escaped = "crash failed: ValueError: boom <in> loss, step 4", "ValueError: boom &lt;in&gt; loss, step 4"
    assert line in repr(comparison).splitlines()
    assert escaped in comparison._repr_html_()
    assert ComparisonMessageBuilder(comparison).build_snapshot().content["head"]["ends"] == [f"2: {line}"]
    comparison.report(tmp_path / "runs.html")
    assert escaped in (tmp_path / "runs.html").read_text(encoding="utf-8")
    assert [row.cause for row in comparison.rows] == ["", "ValueError: boom <in> loss, step 4"]


def test_a_cause_is_one_line_of_limited_length():
    good, crashed = make_failed_pair()
    crashed.exception = PausedError(f"{'long ' * 200}\nsecond line")
    cause = dtkit.compare(good, crashed).rows[1].cause
    assert cause.startswith("PausedError: long long")
    assert len(cause) <= 600
    assert "second" not in cause


def test_a_history_has_the_cause_that_ended_its_run():
    good, crashed = make_failed_pair()
    crashed.history.add(Event(4, "error", "node 1: ValueError: boom\nin a line", 0.0))
    row = dtkit.compare(good, crashed.history).rows[1]
    assert row.cause.startswith("node 1: ValueError: boom")
    assert not row.competes


@pytest.mark.parametrize("state", [State.STOPPED, State.PAUSED])
def test_a_run_that_ends_at_a_loss_that_is_not_finite_has_one_word_for_it(state: State):
    """Its loss may have grown for too few steps to be seen in the history."""
    source = FakeSource(ranks=2)
    source.advance(4)
    source.exception = NonFiniteError([Failure(0, "host", "NonFiniteError", "gradients are not finite", "", step=4)])
    source.end(state)
    row = dtkit.compare([source]).rows[0]
    assert row.state == f"{state.value}, not finite"
    assert not row.competes


def test_an_infinite_loss_has_the_step_and_remedy_of_its_verdict():
    """The line named step 362, where gradients were not finite, and the verdict step 175."""
    source = FakeSource(ranks=2, steps=400)
    source.advance(30)
    source.advance(20, loss=float("inf"))
    source.exception = NonFiniteError([Failure(0, "host", "NonFinite", "gradients are not finite", "", step=50)])
    source.end(State.STOPPED)
    row = dtkit.compare([source]).rows[0]
    assert row.cause == find_divergence(source.history).advice
    assert row.cause.startswith("the loss is inf since step 31: train again with a lower learning rate")


def test_runs_that_diverge_or_learn_nothing_have_a_remedy():
    grew, flat, lost = (FakeSource(ranks=2, steps=400, name=name) for name in ("grew", "flat", "lost"))
    grew.advance(40)
    grew.advance(60, loss=1e4)
    flat.advance(10, loss=2.3)
    flat.advance(10, loss=50.0)
    flat.advance(80, loss=2.4)
    lost.advance(4)
    message = "gradients are not finite\nAll ranks paused.\n- repair the data\n- run.set(lr=...) sets a rate"
    lost.exception = NonFiniteError([Failure(0, "host", "NonFinite", message, "", step=4, kind="nonfinite")])
    causes = [row.cause for row in dtkit.compare(grew, flat, lost).rows]
    assert causes[0].endswith(": lower the learning rate (0.1 now), or set the strategy's clip_grad_norm=")
    assert causes[1].endswith(": train again with a lower learning rate than 0.1, such as 0.01")
    assert causes[2].endswith("gradients are not finite: repair the data")
