"""A run on disk while it goes on, in the cluster's folder: what was asked for, and its history, row by row.

A notebook that dies leaves both behind, and the one that takes the cluster over reads them. What was asked for is
pickled, for it holds the user's functions; it lies where only the user can write, beside the cluster's keys, and is
read by the same user's next kernel. (A checkpoint is another matter: those travel, and hold no pickled object.)

Rows are appended as they lie in memory, one dispatch at a time and without waiting for the disk: the system keeps what
was written when a process ends. A record that was cut off by that is left out, and so is a line that can't be read.
What a full disk does not take stays in memory and is written with what comes next; the run goes on.

Each notebook has files of its own. One that takes a run over writes all that it has read anew, and puts that in the old
files' place at once; an older notebook that lives on, and may not know yet, writes into what has no name any more.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util.formatting import format_count
from dtkit.history.history import ROW_DTYPE, History
from dtkit.types import Evaluation, Event

if TYPE_CHECKING:
    from collections.abc import Callable

RUNS_FOLDER = "runs"
"""The folder of runs in that of a cluster."""
_ROWS_FILE, _EVENTS_FILE, _RUN_FILE = "rows.bin", "notes.jsonl", "order.pkl"


class RunLog:
    """One run's folder, being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for private in (folder.parent, folder):  # `parents` would make the upper one as the umask says
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rows, self._events = _AppendOnlyFile(folder / _ROWS_FILE), _AppendOnlyFile(folder / _EVENTS_FILE)

    def write_run_pickle(self, data: bytes) -> None:
        """What was asked for, pickled: in place of what was put down before, which is there until this is whole."""
        descriptor, name = tempfile.mkstemp(prefix=f".{_RUN_FILE}-", dir=self.folder)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            part.replace(self.folder / _RUN_FILE)
        finally:
            part.unlink(missing_ok=True)

    def start_recording(self, history: History) -> None:
        """Write what is there already, and have the rest follow."""
        self.append_rows(history.rows())
        items: list[Event | Evaluation] = [*history.events, *history.evaluations]
        self._events.append(b"".join(map(_encode_line, items)))
        history.run_log = self

    @property
    def write_error(self) -> str | None:
        """Why something is not on disk yet; None where all of it is."""
        return self._rows.write_error or self._events.write_error

    def append_rows(self, block: np.ndarray) -> None:
        """Rows that came together."""
        self._rows.append(block.tobytes())

    def append_event(self, item: Event | Evaluation) -> None:
        """An event or an evaluation."""
        self._events.append(_encode_line(item))

    def close(self) -> None:
        """Write nothing more. Idempotent."""
        self._rows.close()
        self._events.close()

    def remove(self) -> None:
        """Nobody will ask for this run any more."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _AppendOnlyFile:
    """A file that only grows, and whole records at a time as far as the disk has room.

    It takes the place of one that is there as soon as its beginning is whole, and is known by its descriptor from then
    on: whatever has its name later is another notebook's.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor, self._closed = path, -1, False
        self._close_descriptor: Callable[[], object] = bool
        self._temporary_path: Path | None = None
        self._written_bytes, self._unwritten = 0, b""
        # locks: while a record is written to a file
        self._lock = threading.Lock()  # a run's log is written to from several threads
        self.write_error: str | None = None

    def append(self, data: bytes) -> None:
        """After all that came before, now or with a later call."""
        with self._lock:
            if self._closed:
                return
            self._unwritten += data
            try:
                self._write()
            except OSError as error:
                self.write_error = error.strerror or str(error)

    def close(self) -> None:
        """Let go of the file: an open one keeps its disk from being unmounted."""
        with self._lock:
            self._closed = True
            self._close_descriptor()

    def _write(self) -> None:
        if self._descriptor < 0:
            self._open()
        if os.pwrite(self._descriptor, self._unwritten, self._written_bytes) < len(self._unwritten):
            self.write_error = os.strerror(errno.ENOSPC)  # what was cut off will be written over
            return
        if self._temporary_path is not None:
            self._temporary_path.replace(self._path)
            self._temporary_path = None
        self._written_bytes, self._unwritten, self.write_error = self._written_bytes + len(self._unwritten), b"", None

    def _open(self) -> None:
        self._descriptor, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)
        self._temporary_path = Path(name)


def read_run_pickle(folder: Path) -> bytes | None:
    """What was asked for; None where no run was."""
    path = folder / _RUN_FILE
    return path.read_bytes() if path.exists() else None


def read_history(folder: Path, *, ranks_per_replica: int) -> History:
    """All that was written of a history."""
    found = History(ranks_per_replica=ranks_per_replica)
    rows = np.frombuffer(_read_complete_records(folder / _ROWS_FILE), ROW_DTYPE)
    for part in np.split(rows, np.flatnonzero(np.diff(rows["step"]) < 0) + 1):  # where a run went back to a snapshot
        if len(part):
            found.append(part)
    unreadable = 0
    for line in _read_complete_records(folder / _EVENTS_FILE).splitlines():
        try:
            found.add(_decode_line(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            unreadable += 1
    if unreadable:
        text = f"{format_count(unreadable, 'line')} of this log can't be read, for whatever wrote over them: left out"
        found.add(Event(int(rows["step"][-1]) + 1 if len(rows) else 0, "error", text, time.time()))
    return found


def _encode_line(item: Event | Evaluation) -> bytes:
    return json.dumps({"type": type(item).__name__, **dataclasses.asdict(item)}).encode() + b"\n"


def _decode_line(line: bytes) -> Event | Evaluation:
    said = json.loads(line)
    kind: type[Event | Evaluation] = {"Event": Event, "Evaluation": Evaluation}[said.pop("type")]
    return kind(**said)


def _read_complete_records(path: Path) -> bytes:
    """The records of a file, without one that was cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # whoever was to write it ended before
        return b""
    size = len(data) // ROW_DTYPE.itemsize * ROW_DTYPE.itemsize if path.name == _ROWS_FILE else data.rfind(b"\n") + 1
    return data[:size]
