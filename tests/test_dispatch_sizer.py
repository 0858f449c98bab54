"""Number of steps per dispatch, from made-up durations."""

from __future__ import annotations

import math

import pytest

from dtkit._util import timeouts
from dtkit.training.dispatch import MAX_GROWTH, DispatchSizer


def settled(step_s: float, send_s: float = 0.0) -> DispatchSizer:
    """A sizer after enough dispatches with steps of this duration."""
    pace = DispatchSizer()
    for _ in range(20):
        pace.on_sent(send_s)
        pace.on_result(pace.next_steps, step_s)
    return pace


def test_first_dispatch_has_one_step():
    assert DispatchSizer().next_steps == 1


@pytest.mark.parametrize("step_s", [1e-5, 1e-4, 1e-3, 0.02, 0.1])
def test_dispatch_size_settles_at_the_target_duration(step_s):
    assert settled(step_s).next_steps * step_s == pytest.approx(timeouts.TARGET_DISPATCH_S, rel=0.11)


@pytest.mark.parametrize("step_s", [0.5, 2.0, 60.0])
def test_slow_steps_are_sent_one_at_a_time(step_s):
    assert settled(step_s).next_steps == 1


def test_dispatch_size_grows_at_most_fourfold_at_a_time():
    pace, seen = DispatchSizer(), []
    for _ in range(6):
        seen.append(pace.next_steps)
        pace.on_result(pace.next_steps, 1e-6)
    assert seen == [MAX_GROWTH**k for k in range(6)]


def test_dispatch_size_shrinks_at_once():
    pace = settled(0.001)
    pace.on_result(500, 0.1)
    assert pace.next_steps == round(timeouts.TARGET_DISPATCH_S / 0.1)
    pace.on_result(8, 10.0)
    assert pace.next_steps == 1


def test_dispatches_are_longer_if_sending_is_slow():
    """Sending takes at most a twentieth of a dispatch."""
    assert settled(0.01, send_s=0.1).next_steps * 0.01 == pytest.approx(2.0, rel=0.02)


def test_one_slow_send_does_not_make_dispatches_longer():
    pace = settled(0.01, send_s=0.001)
    pace.on_sent(0.2)
    pace.on_result(pace.next_steps, 0.01)
    assert pace.next_steps * 0.01 <= timeouts.TARGET_DISPATCH_S


def test_two_dispatches_are_in_flight_unless_steps_are_slow():
    assert DispatchSizer().max_in_flight == 2
    assert settled(0.4).max_in_flight == 2
    assert settled(0.6).max_in_flight == 1


def test_dispatch_without_steps_does_not_change_the_size():
    pace = settled(0.01)
    before = pace.next_steps, pace.step_s
    pace.on_result(0, 99.0)
    assert (pace.next_steps, pace.step_s) == before


def test_step_time_of_zero_does_not_divide_by_zero():
    pace = DispatchSizer()
    pace.on_result(1, 0.0)
    assert pace.next_steps == MAX_GROWTH


def test_an_evaluation_counts_as_the_steps_that_take_as_long():
    pace = settled(0.01)
    assert pace.steps_per_evaluation == math.inf  # unknown
    pace.on_evaluation(0.05)
    assert pace.steps_per_evaluation == pytest.approx(5)
    pace.on_evaluation(0.5)  # one slow evaluation says little
    assert pace.steps_per_evaluation == pytest.approx(14)


def test_no_evaluation_has_a_length_in_steps_before_the_first_step():
    pace = DispatchSizer()
    pace.on_evaluation(0.05)
    assert pace.steps_per_evaluation == math.inf
