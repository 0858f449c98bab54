"""Log of a run in the cluster's folder: the pickled request, and the history as it grows.

A notebook that takes over the cluster reads both. The request is pickled because it holds the user's functions. It is
stored where only the user can write, next to the cluster's keys. (Checkpoints can be copied elsewhere, so they hold no
pickled object.)

Rows are appended as bytes, one dispatch at a time, without a sync: the system keeps them when the process ends. Readers
skip a record that was cut off and lines that they can't parse. If the disk is full, records stay in memory and are
written with later ones; the run goes on.

Each notebook has its own files. A notebook that takes over a run copies everything into new files, which then replace
the old ones. An older notebook that still runs then writes into deleted files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import files
from dtkit._util.formatting import format_count
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.items import LogItem, decode_fields, encode_line
from dtkit.history.timeline import SPAN_DTYPE
from dtkit.types import Event, ReplicaCheckResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TAKEN_OVER = "taken over"
"""Begin of the event that a notebook attached to a run of another one."""
_STATE_KINDS = ("start", "resume", "pause", "stop", "done", "error")
RUNS_FOLDER = "runs"
"""Name of the folder of runs in a cluster's folder."""
_ROWS_FILE, _EVENTS_FILE, _RUN_FILE, _LABEL_FILE = "rows.bin", "notes.jsonl", "order.pkl", "run.json"
_ELAPSED_FILE = "elapsed.json"
_SPANS_FILE, _CHECK_FILE = "last-step.npy", "replica-check.json"


@dataclasses.dataclass(frozen=True)
class RunLabel:
    """What another notebook may know of a run before it takes the cluster over."""

    name: str
    steps: int
    modules: tuple[str, ...]
    """Modules that the run's functions and its model need."""


class RunLog:
    """Writer of one run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for private_folder in (folder.parent, folder):  # `parents=True` ignores `mode` for the parent
            private_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rows = files.AppendOnlyFile(folder / _ROWS_FILE)
        self._events = files.AppendOnlyFile(folder / _EVENTS_FILE)

    def write_run_pickle(self, data: bytes) -> None:
        """Store the pickled request. It replaces an older one when it is complete."""
        files.replace_file(self.folder / _RUN_FILE, data)

    def write_label(self, label: RunLabel) -> None:
        """Store the label. It replaces an older one."""
        files.replace_file(self.folder / _LABEL_FILE, json.dumps(dataclasses.asdict(label)))

    def start_recording(self, history: History) -> None:
        """Write the history so far, and subscribe to its new items."""
        self.append_rows(history.rows())
        items: list[LogItem] = [*history.returns, *history.events, *history.evaluations, *history.list_scalar_records()]
        self._events.append("".join(map(encode_line, items)).encode())
        history.run_log = self

    @property
    def write_error(self) -> str | None:
        """Reason why some items are not on disk yet; None if all are."""
        return self._rows.write_error or self._events.write_error

    def append_rows(self, block: np.ndarray) -> None:
        """Append rows of dtype :data:`ROW_DTYPE`."""
        self._rows.append(block.tobytes())

    def append_event(self, item: LogItem) -> None:
        """Append an item that is no row."""
        self._events.append(encode_line(item).encode())

    def write_elapsed(self, num_steps: int, elapsed_s: float) -> None:
        """Store how long the run was RUNNING for the first `num_steps` of its history. A full disk raises no error."""
        with contextlib.suppress(OSError):
            files.replace_file(self.folder / _ELAPSED_FILE, json.dumps({"steps": num_steps, "elapsed_s": elapsed_s}))

    def write_last_step(self, spans: np.ndarray, check: ReplicaCheckResult | None) -> None:
        """Store the timeline of the last step, and the last comparison of replicas. A full disk raises no error."""
        buffer = io.BytesIO()
        np.save(buffer, spans, allow_pickle=False)
        with contextlib.suppress(OSError):
            files.replace_file(self.folder / _SPANS_FILE, buffer.getvalue())
            if check is not None:
                files.replace_file(self.folder / _CHECK_FILE, json.dumps(dataclasses.asdict(check)))

    def close(self) -> None:
        """Stop writing. Idempotent."""
        self._rows.close()
        self._events.close()

    def remove(self) -> None:
        """Close the log, and delete its folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def read_run_pickle(folder: Path) -> bytes | None:
    """Return the pickled request; None if there is none."""
    path = folder / _RUN_FILE
    return path.read_bytes() if path.exists() else None


def read_elapsed(folder: Path) -> tuple[int, float]:
    """Return what `write_elapsed` stored; zeros if it is unknown."""
    try:
        fields = json.loads((folder / _ELAPSED_FILE).read_text(encoding="utf-8"))
        return int(fields["steps"]), float(fields["elapsed_s"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0, 0.0


def read_last_step(folder: Path, num_ranks: int) -> tuple[np.ndarray, ReplicaCheckResult | None]:
    """Return what `write_last_step` stored: no spans, and None, if it is unknown or of other ranks."""
    spans, check = np.empty(0, SPAN_DTYPE), None
    with contextlib.suppress(OSError, ValueError, EOFError):
        found = np.load(folder / _SPANS_FILE, allow_pickle=False)
        if found.dtype == SPAN_DTYPE and found["rank"].max(initial=-1) < num_ranks:
            spans = found
    with contextlib.suppress(OSError, ValueError, TypeError):
        fields = json.loads((folder / _CHECK_FILE).read_text(encoding="utf-8"))
        check = ReplicaCheckResult(**fields | {"differing_ranks": tuple(fields["differing_ranks"])})
    return spans, check


def read_labels(cluster_folder: Path) -> list[RunLabel]:
    """Return the labels of a cluster's runs, the latest last. Those that can't be read are left out."""
    labels = []
    for path in (cluster_folder / RUNS_FOLDER).glob(f"*/{_LABEL_FILE}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            fields = json.loads(path.read_text(encoding="utf-8"))
            label = RunLabel(str(fields["name"]), int(fields["steps"]), tuple(fields["modules"]))
            labels.append((path.stat().st_mtime, label))
    return [label for _, label in sorted(labels, key=lambda pair: pair[0])]


def find_takeover_kind(events: Sequence[Event]) -> str:
    """Return the kind of the event that another notebook takes over a run with these events: what they lack.

    The other notebook may have died before it could log a repair. Engines that took steps until then are paused.
    """
    if next((event.kind for event in reversed(events) if event.kind in ("lost", "repair")), "repair") == "lost":
        return "repair"
    last_state = next((event.kind for event in reversed(events) if event.kind in _STATE_KINDS), None)
    return "pause" if last_state in ("start", "resume") else "note"


def describe_takeover(kind: str, step: int, source: str, *, has_failed: bool) -> str:
    """Return the text of an event of this kind, which says why a run that took steps is paused."""
    reason = "; it pauses until run.resume(), since another notebook has it now"
    return f"{TAKEN_OVER} at step {step:,}{source}{reason if kind in ('pause', 'repair') and not has_failed else ''}"


def read_history(
    folder: Path, *, ranks_per_replica: int, list_unread_ranks: Callable[[int], set[int]] = lambda _: set()
) -> History:
    """Return the history as far as it was written.

    A last step without rows of ranks that still have them on disk, by `list_unread_ranks(step)`, is left out.
    """
    history = History(ranks_per_replica=ranks_per_replica)
    rows = np.frombuffer(_read_complete_records(folder / _ROWS_FILE), ROW_DTYPE)
    rows = _drop_cut_step(rows, list_unread_ranks)
    items: list[LogItem] = []
    unreadable = 0
    for line in _read_complete_records(folder / _EVENTS_FILE).splitlines():
        try:
            item = decode_fields(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            item = None
        if isinstance(item, LogItem):
            items.append(item)
        else:
            unreadable += 1
    history.append_recorded(rows, items)
    if unreadable:
        text = f"{format_count(unreadable, 'line')} of this log can't be read and were left out: the file was damaged"
        history.add(Event(int(rows["step"][-1]) + 1 if len(rows) else 0, "error", text, time.time()))
    return history


def _drop_cut_step(rows: np.ndarray, list_unread_ranks: Callable[[int], set[int]]) -> np.ndarray:
    """Return the rows without those of a last step that a full disk or the notebook's end has cut off."""
    if not len(rows):
        return rows
    step = int(rows["step"][-1])
    begin = int(np.flatnonzero(rows["step"] != step).max(initial=-1)) + 1
    return rows[:begin] if list_unread_ranks(step) > set(rows["rank"][begin:].tolist()) else rows


def _read_complete_records(path: Path) -> bytes:
    """Return the records of a file without one that was cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # its writer ended before the first record
        return b""
    size = len(data) // ROW_DTYPE.itemsize * ROW_DTYPE.itemsize if path.name == _ROWS_FILE else data.rfind(b"\n") + 1
    return data[:size]
