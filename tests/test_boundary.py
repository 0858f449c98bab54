"""Guards that catch any error: reports, interrupts that pass, and lifetimes of objects."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from typing import TYPE_CHECKING

import pytest

from dtkit._util.guard import Subscribers, return_error, run_guarded, run_guarded_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOTH = pytest.mark.parametrize("boundary", [run_guarded, run_guarded_in_thread])


class Model:
    """Object that a user's function holds while it fails."""


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Garbage collection turned off: objects freed meanwhile are in no reference cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@BOTH
def test_guard_returns_the_result_and_reports_nothing_on_success(boundary):
    calls = []
    assert boundary(lambda: 7, calls.append) == 7
    assert calls == []


@BOTH
def test_guard_reports_an_error_with_its_traceback_and_returns_the_report(boundary):
    error = ZeroDivisionError("no batch")
    calls = []

    def report(caught: BaseException) -> str:
        calls.append((caught, caught.__traceback__.tb_next.tb_frame.f_code.co_name))
        return "instead"

    assert boundary(failing(error), report) == "instead"
    assert calls == [(error, "fail")]


@BOTH
def test_report_can_raise_another_error(boundary):
    cause = ZeroDivisionError("no batch")

    def refuse(error: BaseException) -> None:
        raise ValueError("give a batch") from error

    with pytest.raises(ValueError, match="give a batch") as raised:
        boundary(failing(cause), refuse)
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_run_guarded_lets_an_interrupt_pass_unreported(kind: type[BaseException]):
    calls = []
    with pytest.raises(kind):
        run_guarded(failing(kind()), calls.append)
    assert calls == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_run_guarded_in_thread_catches_even_an_interrupt(kind: type[BaseException]):
    assert isinstance(run_guarded_in_thread(failing(kind()), return_error), kind)


@BOTH
@pytest.mark.usefixtures("no_collector")
def test_objects_held_by_failing_work_are_freed_after_the_report(boundary):
    held = []

    def work() -> None:
        model = Model()
        held.append(weakref.ref(model))
        raise RuntimeError(f"no forward in {type(model).__name__}")

    assert boundary(work, str) == "no forward in Model"
    assert held[0]() is None


@pytest.mark.usefixtures("no_collector")
def test_objects_held_by_failing_work_are_freed_with_the_error_of_the_report():
    held = []

    def work() -> None:
        model = Model()
        held.append(weakref.ref(model))
        raise RuntimeError(f"no forward in {type(model).__name__}")

    def refuse(error: Exception) -> None:
        raise ValueError("can't be traced") from error

    try:
        run_guarded(work, refuse)
    except ValueError:
        assert held[0]() is not None  # its traceback is still available
    assert held[0]() is None


def test_failing_view_is_logged_and_the_next_one_is_notified(caplog: pytest.LogCaptureFixture):
    calls = []
    with caplog.at_level(logging.ERROR, "dtkit"):
        subscribe(failing(OSError("the page is gone")), lambda: calls.append("the next")).notify("brave-otter")
    assert calls == ["the next"]
    (record,) = caplog.records
    assert record.getMessage() == "a view of brave-otter failed"
    assert str(record.exc_info[1]) == "the page is gone"


def test_interrupt_ends_the_notification_of_views():
    calls = []
    with pytest.raises(KeyboardInterrupt):
        subscribe(failing(KeyboardInterrupt()), lambda: calls.append("the next")).notify("brave-otter")
    assert calls == []


def test_a_removed_view_is_not_notified_and_may_be_removed_again():
    calls, subscribers = [], Subscribers()
    removes = [subscribers.add(functools.partial(calls.append, k)) for k in range(2)]
    removes[0]()
    removes[0]()
    subscribers.notify("brave-otter")
    assert calls == [1]


def subscribe(*views: Callable[[], object]) -> Subscribers:
    subscribers = Subscribers()
    for view in views:
        subscribers.add(view)
    return subscribers
