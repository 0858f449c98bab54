"""A run on disk while it goes on, in the cluster's folder: what was asked for, and its history, row by row.

A notebook that dies leaves both behind, and the one that takes the cluster over reads them. What was asked for is
pickled, for it holds the user's functions; it lies where only the user can write, beside the cluster's keys, and is
read by the same user's next kernel. (A checkpoint is another matter: those travel, and hold no pickled object.)

Rows are appended as they lie in memory, one dispatch at a time and without waiting for the disk: the system keeps what
was written when a process ends. A record that was cut off by that is left out.
"""

from __future__ import annotations

import dataclasses
import json
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
        self._rows, self._notes = _private(folder / _ROWS), _private(folder / _NOTES)

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

    def rows(self, block: np.ndarray) -> None:
        """Rows that came together."""
        with self._rows.open("ab") as file:
            file.write(block.tobytes())

    def note(self, item: Event | Evaluation) -> None:
        """An event or an evaluation."""
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"type": type(item).__name__, **dataclasses.asdict(item)}) + "\n")

    def remove(self) -> None:
        """Nobody will ask for this run any more."""
        shutil.rmtree(self.folder, ignore_errors=True)


def order(folder: Path) -> bytes | None:
    """What was asked for; None where no run was."""
    path = folder / _ORDER
    return path.read_bytes() if path.exists() else None


def history(folder: Path, *, copies: int) -> History:
    """All that was written of a history."""
    found = History(copies=copies)
    data = (folder / _ROWS).read_bytes()
    rows = np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
    for part in np.split(rows, np.flatnonzero(np.diff(rows["step"]) < 0) + 1):  # where a run went back to a snapshot
        if len(part):
            found.append(part)
    kinds: dict[str, Any] = {"Event": Event, "Evaluation": Evaluation}
    for line in (folder / _NOTES).read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            said = json.loads(line)
            found.add(kinds[said.pop("type")](**said))
    return found


def _private(path: Path) -> Path:
    path.touch(mode=0o600)
    return path
