"""What becomes of a learning rate that was asked for, with whatever becomes of the dispatch that it travels with."""

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


def test_it_is_sent_once_and_who_asked_hears_since_when_it_holds():
    rate = LearningRateUpdater()
    answer = asked(rate, 0.5)
    assert rate.has_pending
    taken = rate.take_pending()
    assert not rate.has_pending
    assert rate.take_pending() is None
    assert not answer.done()
    rate.on_result(taken, 7)
    assert answer.result(0) == 7


def test_the_last_of_several_is_sent_and_all_who_asked_hear_of_it():
    rate = LearningRateUpdater()
    first, last = asked(rate, 0.5), asked(rate, 0.25)
    taken = rate.take_pending()
    assert taken is not None
    assert taken.value == 0.25
    rate.on_result(taken, 3)
    assert first.result(0) == last.result(0) == 3


@pytest.mark.parametrize(("stands", "again"), [(4, 0.5), (5, None)], ids=["nothing was done", "steps were taken"])
def test_a_dispatch_that_comes_to_nothing_has_it_sent_again(stands: int, again: float | None):
    """Not where steps were taken with it: a schedule has made another one of it since."""
    rate = LearningRateUpdater()
    answer = asked(rate, 0.5)
    rate.on_cancel(rate.take_pending(), 4, stands)
    assert answer.done() == (again is None)
    assert value(rate) == again


def test_one_that_was_asked_for_meanwhile_goes_first():
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
def test_a_state_that_is_older_than_it_is_given_it_again(back: int, again: float | None):
    rate = LearningRateUpdater()
    asked(rate, 0.5)
    rate.on_result(rate.take_pending(), 7)
    rate.reset_to(back)
    assert value(rate) == again


def test_who_waits_for_one_that_is_never_sent_is_answered():
    rate = LearningRateUpdater()
    answer = asked(rate, 0.5)
    rate.answer_pending(9)
    assert answer.result(0) == 9
    rate.on_result(rate.take_pending(), 10)  # and not twice
