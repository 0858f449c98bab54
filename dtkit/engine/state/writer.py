"""Writing a checkpoint beside the training: state is copied between two steps, and a thread writes the copies.

What came of it stands in a file of its own, ``report-000.json``, in the folder where the rank's tensors go: the
notebook looks for it there, and no engine has to be asked while it computes. One save is at work at a time; the next
one waits for it, so that memory holds one copy at most.

Where it pays. Training stands still for the copy alone, about a tenth of the time until all is written: 0.04 s for
0.40 s with 50 MB on two ranks, 0.08 s for 0.65 s with 200 MB. But the thread computes digests and has the system copy,
which takes a core. Where ranks leave none free, steps get longer by what the writing takes, and as many are taken as if
training had stood still for it (0.89 to 1.07 of them, with two engines on two crowded cores and a local disk). More can
only be taken where a core is free or writing waits: on GPUs, over a network; that was not measured.
``python -m tests.bench saving`` does so.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.files import write_synced
from dtkit.checkpoint import safetensors_file
from dtkit.checkpoint.folders import TOKEN_FILE, get_rank_filename, get_report_filename
from dtkit.checkpoint.json_values import UnsupportedValueError
from dtkit.checkpoint.safetensors_file import SAFETENSORS_NAMES, FileReader
from dtkit.engine.state.capture import ShardedState, capture_state, restore_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.job import Job

PREVIOUS_SAVE_TIMEOUT_S = 600.0  # for the save before
_RESERVED_REPORT_BYTES = 4096  # bytes: an error fits in
_PARTIALLY_UPDATED_MESSAGE = "an update of its parameters failed half-way, so they are of no step"


class CheckpointWriter:
    """This process's saves, one after the other."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start_save(self, job: Job, folder: str, token: str, state: ShardedState | None = None) -> dict[str, Any]:
        """Copy a job's state and begin to write it. A collective, unless it is given what was `captured` already.

        {"error": why this rank can't, or None; "seconds": for which training stood still, ...}; nothing is raised that
        would be the disk's or the state's fault, since training goes on.
        """
        begun = time.perf_counter()
        rank = 0 if job.context.group is None else job.context.group.rank
        error = (
            self._wait_for_previous()
            or _check_same_folder(Path(folder), token)
            or (_PARTIALLY_UPDATED_MESSAGE if job.partially_updated else None)
        )
        try:
            state = capture_state(job) if state is None else state
        except UnsupportedValueError as problem:
            error = str(problem)
        error = error or _reserve_report(Path(folder), rank)
        if error is None and state is not None:
            self._thread = threading.Thread(
                target=_write_files, args=(Path(folder), rank, state), name="dtkit-checkpoint"
            )
            self._thread.start()
        told = None if error is None else f"rank {rank} on {socket.gethostname()}: {error}"
        return {"error": told, "seconds": time.perf_counter() - begun, "torch": torch.__version__}

    def _wait_for_previous(self) -> str | None:
        """Once the save before is done: what keeps the next one from beginning, if anything."""
        if self._thread is not None:
            self._thread.join(PREVIOUS_SAVE_TIMEOUT_S)
            if self._thread.is_alive():
                return f"the save before is still being written after {PREVIOUS_SAVE_TIMEOUT_S:.0f} s"
        return None


def _check_same_folder(folder: Path, token: str) -> str | None:
    """Whether this process sees the notebook's folder, and not another of the same name."""
    with contextlib.suppress(OSError):
        if (folder / TOKEN_FILE).read_text(encoding="utf-8") == token:
            return None
    return (
        f"it does not see {folder.parent} as the notebook does. A checkpoint goes to a folder that the notebook and "
        "all engines share; on several hosts that is one on a network file system"
    )


def _write_files(folder: Path, rank: int, state: ShardedState) -> None:
    """Write a rank's file, and then what came of it."""
    path = folder / get_rank_filename(rank)
    try:
        _write_report(folder, rank, _write_tensors(path, state))
    except (OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            path.unlink()
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        with contextlib.suppress(OSError):  # then the notebook misses the report, and says so
            _write_report(folder, rank, {"error": f"rank {rank} on {socket.gethostname()}: {why}"})


def _reserve_report(folder: Path, rank: int) -> str | None:
    """Make room for the word of what came of it, which a full disk would not take: why that can't be done, if so."""
    try:
        write_synced(_get_partial_report_path(folder, rank), " " * _RESERVED_REPORT_BYTES)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def _write_report(folder: Path, rank: int, report: Mapping[str, Any]) -> None:
    """In the room that is there, as far as it goes; under its name once it is whole."""
    with _get_partial_report_path(folder, rank).open("r+", encoding="utf-8") as file:
        file.write(json.dumps(report))
        file.flush()
        os.fsync(file.fileno())
        file.truncate()
    _get_partial_report_path(folder, rank).replace(folder / get_report_filename(rank))


def _get_partial_report_path(folder: Path, rank: int) -> Path:
    return folder / f".{get_report_filename(rank)}"


def _write_tensors(path: Path, state: ShardedState) -> dict[str, Any]:
    slabs = state.shards
    told = {
        name: [
            SAFETENSORS_NAMES[s.tensor.dtype],
            list(s.full_shape),
            [[list(at), list(size), row] for at, size, row in s.split_blocks()],
        ]
        for name, s in slabs.items()
    }
    written = safetensors_file.write_tensors(path, {name: slab.tensor for name, slab in slabs.items()})
    return {"file": {path.name: written}, "slabs": told, "facts": state.facts}


def restore_checkpoint(
    job: Job, folder: str, index: Mapping[str, Any], files: Sequence[str], facts: Mapping[str, Any]
) -> tuple[int, float, dict[str, tuple[Any, Any]]]:
    """Put a checkpoint's state into a job. A collective. (step, learning rate, options that it overruled)."""
    with FileReader(Path(folder), index, files, facts) as reader:
        overruled = restore_state(job, reader)
    return job.step, job.lr, overruled
