"""What becomes of a learning rate that was asked for, with whatever becomes of the dispatch that it travels with."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from dtkit.training.learning_rate import LearningRate


def asked(rate: LearningRate, value: float) -> Future[int]:
    answer: Future[int] = Future()
    rate.want(value, answer)
    return answer


def value(rate: LearningRate) -> float | None:
    taken = rate.take()
    return None if taken is None else taken.value


def test_it_is_sent_once_and_who_asked_hears_since_when_it_holds():
    rate = LearningRate()
    answer = asked(rate, 0.5)
    assert rate.wanted
    taken = rate.take()
    assert not rate.wanted
    assert rate.take() is None
    assert not answer.done()
    rate.landed(taken, 7)
    assert answer.result(0) == 7


def test_the_last_of_several_is_sent_and_all_who_asked_hear_of_it():
    rate = LearningRate()
    first, last = asked(rate, 0.5), asked(rate, 0.25)
    taken = rate.take()
    assert taken is not None
    assert taken.value == 0.25
    rate.landed(taken, 3)
    assert first.result(0) == last.result(0) == 3


@pytest.mark.parametrize(("stands", "again"), [(4, 0.5), (5, None)], ids=["nothing was done", "steps were taken"])
def test_a_dispatch_that_comes_to_nothing_has_it_sent_again(stands: int, again: float | None):
    """Not where steps were taken with it: a schedule has made another one of it since."""
    rate = LearningRate()
    answer = asked(rate, 0.5)
    rate.withdrawn(rate.take(), 4, stands)
    assert answer.done() == (again is None)
    assert value(rate) == again


def test_one_that_was_asked_for_meanwhile_goes_first():
    rate = LearningRate()
    first = asked(rate, 0.5)
    taken = rate.take()
    last = asked(rate, 0.25)
    rate.withdrawn(taken, 4, 4)
    taken = rate.take()
    assert taken is not None
    assert taken.value == 0.25
    rate.landed(taken, 4)
    assert first.result(0) == last.result(0) == 4


@pytest.mark.parametrize(("back", "again"), [(6, 0.5), (7, 0.5), (8, None)])
def test_a_state_that_is_older_than_it_is_given_it_again(back: int, again: float | None):
    rate = LearningRate()
    asked(rate, 0.5)
    rate.landed(rate.take(), 7)
    rate.back_at(back)
    assert value(rate) == again


def test_who_waits_for_one_that_is_never_sent_is_answered():
    rate = LearningRate()
    answer = asked(rate, 0.5)
    rate.answer(9)
    assert answer.result(0) == 9
    rate.landed(rate.take(), 10)  # and not twice
