"""A run on disk while it goes on, in the cluster's folder: what was asked for, and its history, row by row.

A notebook that dies leaves both behind, and the one that takes the cluster over reads them. What was asked for is
pickled, for it holds the user's functions; it lies where only the user can write, beside the cluster's keys, and is
read by the same user's next kernel. (A checkpoint is another matter: those travel, and hold no pickled object.)

Rows are appended as they lie in memory, one dispatch at a time and without waiting for the disk: the system keeps what
was written when a process ends. A record that was cut off by that is left out. What a full disk does not take stays in
memory and is written with what comes next; the run goes on.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.history import ROW, History
from dtkit.records import Evaluation, Event

if TYPE_CHECKING:
    from pathlib import Path

RUNS = "runs"
"""The folder of runs in that of a cluster."""
_ROWS, _NOTES, _ORDER = "rows.bin", "notes.jsonl", "order.pkl"


class Spool:
    """One run's folder, being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for private in (folder.parent, folder):  # `parents` would make the upper one as the umask says
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rows, self._notes = _Growing(folder / _ROWS), _Growing(folder / _NOTES)

    def order(self, data: bytes) -> None:
        """What was asked for, pickled."""
        _private(self.folder / _ORDER).write_bytes(data)

    def begin(self, history: History) -> None:
        """Write what is there already, and have the rest follow."""
        self.rows(history.rows())
        for event in history.events:
            self.note(event)
        for evaluation in history.evaluations:
            self.note(evaluation)
        history.spool = self

    @property
    def trouble(self) -> str | None:
        """Why something is not on disk yet; None where all of it is."""
        return self._rows.trouble or self._notes.trouble

    def rows(self, block: np.ndarray) -> None:
        """Rows that came together."""
        self._rows.append(block.tobytes())

    def note(self, item: Event | Evaluation) -> None:
        """An event or an evaluation."""
        text = json.dumps({"type": type(item).__name__, **dataclasses.asdict(item)}) + "\n"
        self._notes.append(text.encode())

    def remove(self) -> None:
        """Nobody will ask for this run any more."""
        shutil.rmtree(self.folder, ignore_errors=True)


class _Growing:
    """A file that only grows, and whole records at a time as far as the disk has room."""

    def __init__(self, path: Path) -> None:
        self._path = _private(path)
        self._end = len(_whole(path))
        os.truncate(path, self._end)
        self._unwritten = b""
        self.trouble: str | None = None

    def append(self, data: bytes) -> None:
        """After all that came before, now or with a later call."""
        self._unwritten += data
        try:
            with self._path.open("r+b", buffering=0) as file:
                file.seek(self._end)
                whole = file.write(self._unwritten) == len(self._unwritten)
        except OSError as error:
            self.trouble = error.strerror or str(error)
            return
        if whole:  # else the disk is full: what was cut off is written over
            self._end, self._unwritten, self.trouble = self._end + len(self._unwritten), b"", None
        else:
            self.trouble = os.strerror(errno.ENOSPC)


def order(folder: Path) -> bytes | None:
    """What was asked for; None where no run was."""
    path = folder / _ORDER
    return path.read_bytes() if path.exists() else None


def history(folder: Path, *, copies: int) -> History:
    """All that was written of a history."""
    found = History(copies=copies)
    rows = np.frombuffer(_whole(folder / _ROWS), ROW)
    for part in np.split(rows, np.flatnonzero(np.diff(rows["step"]) < 0) + 1):  # where a run went back to a snapshot
        if len(part):
            found.append(part)
    kinds: dict[str, Any] = {"Event": Event, "Evaluation": Evaluation}
    for line in _whole(folder / _NOTES).splitlines():
        said = json.loads(line)
        found.add(kinds[said.pop("type")](**said))
    return found


def _whole(path: Path) -> bytes:
    """The records of a file, without one that was cut off."""
    data = path.read_bytes()
    size = len(data) // ROW.itemsize * ROW.itemsize if path.name == _ROWS else data.rfind(b"\n") + 1
    return data[:size]


def _private(path: Path) -> Path:
    path.touch(mode=0o600)
    return path
