"""The boundary at which any error is caught: who hears of it, what passes, and what is kept alive."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import TYPE_CHECKING

import pytest

from dtkit._util.guard import notify_views, return_error, run_guarded, run_guarded_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOTH = pytest.mark.parametrize("boundary", [run_guarded, run_guarded_in_thread])


class Model:
    """What a user's function may hold while it fails."""


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed meanwhile was in no cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@BOTH
def test_what_goes_well_is_returned_and_nothing_is_reported(boundary):
    told = []
    assert boundary(lambda: 7, told.append) == 7
    assert told == []


@BOTH
def test_an_error_is_reported_with_its_traceback_and_the_report_takes_its_place(boundary):
    error = ZeroDivisionError("no batch")
    told = []

    def report(found: BaseException) -> str:
        told.append((found, found.__traceback__.tb_next.tb_frame.f_code.co_name))
        return "instead"

    assert boundary(failing(error), report) == "instead"
    assert told == [(error, "fail")]


@BOTH
def test_a_report_may_raise_another_error(boundary):
    cause = ZeroDivisionError("no batch")

    def refuse(error: BaseException) -> None:
        raise ValueError("give a batch") from error

    with pytest.raises(ValueError, match="give a batch") as raised:
        boundary(failing(cause), refuse)
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_passes_an_attempt_unreported(kind: type[BaseException]):
    told = []
    with pytest.raises(kind):
        run_guarded(failing(kind()), told.append)
    assert told == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_nothing_passes_where_a_thread_ends(kind: type[BaseException]):
    assert isinstance(run_guarded_in_thread(failing(kind()), return_error), kind)


@BOTH
@pytest.mark.usefixtures("no_collector")
def test_what_the_work_held_is_freed_once_it_is_reported(boundary):
    held = []

    def work() -> None:
        model = Model()
        held.append(weakref.ref(model))
        raise RuntimeError(f"no forward in {type(model).__name__}")

    assert boundary(work, str) == "no forward in Model"
    assert held[0]() is None


@pytest.mark.usefixtures("no_collector")
def test_what_the_work_held_is_freed_with_the_error_that_the_report_made_of_it():
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
        assert held[0]() is not None  # its traceback can still be looked at
    assert held[0]() is None


def test_a_view_that_fails_is_logged_and_the_next_is_told(caplog: pytest.LogCaptureFixture):
    told = []
    with caplog.at_level(logging.ERROR, "dtkit"):
        notify_views([failing(OSError("the page is gone")), lambda: told.append("the next")], "brave-otter")
    assert told == ["the next"]
    (record,) = caplog.records
    assert record.getMessage() == "a view of brave-otter failed"
    assert str(record.exc_info[1]) == "the page is gone"


def test_an_interrupt_ends_the_telling_of_views():
    told = []
    with pytest.raises(KeyboardInterrupt):
        notify_views([failing(KeyboardInterrupt()), lambda: told.append("the next")], "brave-otter")
    assert told == []
