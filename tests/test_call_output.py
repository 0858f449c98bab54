"""Printed lines of a call: their ends, carriage returns, and lines that have no end yet."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dtkit.engine.observe.call_output import CallOutput, LineStream, activate_output

BAR = "\r  0%|   | 0/3\r 33%|#  | 1/3\r 67%|## | 2/3"


class Target:
    """Lines, and the line that has no end yet."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.progress = ""

    def add_line(self, text: str) -> None:
        self.lines.append(text)

    def show_progress(self, text: str) -> None:
        self.progress = text


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_progress_bar_is_one_line_with_its_last_state(size: int):
    target = Target()
    stream, text = LineStream(target), f"begin\r\n{BAR}"
    for first in range(0, len(text), size):
        stream.write(text[first : first + size])
    assert (target.lines, target.progress) == (["begin"], " 67%|## | 2/3")
    stream.write("\r100%|###| 3/3\n\nend")
    stream.flush_partial_line()
    assert target.lines == ["begin", "100%|###| 3/3", "", "end"]


def test_cleared_progress_bar_leaves_no_text():
    target = Target()
    stream = LineStream(target)
    stream.write(f"{BAR}\r             \r")
    assert target.progress.strip() == ""
    stream.write("end\n")
    assert target.lines == ["end"]


def test_endless_line_is_not_kept_with_its_earlier_states():
    stream = LineStream(Target())
    for _ in range(1000):
        stream.write("\r 50%")
    assert len(stream._partial_line) < 10


def test_line_without_its_end_is_published_while_the_call_runs():
    sent: list[tuple[int, Any]] = []
    arrived = threading.Event()

    def publish(first: int, items: list[Any]) -> None:
        sent.extend(enumerate(items, first))
        arrived.set()

    output = CallOutput(publish)
    with activate_output(output):
        print(BAR, end="")
        assert arrived.wait(10)
        print("\r100%")
    assert sent[0] == (0, ("progress", " 67%|## | 2/3"))
    assert output.items == [("progress", " 67%|## | 2/3"), ("text", "100%")]
