"""How many steps go into a dispatch, from times that the test makes up."""

from __future__ import annotations

import pytest

from dtkit.training.dispatch import DISPATCH_S, GROWTH, Pace


def settled(step_s: float, send_s: float = 0.0) -> Pace:
    """A pace that has seen enough dispatches of such steps."""
    pace = Pace()
    for _ in range(20):
        pace.sent(send_s)
        pace.landed(pace.steps, step_s)
    return pace


def test_it_begins_with_one_step():
    assert Pace().steps == 1


@pytest.mark.parametrize("step_s", [1e-5, 1e-4, 1e-3, 0.02, 0.1])
def test_a_dispatch_comes_to_last_its_time(step_s):
    assert settled(step_s).steps * step_s == pytest.approx(DISPATCH_S, rel=0.11)


@pytest.mark.parametrize("step_s", [0.5, 2.0, 60.0])
def test_slow_steps_go_one_by_one(step_s):
    assert settled(step_s).steps == 1


def test_it_grows_at_most_fourfold_at_a_time():
    pace, seen = Pace(), []
    for _ in range(6):
        seen.append(pace.steps)
        pace.landed(pace.steps, 1e-6)
    assert seen == [GROWTH**k for k in range(6)]


def test_it_shrinks_at_once():
    pace = settled(0.001)
    pace.landed(500, 0.1)
    assert pace.steps == round(DISPATCH_S / 0.1)
    pace.landed(8, 10.0)
    assert pace.steps == 1


def test_dispatches_are_longer_where_sending_is_dear():
    """Sending takes at most a twentieth of a dispatch."""
    assert settled(0.01, send_s=0.1).steps * 0.01 == pytest.approx(2.0, rel=0.02)


def test_one_slow_sending_does_not_count_for_much():
    pace = settled(0.01, send_s=0.001)
    pace.sent(0.2)
    pace.landed(pace.steps, 0.01)
    assert pace.steps * 0.01 <= DISPATCH_S


def test_two_are_in_flight_unless_steps_are_slow():
    assert Pace().ahead == 2
    assert settled(0.4).ahead == 2
    assert settled(0.6).ahead == 1


def test_a_dispatch_that_did_nothing_says_nothing():
    pace = settled(0.01)
    before = pace.steps, pace.step_s
    pace.landed(0, 99.0)
    assert (pace.steps, pace.step_s) == before


def test_a_time_of_zero_divides_by_nothing():
    pace = Pace()
    pace.landed(1, 0.0)
    assert pace.steps == GROWTH
