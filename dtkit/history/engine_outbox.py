"""Dispatch results, kept on disk until the notebook acknowledges them, so that they survive the engine.

An engine writes the result of a dispatch into the run's folder (see :mod:`dtkit.history.run_log`) before it replies.
Each dispatch has one small file. The next dispatch names the step up to which the notebook has read; earlier files are
removed. A notebook that takes over the cluster reads the remaining files, even those of an engine that died with the
older notebook. Results of evaluations between dispatches, and errors, are kept in the same way, until a later dispatch
is read.

A file is a line of JSON and up to three arrays as bytes; for an evaluation, the line alone. Readers skip files that are
cut off or malformed. If the disk is full, the next dispatch writes the missing files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import files
from dtkit.history.comm_time import MESSAGE_DTYPE
from dtkit.history.history import ROW_DTYPE
from dtkit.history.run_log import RUNS_FOLDER
from dtkit.messages import DispatchResult
from dtkit.types import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

UnreadDispatches = list[tuple[DispatchResult, list[Any]]]
"""Parts of dispatch results that a history needs (rows, blocked spans, messages), each with its output."""
EvaluationSums = tuple[int, dict[str, tuple[float, float]]]
"""One rank's part of an evaluation: (samples, {name: (sum, weight)})."""

_SPAN_BYTES = 3 * 8  # begin, end, and number of the group of ranks


class ResultOutbox:
    """Unread results of one rank in one job, on its engine. `folder` is the cluster's."""

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        self._folder, self._rank = folder / RUNS_FOLDER / job, rank
        self._files: list[_OutboxFile] = []

    def store_dispatch(self, advance: DispatchResult, items: Sequence[Any]) -> None:
        """Store the result and the output of a dispatch. A full disk raises no error."""
        rows = np.asarray(advance.rows)
        if len(rows):
            name = f"{_get_dispatch_prefix(self._rank)}{rows['step'][0]}"
            self._store(name, advance.step, _encode_dispatch(advance, items))

    def store_evaluation(self, step: int, sums: EvaluationSums) -> None:
        """Store this rank's part of the evaluation after `step` steps."""
        self._store(f"{_get_evaluation_prefix(self._rank)}{step}", step + 1, json.dumps(sums).encode() + b"\n")

    def store_failure(self, failure: Failure) -> None:
        """Store why a dispatch failed. It is discarded once the run has gone on."""
        data = json.dumps(dataclasses.asdict(failure)).encode() + b"\n"
        self._store(f"{_FAILURE_PREFIX}{self._rank}", (failure.step or 0) + 1, data)

    def _store(self, name: str, end_step: int, data: bytes) -> None:
        if os.access(self._folder, os.W_OK):  # without the folder, no notebook can take over this run
            self._files.append(_OutboxFile(self._folder / name, end_step, data))
        for file in self._files:
            file.write()

    def discard_read(self, read_until: float = math.inf) -> None:
        """Remove results from before step `read_until`; by default all."""
        for file in self._files:
            if file.end_step <= read_until:
                with contextlib.suppress(OSError):
                    file.path.unlink()
        self._files = [file for file in self._files if file.end_step > read_until]


@dataclasses.dataclass
class _OutboxFile:
    """Result of one dispatch or one evaluation."""

    path: Path
    end_step: int
    """The file has only results of steps before this one."""
    unwritten: bytes | None
    """Content; None once it is on disk."""

    def write(self) -> None:
        """Write the file, unless it is written."""
        if self.unwritten is None:
            return
        with contextlib.suppress(OSError):
            files.replace_file(self.path, self.unwritten)
            self.unwritten = None


_FAILURE_PREFIX = "unread-failure-"
"""Beginning of the names of files with failures; the rank follows."""


def format_output(kind: str, item: Any) -> str:
    """Return an output in the form of a history's events: a printed line, or numbers by name."""
    return str(item) if kind == "text" else " ".join(f"{name}={value:.6g}" for name, value in item.items())


def _get_dispatch_prefix(rank: int) -> str:
    """Return the beginning of a rank's file names; the first step of the dispatch follows."""
    return f"unread-{rank}."


def _get_evaluation_prefix(rank: int) -> str:
    """Return the beginning of the names of a rank's evaluations; the step follows."""
    return f"unread-evaluation-{rank}."


def _encode_dispatch(advance: DispatchResult, items: Sequence[Any]) -> bytes:
    rows = np.asarray(advance.rows)
    spans = None if advance.blocked_spans is None else np.asarray(advance.blocked_spans, "f8")
    messages = None if advance.messages is None else np.asarray(advance.messages)
    header = {
        "rows": len(rows),
        "places": None if spans is None else spans.shape[1],
        "messages": None if messages is None else len(messages),
        "lines": [format_output(kind, item) for kind, item in items],
        "scalars": advance.scalars,
    }
    arrays = [array.tobytes() for array in (rows, spans, messages) if array is not None]
    return b"".join((json.dumps(header).encode(), b"\n", *arrays))


def read_dispatches(folder: Path, job: str, rank: int) -> UnreadDispatches:
    """Return the unread results of a rank's dispatches, in order."""
    paths = (folder / RUNS_FOLDER / job).glob(f"{_get_dispatch_prefix(rank)}*")
    results = [_read_dispatch(path, rank) for path in paths]
    return sorted((result for result in results if result is not None), key=lambda result: result[0].step)


def list_ranks(folder: Path, job: str, ranks: Iterable[int], step: int) -> set[int]:
    """Return those of `ranks` that have an unread result of this step."""
    return {
        rank
        for rank in ranks
        for result, _ in read_dispatches(folder, job, rank)
        if step in np.asarray(result.rows)["step"]
    }


def read_evaluations(folder: Path, job: str, rank: int) -> dict[int, EvaluationSums]:
    """Return a rank's unread evaluations by step."""
    prefix = _get_evaluation_prefix(rank)
    paths = (folder / RUNS_FOLDER / job).glob(f"{prefix}*")
    results = {path.name.removeprefix(prefix): _read_evaluation(path) for path in paths}
    return {int(step): sums for step, sums in results.items() if sums is not None and step.isdecimal()}


def _read_evaluation(path: Path) -> EvaluationSums | None:
    """Return one evaluation; None if the file is incomplete or malformed."""
    try:
        line, end, _ = path.read_bytes().partition(b"\n")
        samples, sums = json.loads(line)
        checked_sums = {str(name): (float(total), float(weight)) for name, (total, weight) in sums.items()}
        return (int(samples), checked_sums) if end else None
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def read_failures(folder: Path, job: str, ranks: Iterable[int], step: int) -> list[Failure]:
    """Return why ranks failed in the step that follows `step` steps, by rank. Malformed files are left out."""
    failures = []
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError, TypeError):
            fields = json.loads((folder / RUNS_FOLDER / job / f"{_FAILURE_PREFIX}{rank}").read_bytes())
            failure = Failure(**{**fields, "user_frames": tuple(map(tuple, fields["user_frames"]))})
            failures += [failure] if (failure.step or 0) >= step else []
    return failures


def remove_all(folder: Path, job: str) -> None:
    """Delete the files of all ranks: a rebuilt job may have other ranks."""
    for path in (folder / RUNS_FOLDER / job).glob("unread-*"):
        path.unlink(missing_ok=True)


def _read_dispatch(path: Path, rank: int) -> tuple[DispatchResult, list[Any]] | None:
    """Return one dispatch; None if the file is incomplete or malformed."""
    try:
        line, _, data = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        count, width, num_messages, lines = header["rows"], header["places"], header["messages"], header["lines"]
        ends = np.cumsum(
            [
                count * ROW_DTYPE.itemsize,
                count * (width or 0) * _SPAN_BYTES,
                (num_messages or 0) * MESSAGE_DTYPE.itemsize,
            ]
        )
        if count < 1 or len(data) != ends[-1]:
            return None
        rows = np.frombuffer(data[: ends[0]], ROW_DTYPE).copy()
        blocked = None if width is None else np.frombuffer(data[ends[0] : ends[1]], "f8").reshape(count, width, 3)
        messages = None if num_messages is None else np.frombuffer(data[ends[1] :], MESSAGE_DTYPE)
        scalars = {
            str(name): [(int(step), float(total), float(weight)) for step, total, weight in values]
            for name, values in header["scalars"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    first = int(rows["step"][0])
    in_order = np.array_equal(rows["step"], np.arange(first, first + count)) and (rows["rank"] == rank).all()
    if not in_order or not isinstance(lines, list) or not all(isinstance(text, str) for text in lines):
        return None
    result = DispatchResult(
        rows, first + count, float(rows["lr"][-1]), blocked_spans=blocked, messages=messages, scalars=scalars
    )
    return result, [("text", text) for text in lines]
