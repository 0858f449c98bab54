"""The times of a rank between its steps."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from dtkit.engine.observe.boundary_timer import BoundaryTimer
from dtkit.history.between_steps import ALL, read_time_between, sum_time_since
from dtkit.history.history import History
from dtkit.history.scalars import BETWEEN_PREFIX, ScalarRecord
from dtkit.history.undone_steps import UndoneSteps
from dtkit.training.boundary_times import BoundaryTimeRecorder
from dtkit.types import Event
from tests.support.phase_rows import make_phase_rows


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_timer_returns_what_was_done_between_two_dispatches():
    clock = Clock()
    timer = BoundaryTimer(clock)
    for _ in range(2):
        with timer.measure("validation"):
            clock.now += 3
        clock.now += 1
        with timer.leave_out_steps():
            clock.now += 50
        first = timer.take(has_steps=True)
    assert first == pytest.approx({"validation": 3, ALL: 4})


def test_a_failed_dispatch_and_one_without_steps_take_nothing_away():
    clock = Clock()
    timer = BoundaryTimer(clock)
    with timer.leave_out_steps():
        clock.now += 50
    clock.now += 1
    with contextlib.suppress(ZeroDivisionError), timer.leave_out_steps():
        clock.now += 50
        clock.now /= 0
    clock.now += 2
    with timer.leave_out_steps():
        pass
    assert timer.take(has_steps=False) == {}
    with timer.leave_out_steps():
        clock.now += 50
    assert timer.take(has_steps=True) == pytest.approx({ALL: 3})


def record(elapsed_s: float, *parts: dict[str, float], callbacks_s: float = 0.0) -> dict[str, float]:
    """Return what is recorded of ranks that measured this, while the run was not paused for `elapsed_s`."""
    history = History()
    history.append(make_phase_rows([{"forward": 20.0}] * len(parts), 4))
    position = (1, 0.0)
    history.read_position = lambda: position
    recorder = BoundaryTimeRecorder(history)
    recorder.record(0, [])
    recorder.add_callbacks(callbacks_s)
    position = (4, elapsed_s)
    results: list[Any] = [SimpleNamespace(between=part) for part in parts]
    recorder.record(2, results)
    return {kind: seconds for kind, seconds in read_time_between(history).seconds.items() if seconds}


def test_the_means_of_all_ranks_are_recorded_and_the_rest_is_waiting():
    parts = {"checkpoints": 1, ALL: 2}, {"checkpoints": 2, ALL: 3}
    assert record(9, *parts) == pytest.approx({"checkpoints": 1.5, "waiting": 1.0})


def test_waiting_next_to_a_validation_is_for_its_calls():
    assert record(9, {"validation": 1, ALL: 2}, callbacks_s=0.25) == pytest.approx(
        {"validation": 1.75, "callbacks": 0.25}
    )


def test_the_time_of_callbacks_is_taken_from_the_waits():
    assert record(9, {ALL: 2}, callbacks_s=1.5) == pytest.approx({"callbacks": 1.5, "waiting": 0.5})
    assert record(9, {ALL: 2}, callbacks_s=5.0) == pytest.approx({"callbacks": 2.0})


def test_a_pause_is_no_waiting():
    assert record(0.5, {ALL: 20}) == pytest.approx({"waiting": 0.5})


def test_ranks_without_times_record_nothing():
    assert record(9, {ALL: 2}, {}) == {}


def test_the_time_without_a_notebook_is_no_validation():
    """After a restart of the kernel, the engines have waited for the new notebook, maybe next to a validation."""
    history, elapsed_s = History(), 84.0
    history.append(make_phase_rows([{"forward": 20.0}], 4))
    history.read_position = lambda: (4, elapsed_s)
    recorder = BoundaryTimeRecorder(history)  # that of the new notebook
    recorder.record(2, [SimpleNamespace(between={ALL: 50.0, "validation": 0.1})])  # type: ignore[list-item]
    assert read_time_between(history).total_s == 0
    elapsed_s = 85.0
    recorder.record(4, [SimpleNamespace(between={ALL: 0.2, "validation": 0.1})])  # type: ignore[list-item]
    history.add(Event(4, "done", "done", 1.0, None))
    assert read_time_between(history).seconds["validation"] == pytest.approx(0.2)


def test_the_elapsed_time_of_another_notebook_is_no_time_between_steps():
    """The new notebook reads unread dispatches first, while its own elapsed time is still 0."""
    history, elapsed_s = History(), 0.0
    history.append(make_phase_rows([{"forward": 20.0}], 4))
    history.read_position = lambda: (4, elapsed_s)
    recorder = BoundaryTimeRecorder(history)
    recorder.record(1, [SimpleNamespace(between={})])  # type: ignore[list-item]
    elapsed_s = 84.0
    recorder.begin_anew()
    elapsed_s = 84.1
    recorder.record(2, [SimpleNamespace(between={ALL: 50.0})])  # type: ignore[list-item]
    assert read_time_between(history).total_s == 0


def test_the_time_since_some_steps_includes_that_between_steps():
    history = History()
    history.append(make_phase_rows([{"forward": 20.0}], 6))
    step_s = history.totals()["step_s"]
    for step, seconds in ((2, 3.0), (4, 0.5)):
        history.add(ScalarRecord(0, {BETWEEN_PREFIX + "validation": [(step, seconds, 1.0)]}))
    first = int(history.totals()["step"][0])
    assert sum_time_since(history, 4 - first) == pytest.approx(step_s[4 - first :].sum() + 0.5)
    assert sum_time_since(history, 0) == pytest.approx(step_s.sum() + 3.5)
    assert sum_time_since(history, 6) == 0


def test_the_validation_after_the_last_step_counts_once_also_if_the_run_is_extended():
    history, elapsed_s = History(), 0.5
    history.append(make_phase_rows([{"forward": 20.0}], 4))
    history.read_position = lambda: (4, elapsed_s)
    recorder = BoundaryTimeRecorder(history)
    recorder.record(0, [])
    elapsed_s = 3.0
    recorder.record(2, [SimpleNamespace(between={ALL: 2.0})])  # type: ignore[list-item]
    elapsed_s = 4.5
    recorder.record_last_validation(4)
    assert read_time_between(history).seconds["validation"] == pytest.approx(1.5)
    elapsed_s = 10.0
    recorder.record(4, [SimpleNamespace(between={ALL: 2.5, "validation": 1.4})])  # type: ignore[list-item]
    history.add(Event(4, "done", "done", 1.0, None))
    seconds = read_time_between(history).seconds
    assert (seconds["validation"], seconds["waiting"]) == (pytest.approx(1.5), pytest.approx(2.0 + 1.0))


def test_a_look_at_a_long_run_adds_what_is_new_and_forgets_what_was_undone(monkeypatch):
    history, num_steps_read = History(), []
    read_scalar = History.scalar

    def read(self: History, name: str, *, since: int = 0) -> Any:
        steps, seconds = read_scalar(self, name, since=since)
        num_steps_read.append(len(steps))
        return steps, seconds

    monkeypatch.setattr(History, "scalar", read)
    rows = make_phase_rows([{"forward": 20.0}], 1)
    for step in range(1_000):
        rows["step"] = step
        history.append(rows)
        history.add(ScalarRecord(0, {"between steps/validation": [(step, float(step), 1.0)]}))
        assert read_time_between(history).seconds["validation"] == sum(range(step + 1))
    assert max(num_steps_read) <= 250
    history.add(UndoneSteps(700))
    assert read_time_between(history).seconds["validation"] == sum(range(700))
