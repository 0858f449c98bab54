"""The time that a run has left, as views show it: it follows the speed without jumping with each dispatch."""

from __future__ import annotations

import numpy as np
import pytest

from dtkit.history.history import ROW_DTYPE, History
from dtkit.training.progress import StepTimeEstimate


def append_steps(history: History, count: int, step_s: float) -> None:
    rows = np.zeros(count, ROW_DTYPE)
    rows["step"], rows["step_s"] = len(history) + np.arange(count), step_s
    rows["samples"] = rows["weight"] = 1
    history.append(rows)


def estimate_at(estimate: StepTimeEstimate, now: float, elapsed_s: float) -> float:
    step_s = estimate.estimate(now, elapsed_s)
    assert step_s is not None
    return step_s


def test_the_time_left_does_not_jump_while_step_times_vary():
    """On a busy machine it was 6:16, 4:19 and 6:47 within 15 s."""
    history = History()
    estimate, found = StepTimeEstimate(history), []
    for second in range(1, 61):
        append_steps(history, 50, 0.008 if second % 6 < 3 else 0.016)
        found.append(estimate_at(estimate, 1000.0 + second, float(second)))
    assert max(found[30:]) / min(found[30:]) < 1.5


@pytest.mark.parametrize("step_s", [0.002, 0.1])
def test_the_time_left_follows_a_new_speed(step_s: float):
    history = History()
    estimate = StepTimeEstimate(history)
    append_steps(history, 50, 0.01)
    assert estimate.estimate(1000.0, 60.0) == pytest.approx(0.01)
    for second in range(1, 61):
        append_steps(history, 50, step_s)
        estimate.estimate(1000.0 + second, 60.0 + second)
    assert estimate_at(estimate, 1061.0, 121.0) == pytest.approx(step_s, rel=0.05)


def test_the_first_steps_count_little_once_others_are_known():
    history = History()
    estimate = StepTimeEstimate(history)
    assert estimate.estimate(1000.0, 0.0) is None
    append_steps(history, 1, 2.0)
    assert estimate.estimate(1002.0, 2.0) == pytest.approx(2.0)
    append_steps(history, 100, 0.01)
    estimate.estimate(1003.0, 3.0)
    append_steps(history, 300, 0.01)
    assert estimate_at(estimate, 1006.0, 6.0) < 0.2
