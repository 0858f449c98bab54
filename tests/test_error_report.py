"""Error messages and tracebacks as the notebook receives them."""

from __future__ import annotations

import sys

import pytest
from torch.utils.data import DataLoader

import dtkit
from dtkit.engine.observe import error_report
from dtkit.errors import EngineError
from dtkit.testing.in_process import InProcessTransport
from tests.support.notebook_dataset import BAD_LINE, CELL_FILE, make_notebook_dataset


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


# -- errors of a DataLoader's worker --------------------------------------------------------------------------

CAUGHT = "Caught {} in DataLoader worker process 0.\nOriginal "
TRACEBACK = """Traceback (most recent call last):
  File "/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)  # type: ignore[possibly-undefined]
           ^^^^^^^^^^^^^^^^^^^^
  File "/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 56, in fetch
    data = self.dataset[possibly_batched_index]
           ~~~~~~~~~~~~^^^^^^^^^^^^^^^^^^^^^^^^
  File "/tmp/ipykernel_469/2338072836.py", line 4, in __getitem__
  File "/home/me/my rows.py", line 7, in load
    return load(

        row)
           ^^^^^^^^^
  [Previous line repeated 3 more times]
"""
USER_FRAMES = (
    ("/tmp/ipykernel_469/2338072836.py", 4, "__getitem__", ""),
    ("/home/me/my rows.py", 7, "load", "return load("),
)


@pytest.mark.parametrize(
    ("kind", "end", "message"),
    [
        ("OSError", "OSError: [Errno 5] disk is gone: 'a.png'\n", "[Errno 5] disk is gone: 'a.png'"),
        ("KeyError", "KeyError: 'bad: row'\n", "'bad: row'"),
        ("ValueError", "ValueError: bad\n  second: line\nrow 40\n", "bad\n  second: line\nrow 40"),
        ("AssertionError", "AssertionError\nrow 40\n", "\nrow 40"),
        ("AssertionError", "AssertionError\n", ""),
        ("BadFileError", "files.Reader.BadFileError: no header\n", "no header"),
        ("BadFileError", "make.<locals>.BadFileError: no header\n", "no header"),
    ],
)
def test_an_error_of_a_worker_is_reported_as_it_was_raised(kind: str, end: str, message: str):
    error = raised(RuntimeError(CAUGHT.format(kind) + TRACEBACK + end))
    assert error_report.name_error(error) == kind
    assert error_report.format_message(error) == message
    assert error_report.list_user_frames(error)[-2:] == USER_FRAMES
    assert "_worker_loop" in error_report.format_traceback(error)


@pytest.mark.parametrize(
    "text",
    [
        CAUGHT.format("ValueError") + TRACEBACK + f"KeyError: 0\n\n{link}\n\n" + TRACEBACK + "ValueError: no"
        for link in (
            "The above exception was the direct cause of the following exception:",
            "During handling of the above exception, another exception occurred:",
        )
    ]
    + [
        CAUGHT.format("ValueError") + TRACEBACK + "KeyError: 0",
        CAUGHT.format("ValueError") + TRACEBACK.rstrip(),
        CAUGHT.format("ExceptionGroup") + "  + Exception Group " + TRACEBACK,
        "Caught a cold.\nOriginal " + TRACEBACK,
    ],
)
def test_other_texts_of_a_worker_are_reported_unchanged(text: str):
    error = raised(RuntimeError(text))
    assert error_report.name_error(error) == "RuntimeError"
    assert error_report.format_message(error) == text.strip()
    assert [frame[0] for frame in error_report.list_user_frames(error)] == [__file__]


@pytest.mark.parametrize(
    ("raises", "kind", "message"),
    [
        ("raise OSError(5, 'disk is gone', 'a.png')", "OSError", "[Errno 5] disk is gone: 'a.png'"),
        ("b'\\xff'.decode()", "UnicodeDecodeError", "'utf-8' codec can't decode byte 0xff in position 0: "),
    ],
)
def test_torch_sends_errors_of_workers_in_the_text_that_is_parsed(raises: str, kind: str, message: str):
    dataset = make_notebook_dataset(raises, bad=0)
    loader = DataLoader(
        dataset, num_workers=1, batch_size=None, multiprocessing_context="fork" if sys.platform == "linux" else None
    )
    with pytest.raises((OSError, RuntimeError)) as caught:
        next(iter(loader))
    assert error_report.name_error(caught.value) == kind
    assert error_report.format_message(caught.value).startswith(message)
    here, users = error_report.list_user_frames(caught.value)
    assert here[0] == __file__
    assert users[:3] == (CELL_FILE, BAD_LINE, "__getitem__")


def test_a_failure_has_the_type_that_a_worker_raised():
    text = CAUGHT.format("UnicodeDecodeError") + TRACEBACK + "UnicodeDecodeError: no text"

    def fail(*_: int) -> None:
        raise RuntimeError(text)

    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu") as cluster:
        for call in (lambda: cluster.run(fail), lambda: cluster.map(fail, [1])):
            with pytest.raises(EngineError, match="UnicodeDecodeError: no text\n") as caught:
                call()
            assert caught.value.cause.type == "UnicodeDecodeError"
