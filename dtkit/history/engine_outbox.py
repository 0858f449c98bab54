"""What an engine's dispatches returned, on disk until the notebook says to have read it: rows outlive who made them.

An engine writes what a dispatch did before it answers, into the run's folder (see :mod:`dtkit.history.run_log`), one
small file a dispatch. The next dispatch says up to which step the notebook has read, and the files before that are
removed. A notebook that takes the cluster over reads what is left there, also of an engine that died along with the
older one.

What a rank found in an evaluation between two dispatches is kept in the same way, until one behind it was read.

A file is a line of JSON and three arrays as they lie in memory; of an evaluation, the line alone. One that was cut off,
by whatever ended its engine, is left out, and so is one that is not of that form. What a full disk does not take is
tried again with the next dispatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.history.history import ROW_DTYPE
from dtkit.history.message_times import MESSAGE_DTYPE
from dtkit.history.run_log import RUNS_FOLDER
from dtkit.types import DispatchResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

UnreadDispatches = list[tuple[DispatchResult, list[Any]]]
"""As a dispatch returns it, as far as a history needs it: rows, when they were blocked and in what, and what was
printed."""
EvaluationSums = tuple[int, dict[str, tuple[float, float]]]
"""One rank's part of an evaluation: (samples, {name: (sum, weight)})."""

_SPAN_BYTES = 3 * 8  # bytes of a begin, an end, and among whom


class ResultOutbox:
    """One rank's dispatches of one job, on its engine. `folder` is the cluster's."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._folder, self._rank = folder / RUNS_FOLDER / job, rank
        self._files: list[_OutboxFile] = []

    def store_dispatch(self, advance: DispatchResult, items: Sequence[Any]) -> None:
        """Put down what a dispatch did and said. That there is no room for it is no error."""
        rows = np.asarray(advance.rows)
        if len(rows):
            self._store(
                f"{_get_dispatch_prefix(self._rank)}{rows['step'][0]}", advance.step, _encode_dispatch(advance, items)
            )

    def store_evaluation(self, step: int, sums: EvaluationSums) -> None:
        """The same of what an evaluation after so many steps found."""
        self._store(f"{_get_evaluation_prefix(self._rank)}{step}", step + 1, json.dumps(sums).encode() + b"\n")

    def _store(self, name: str, end_step: int, data: bytes) -> None:
        if os.access(self._folder, os.W_OK):  # else nobody will take this run over
            self._files.append(_OutboxFile(self._folder / name, end_step, data))
        for file in self._files:
            file.write()

    def discard_read(self, read_until: float = math.inf) -> None:
        """Remove what came before step `seen`; by default all."""
        for file in self._files:
            if file.end_step <= read_until:
                with contextlib.suppress(OSError):
                    file.path.unlink()
        self._files = [file for file in self._files if file.end_step > read_until]


@dataclasses.dataclass
class _OutboxFile:
    """What one dispatch did, or one evaluation."""

    path: Path
    end_step: int
    """Who has read all before this step, has read it."""
    unwritten: bytes | None

    def write(self) -> None:
        """Unless that is done."""
        if self.unwritten is None:
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                if file.write(self.unwritten) == len(self.unwritten):
                    self.unwritten = None


def format_output(kind: str, item: Any) -> str:
    """What was said, as a history shows it: a printed line, or numbers by name."""
    return str(item) if kind == "text" else " ".join(f"{name}={value:.6g}" for name, value in item.items())


def _get_dispatch_prefix(rank: int) -> str:
    """Of the names of a rank's files; the first step of the dispatch follows."""
    return f"unread-{rank}."


def _get_evaluation_prefix(rank: int) -> str:
    """The same for evaluations; the step follows."""
    return f"unread-evaluation-{rank}."


def _encode_dispatch(advance: DispatchResult, items: Sequence[Any]) -> bytes:
    rows = np.asarray(advance.rows)
    spans = None if advance.blocked_spans is None else np.asarray(advance.blocked_spans, "f8")
    sent = None if advance.messages is None else np.asarray(advance.messages)
    head = {
        "rows": len(rows),
        "places": None if spans is None else spans.shape[1],
        "messages": None if sent is None else len(sent),
        "lines": [format_output(kind, what) for kind, what in items],
    }
    arrays = [part.tobytes() for part in (rows, spans, sent) if part is not None]
    return b"".join((json.dumps(head).encode(), b"\n", *arrays))


def read_dispatches(folder: Path, job: str, rank: int) -> UnreadDispatches:
    """What is left of a rank's dispatches, in their order."""
    found = [_read_dispatch(path, rank) for path in (folder / RUNS_FOLDER / job).glob(f"{_get_dispatch_prefix(rank)}*")]
    return sorted((one for one in found if one is not None), key=lambda one: one[0].step)


def read_evaluations(folder: Path, job: str, rank: int) -> dict[int, EvaluationSums]:
    """What is left of a rank's evaluations, by the steps after which they were made."""
    begin = _get_evaluation_prefix(rank)
    found = {
        path.name.removeprefix(begin): _read_evaluation(path) for path in (folder / RUNS_FOLDER / job).glob(f"{begin}*")
    }
    return {int(step): one for step, one in found.items() if one is not None and step.isdecimal()}


def _read_evaluation(path: Path) -> EvaluationSums | None:
    """One evaluation; None where the file is not whole."""
    try:
        line, end, _ = path.read_bytes().partition(b"\n")
        samples, sums = json.loads(line)
        found = {str(name): (float(total), float(weight)) for name, (total, weight) in sums.items()}
        return (int(samples), found) if end else None
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def remove_all(folder: Path, job: str) -> None:
    """Delete what all ranks left: the job is made anew, and ranks may be others."""
    for path in (folder / RUNS_FOLDER / job).glob("unread-*"):
        path.unlink(missing_ok=True)


def _read_dispatch(path: Path, rank: int) -> tuple[DispatchResult, list[Any]] | None:
    """One dispatch; None where the file is not whole."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        said = json.loads(head)
        count, places, sent, lines = said["rows"], said["places"], said["messages"], said["lines"]
        ends = np.cumsum(
            [count * ROW_DTYPE.itemsize, count * (places or 0) * _SPAN_BYTES, (sent or 0) * MESSAGE_DTYPE.itemsize]
        )
        if count < 1 or len(data) != ends[-1]:
            return None
        rows = np.frombuffer(data[: ends[0]], ROW_DTYPE).copy()
        blocked = None if places is None else np.frombuffer(data[ends[0] : ends[1]], "f8").reshape(count, places, 3)
        messages = None if sent is None else np.frombuffer(data[ends[1] :], MESSAGE_DTYPE)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    first = int(rows["step"][0])
    in_order = np.array_equal(rows["step"], np.arange(first, first + count)) and (rows["rank"] == rank).all()
    if not in_order or not isinstance(lines, list) or not all(isinstance(text, str) for text in lines):
        return None
    advance = DispatchResult(rows, first + count, float(rows["lr"][-1]), blocked_spans=blocked, messages=messages)
    return advance, [("text", text) for text in lines]
