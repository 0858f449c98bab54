"""Output of a call on an engine: rows from `dtkit.log`, and printed lines.

Items are numbered and kept until the call returns them. Meanwhile a thread publishes them at most four times a second,
also during a long computation. Published messages may be lost. The notebook uses the numbers to fill the gaps
when the call returns.

A line without its end, such as a progress bar, is published as it stands, but is not a line of the output.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from dtkit._util import timeouts
from dtkit._util.arguments import hide_own_frames
from dtkit.types import RESERVED_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    OutputItem = tuple[str, Any]

LOG_DESCRIPTOR_VARIABLE = "DTKIT_LOG_DESCRIPTOR"
"""Environment variable of a script's process: descriptor of the pipe for its logged values, a line of JSON each."""
MAX_LINES_PER_S = 100
"""Printed lines that are kept per second; further lines are only counted."""


class CallOutput:
    """Items of one call: ("row", {name: number}), ("text", line), and ("progress", a line without its end)."""

    def __init__(self, publish: Callable[[int, list[OutputItem]], None] | None = None) -> None:
        """Publish items, numbered from `first`, by `publish(first, items)`; None keeps them for the return only."""
        self.items: list[OutputItem] = []
        self._publish = publish
        self._num_published = 0
        self._progress: str | None = None  # not yet among the items
        # locks: while an item is appended
        self._lock = threading.Lock()  # no progress may follow the line that it became
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._line_budget, self._budget_updated_at, self._num_dropped = float(MAX_LINES_PER_S), time.monotonic(), 0

    def add_row(self, values: dict[str, float]) -> None:
        """Add a row."""
        self.items.append(("row", values))
        self._wake.set()

    def add_line(self, text: str) -> None:
        """Add a printed line, or count it if there are too many per second."""
        now = time.monotonic()
        self._line_budget = min(MAX_LINES_PER_S, self._line_budget + (now - self._budget_updated_at) * MAX_LINES_PER_S)
        self._budget_updated_at = now
        if self._line_budget < 1:
            self._num_dropped += 1
            return
        self._line_budget -= 1
        self._report_dropped()
        with self._lock:
            self._progress = None
            self.items.append(("text", text))
        self._wake.set()

    def show_progress(self, text: str) -> None:
        """Publish a line that has no end yet, in place of the previous one."""
        if self._publish is not None:
            self._progress = text
            self._wake.set()

    def _add_progress(self) -> None:
        with self._lock:
            if self._progress is not None:
                self.items.append(("progress", self._progress))
                self._progress = None

    def _report_dropped(self) -> None:
        if self._num_dropped:
            self.items.append(("text", f"[{self._num_dropped} lines dropped: over {MAX_LINES_PER_S} a second]"))
            self._num_dropped = 0

    @contextlib.contextmanager
    def capture_streams(self) -> Iterator[None]:
        """Capture stdout and stderr, and publish items, within the context."""
        out, err = LineStream(self), LineStream(self)
        thread = threading.Thread(target=self._publish_loop, name="dtkit-publish", daemon=True)
        if self._publish is not None:
            thread.start()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            out.flush_partial_line()
            err.flush_partial_line()
            self._report_dropped()
            self._closed.set()
            self._wake.set()
            if self._publish is not None:
                thread.join(timeout=timeouts.OUTPUT_JOIN_TIMEOUT_S)

    def _publish_loop(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(timeout=timeouts.OUTPUT_IDLE_TIMEOUT_S)
            self._wake.clear()
            self._add_progress()
            items = self.items[self._num_published :]
            if items and self._publish is not None and not self._closed.is_set():
                self._publish(self._num_published, [_encode_item(item) for item in items])
                self._num_published += len(items)
                self._closed.wait(timeouts.OUTPUT_PERIOD_S)


def _encode_item(item: OutputItem) -> OutputItem:
    """Return an item for JSON: nonfinite numbers become text, which the notebook converts back."""
    kind, content = item
    if kind != "row":
        return item
    return kind, {name: value if math.isfinite(value) else str(value) for name, value in content.items()}


class LineTarget(Protocol):
    """Where a :class:`LineStream` puts lines: a call's output, or an object that also keeps them."""

    def add_line(self, text: str) -> None:
        """Add a whole line."""

    def show_progress(self, text: str) -> None:
        """Show a line that has no end yet."""


class LineStream(io.TextIOBase):
    """Text stream that adds whole lines to its target, and shows a line that has no end yet.

    As on a terminal, a carriage return begins the line again. So a progress bar is one line, with its last state.
    """

    def __init__(self, target: LineTarget) -> None:
        self._target, self._partial_line = target, ""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Add whole lines, and show the rest."""
        *lines, partial_line = (self._partial_line + text).split("\n")
        for line in lines:
            self._target.add_line(_keep_last_state(line))
        shown = _keep_last_state(partial_line)
        self._partial_line = shown + "\r" if partial_line.endswith("\r") else shown
        if partial_line:
            self._target.show_progress(shown)
        return len(text)

    def flush_partial_line(self) -> None:
        """Add the last line if it lacks its end."""
        if line := _keep_last_state(self._partial_line):
            self._target.add_line(line)
        self._partial_line = ""


def _keep_last_state(line: str) -> str:
    """Return what a terminal shows of a line after its carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line


_add_logged: Callable[[dict[str, Any]], None] | None = None
_of_thread = threading.local()  # its `add` goes before `_add_logged`


@contextlib.contextmanager
def activate_output(output: CallOutput) -> Iterator[None]:
    """Let :func:`log` add to `output` within the context."""
    with (
        redirect_log(lambda values: output.add_row(_to_floats(values))),
        output.capture_streams(),
    ):
        yield


@contextlib.contextmanager
def redirect_log(add: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Let :func:`log` pass its numbers to `add` within the context. They may be tensors of one element."""
    global _add_logged  # noqa: PLW0603 - an engine runs one call at a time
    previous, _add_logged = _add_logged, add
    try:
        yield
    finally:
        _add_logged = previous


@contextlib.contextmanager
def redirect_thread_log(add: Callable[[dict[str, float]], None]) -> Iterator[None]:
    """Let :func:`log` pass its numbers to `add` within the context, in this thread only."""
    _of_thread.add = lambda values: add(_to_floats(values))
    try:
        yield
    finally:
        del _of_thread.add


def ignore_logged(_values: dict[str, Any]) -> None:
    """Do nothing with logged numbers: they belong to no step."""


@hide_own_frames
def log(*args: Any, **values: SupportsFloat | tuple[SupportsFloat, SupportsFloat]) -> None:
    """Report numbers of this rank, from a training or from a function in ``cluster.run``::

        def training_step(model, batch):
            output, target = model(batch[0]), batch[1]
            dtkit.log(accuracy=(output.argmax(1) == target).float().mean())
            return nn.functional.cross_entropy(output, target)

        run = cluster.train(model, (X, y), training_step=training_step, optimizer=sgd, batch_size=64, steps=20)
        run.wait()
        run.history.scalar("accuracy")  # (steps, values); the dashboard has a chart of it

    Numbers from a loss or training step become columns of the run's history. Each is a mean over the samples of all
    ranks, or of pairs (sum, weight). Those from a callback after an epoch belong to its last step. From a function the
    notebook shows them live, as a row of the rank. Elsewhere in the notebook, where users may try a loop first, they
    are printed:

    >>> dtkit.log(kl=0.25, grad_scale=2.0)
    kl=0.25 grad_scale=2

    Tensors of one element count as numbers, and need no ``.item()``.
    Raises TypeError for other values, and ValueError for the names of columns that dtkit fills itself.
    """
    if args:
        raise TypeError(f"dtkit.log({args[0]!r}, ...): each number needs its name, as in dtkit.log(kl=0.5)")
    for name, value in values.items():
        _check_logged(name, value)
    add = getattr(_of_thread, "add", _add_logged)
    if add is None and LOG_DESCRIPTOR_VARIABLE in os.environ:
        line = json.dumps(_to_floats(values)) + "\n"
        os.write(int(os.environ[LOG_DESCRIPTOR_VARIABLE]), line.encode())
        return
    if add is None:  # in the notebook, where users may try a loop first
        print(" ".join(f"{k}={v:.6g}" for k, v in _to_floats(values).items()), file=sys.stdout)  # noqa: T201
        return
    add(values)


def _check_logged(name: str, value: Any) -> None:
    if name in RESERVED_COLUMNS:
        raise ValueError(
            f"dtkit.log({name}=...): dtkit fills the columns {' and '.join(RESERVED_COLUMNS)} itself; use another name"
        )
    numbers = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    if not all(_is_number(number) for number in numbers):
        raise TypeError(
            f"dtkit.log({name}={type(value).__name__}): values must be numbers or tensors of one element; "
            "use .item() or .mean()"
        )


def _to_floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: _to_float(value) for name, value in values.items()}


def _to_float(value: Any) -> float:
    """Return a number; of a pair (sum, weight) the mean. torch warns of tensors that need gradients."""
    if isinstance(value, tuple):
        total, weight = map(_to_float, value)
        return total / weight if weight else math.nan
    return float(value.detach() if hasattr(value, "detach") else value)


def _is_number(value: Any) -> bool:
    if hasattr(value, "numel"):
        return bool(value.numel() == 1)
    if isinstance(value, (str, bytes)):  # float() reads texts of digits
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
