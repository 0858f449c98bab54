"""Error messages and tracebacks as the notebook receives them."""

from __future__ import annotations

import pytest

from dtkit.engine.observe import error_report


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """Return the error as caught, with a traceback."""
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def test_a_short_message_is_reported_unchanged():
    error = raised(ValueError("row 3 is empty\n  of file a"))
    assert error_report.format_message(error) == "row 3 is empty\n  of file a"
    assert error_report.format_traceback(error).endswith("ValueError: row 3 is empty\n  of file a\n")


def test_the_middle_of_a_long_message_is_left_out():
    error = raised(ValueError("the batch " + "1.25, " * 100_000 + " has a NaN"))
    message, trace = error_report.format_message(error), error_report.format_traceback(error)
    assert message.startswith("the batch 1.25")
    assert message.endswith("has a NaN")
    assert "characters left out" in message
    assert len(message) < 5000
    assert len(trace) < 50_000
    assert trace.startswith("Traceback")


def test_the_cause_follows_the_first_line_of_a_message():
    error = raised(RuntimeError("stage 1 failed\nwith details"), KeyError("x"))
    assert error_report.format_message(error).startswith("stage 1 failed Caused by KeyError: 'x'")


class MuteError(ValueError):
    def __str__(self) -> str:
        raise KeyError("words")


def test_an_error_whose_str_raises_is_reported_by_its_type():
    error = raised(MuteError())
    assert error_report.format_message(error) == "(no message: its __str__ raised KeyError)"
    assert "MuteError" in error_report.format_traceback(error)
    assert error_report.format_message(raised(RuntimeError("stage 1 failed"), MuteError())).startswith(
        "stage 1 failed Caused by MuteError: (no"
    )
