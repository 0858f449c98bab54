"""How many steps go into a dispatch, from times that the test makes up."""

from __future__ import annotations

import pytest

from dtkit._util import timeouts
from dtkit.training.dispatch import MAX_GROWTH, DispatchSizer


def settled(step_s: float, send_s: float = 0.0) -> DispatchSizer:
    """A pace that has seen enough dispatches of such steps."""
    pace = DispatchSizer()
    for _ in range(20):
        pace.on_sent(send_s)
        pace.on_result(pace.next_steps, step_s)
    return pace


def test_it_begins_with_one_step():
    assert DispatchSizer().next_steps == 1


@pytest.mark.parametrize("step_s", [1e-5, 1e-4, 1e-3, 0.02, 0.1])
def test_a_dispatch_comes_to_last_its_time(step_s):
    assert settled(step_s).next_steps * step_s == pytest.approx(timeouts.TARGET_DISPATCH_S, rel=0.11)


@pytest.mark.parametrize("step_s", [0.5, 2.0, 60.0])
def test_slow_steps_go_one_by_one(step_s):
    assert settled(step_s).next_steps == 1


def test_it_grows_at_most_fourfold_at_a_time():
    pace, seen = DispatchSizer(), []
    for _ in range(6):
        seen.append(pace.next_steps)
        pace.on_result(pace.next_steps, 1e-6)
    assert seen == [MAX_GROWTH**k for k in range(6)]


def test_it_shrinks_at_once():
    pace = settled(0.001)
    pace.on_result(500, 0.1)
    assert pace.next_steps == round(timeouts.TARGET_DISPATCH_S / 0.1)
    pace.on_result(8, 10.0)
    assert pace.next_steps == 1


def test_dispatches_are_longer_where_sending_is_dear():
    """Sending takes at most a twentieth of a dispatch."""
    assert settled(0.01, send_s=0.1).next_steps * 0.01 == pytest.approx(2.0, rel=0.02)


def test_one_slow_sending_does_not_count_for_much():
    pace = settled(0.01, send_s=0.001)
    pace.on_sent(0.2)
    pace.on_result(pace.next_steps, 0.01)
    assert pace.next_steps * 0.01 <= timeouts.TARGET_DISPATCH_S


def test_two_are_in_flight_unless_steps_are_slow():
    assert DispatchSizer().max_in_flight == 2
    assert settled(0.4).max_in_flight == 2
    assert settled(0.6).max_in_flight == 1


def test_a_dispatch_that_did_nothing_says_nothing():
    pace = settled(0.01)
    before = pace.next_steps, pace.step_s
    pace.on_result(0, 99.0)
    assert (pace.next_steps, pace.step_s) == before


def test_a_time_of_zero_divides_by_nothing():
    pace = DispatchSizer()
    pace.on_result(1, 0.0)
    assert pace.next_steps == MAX_GROWTH
