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

from dtkit.history.history import ROW
from dtkit.history.message_times import MESSAGE
from dtkit.history.run_log import RUNS
from dtkit.types import Advance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Left = list[tuple[Advance, list[Any]]]
"""As a dispatch returns it, as far as a history needs it: rows, when they were blocked and in what, and what was
printed."""
Found = tuple[int, dict[str, tuple[float, float]]]
"""One rank's part of an evaluation: (samples, {name: (sum, weight)})."""

_SPAN = 3 * 8  # bytes of a begin, an end, and among whom


class Unread:
    """One rank's dispatches of one job, on its engine. `folder` is the cluster's."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._folder, self._rank = folder / RUNS / job, rank
        self._kept: list[_File] = []

    def keep(self, advance: Advance, items: Sequence[Any]) -> None:
        """Put down what a dispatch did and said. That there is no room for it is no error."""
        rows = np.asarray(advance.rows)
        if len(rows):
            self._keep(f"{_begin(self._rank)}{rows['step'][0]}", advance.step, _packed(advance, items))

    def keep_evaluation(self, step: int, found: Found) -> None:
        """The same of what an evaluation after so many steps found."""
        self._keep(f"{_begin_evaluated(self._rank)}{step}", step + 1, json.dumps(found).encode() + b"\n")

    def _keep(self, name: str, end: int, data: bytes) -> None:
        if os.access(self._folder, os.W_OK):  # else nobody will take this run over
            self._kept.append(_File(self._folder / name, end, data))
        for file in self._kept:
            file.write()

    def drop(self, seen: float = math.inf) -> None:
        """Remove what came before step `seen`; by default all."""
        for file in self._kept:
            if file.end <= seen:
                with contextlib.suppress(OSError):
                    file.path.unlink()
        self._kept = [file for file in self._kept if file.end > seen]


@dataclasses.dataclass
class _File:
    """What one dispatch did, or one evaluation."""

    path: Path
    end: int
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


def line(kind: str, what: Any) -> str:
    """What was said, as a history shows it: a printed line, or numbers by name."""
    return str(what) if kind == "text" else " ".join(f"{name}={value:.6g}" for name, value in what.items())


def _begin(rank: int) -> str:
    """Of the names of a rank's files; the first step of the dispatch follows."""
    return f"unread-{rank}."


def _begin_evaluated(rank: int) -> str:
    """The same for evaluations; the step follows."""
    return f"unread-evaluation-{rank}."


def _packed(advance: Advance, items: Sequence[Any]) -> bytes:
    rows = np.asarray(advance.rows)
    spans = None if advance.blocked is None else np.asarray(advance.blocked, "f8")
    sent = None if advance.messages is None else np.asarray(advance.messages)
    head = {
        "rows": len(rows),
        "places": None if spans is None else spans.shape[1],
        "messages": None if sent is None else len(sent),
        "lines": [line(kind, what) for kind, what in items],
    }
    arrays = [part.tobytes() for part in (rows, spans, sent) if part is not None]
    return b"".join((json.dumps(head).encode(), b"\n", *arrays))


def read(folder: Path, job: str, rank: int) -> Left:
    """What is left of a rank's dispatches, in their order."""
    found = [_unpacked(path, rank) for path in (folder / RUNS / job).glob(f"{_begin(rank)}*")]
    return sorted((one for one in found if one is not None), key=lambda one: one[0].step)


def evaluations(folder: Path, job: str, rank: int) -> dict[int, Found]:
    """What is left of a rank's evaluations, by the steps after which they were made."""
    begin = _begin_evaluated(rank)
    found = {path.name.removeprefix(begin): _evaluated(path) for path in (folder / RUNS / job).glob(f"{begin}*")}
    return {int(step): one for step, one in found.items() if one is not None and step.isdecimal()}


def _evaluated(path: Path) -> Found | None:
    """One evaluation; None where the file is not whole."""
    try:
        line, end, _ = path.read_bytes().partition(b"\n")
        samples, sums = json.loads(line)
        found = {str(name): (float(total), float(weight)) for name, (total, weight) in sums.items()}
        return (int(samples), found) if end else None
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def remove(folder: Path, job: str) -> None:
    """Delete what all ranks left: the job is made anew, and ranks may be others."""
    for path in (folder / RUNS / job).glob("unread-*"):
        path.unlink(missing_ok=True)


def _unpacked(path: Path, rank: int) -> tuple[Advance, list[Any]] | None:
    """One dispatch; None where the file is not whole."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        said = json.loads(head)
        count, places, sent, lines = said["rows"], said["places"], said["messages"], said["lines"]
        ends = np.cumsum([count * ROW.itemsize, count * (places or 0) * _SPAN, (sent or 0) * MESSAGE.itemsize])
        if count < 1 or len(data) != ends[-1]:
            return None
        rows = np.frombuffer(data[: ends[0]], ROW).copy()
        blocked = None if places is None else np.frombuffer(data[ends[0] : ends[1]], "f8").reshape(count, places, 3)
        messages = None if sent is None else np.frombuffer(data[ends[1] :], MESSAGE)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    first = int(rows["step"][0])
    in_order = np.array_equal(rows["step"], np.arange(first, first + count)) and (rows["rank"] == rank).all()
    if not in_order or not isinstance(lines, list) or not all(isinstance(text, str) for text in lines):
        return None
    advance = Advance(rows, first + count, float(rows["lr"][-1]), blocked=blocked, messages=messages)
    return advance, [("text", text) for text in lines]
