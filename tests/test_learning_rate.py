"""Requested learning rate: when it is sent, sent again and answered."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from dtkit.training.learning_rate import LearningRateUpdater


def asked(rate: LearningRateUpdater, value: float) -> Future[int]:
    answer: Future[int] = Future()
    rate.request(value, answer)
    return answer


def value(rate: LearningRateUpdater) -> float | None:
    taken = rate.take_pending()
    return None if taken is None else taken.value


def test_a_rate_is_sent_once_and_the_caller_gets_its_first_step():
    rate = LearningRateUpdater()
    answer = asked(rate, 0.5)
    assert rate.has_pending
    taken = rate.take_pending()
    assert not rate.has_pending
    assert rate.take_pending() is None
    assert not answer.done()
    rate.on_result(taken, 7)
    assert answer.result(0) == 7


def test_only_the_last_requested_rate_is_sent_and_all_callers_are_answered():
    rate = LearningRateUpdater()
    first, last = asked(rate, 0.5), asked(rate, 0.25)
    taken = rate.take_pending()
    assert taken is not None
    assert taken.value == 0.25
    rate.on_result(taken, 3)
    assert first.result(0) == last.result(0) == 3


@pytest.mark.parametrize(("stands", "again"), [(4, 0.5), (5, None)], ids=["nothing was done", "steps were taken"])
def test_a_rate_is_sent_again_if_its_dispatch_is_canceled_before_any_step(stands: int, again: float | None):
    """Not if steps were taken with it: a schedule has changed the rate since."""
    rate = LearningRateUpdater()
    answer = asked(rate, 0.5)
    rate.on_cancel(rate.take_pending(), 4, stands)
    assert answer.done() == (again is None)
    assert value(rate) == again


def test_a_newer_rate_replaces_the_one_of_a_canceled_dispatch():
    rate = LearningRateUpdater()
    first = asked(rate, 0.5)
    taken = rate.take_pending()
    last = asked(rate, 0.25)
    rate.on_cancel(taken, 4, 4)
    taken = rate.take_pending()
    assert taken is not None
    assert taken.value == 0.25
    rate.on_result(taken, 4)
    assert first.result(0) == last.result(0) == 4


@pytest.mark.parametrize(("back", "again"), [(6, 0.5), (7, 0.5), (8, None)])
def test_a_rate_is_sent_again_after_a_reset_to_an_earlier_state(back: int, again: float | None):
    rate = LearningRateUpdater()
    asked(rate, 0.5)
    rate.on_result(rate.take_pending(), 7)
    rate.reset_to(back)
    assert value(rate) == again


def test_callers_of_a_rate_that_is_never_sent_are_answered():
    rate = LearningRateUpdater()
    answer = asked(rate, 0.5)
    rate.answer_pending(9)
    assert answer.result(0) == 9
    rate.on_result(rate.take_pending(), 10)  # and not twice
