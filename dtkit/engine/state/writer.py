"""Writing of checkpoints while training continues. State is copied between two steps, and a thread writes the copy.

The result is stored as ``report-000.json``, in the folder of the rank's tensors. The notebook reads it there, without a
call to an engine that is computing. Only one save is written at a time, so memory holds at most one copy. Training
pauses only for the copy, but the thread needs a core for digests and for writing.
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

from dtkit._util import timeouts
from dtkit._util.files import write_synced
from dtkit.checkpoint import safetensors_file
from dtkit.checkpoint.folders import TOKEN_FILE, get_rank_filename, get_report_filename
from dtkit.checkpoint.json_values import UnsupportedValueError
from dtkit.checkpoint.safetensors_file import SAFETENSORS_NAMES, FileReader
from dtkit.engine.state.capture import capture_state
from dtkit.engine.state.restore import restore_state, restore_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.state.shards import ShardedState
    from dtkit.engine.state.visitor import StatefulJob
    from dtkit.messages import CheckpointReport

_RESERVED_REPORT_BYTES = 4096  # enough for an error
_PARTIALLY_UPDATED_MESSAGE = "an update of its parameters failed half-way, so they are of no step"


class CheckpointWriter:
    """Writer of this process's checkpoints, one after another."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start_save(
        self,
        job: StatefulJob,
        folder: str,
        token: str,
        state: ShardedState | None = None,
        *,
        staging: Path | None = None,
    ) -> CheckpointReport:
        """Copy a job's state, unless a copy is given, and start to write it. A collective without a copy.

        Where this process doesn't see the folder, it writes into one of its own in `staging`, named by the token.
        An error of the disk or of the state is reported, not raised, since training continues.
        """
        begun = time.perf_counter()
        rank = 0 if job.context.group is None else job.context.group.rank
        target, folder_error = _choose_folder(Path(folder), token, staging)
        error = (
            self._wait_for_previous() or folder_error or (_PARTIALLY_UPDATED_MESSAGE if job.partially_updated else None)
        )
        try:
            state = capture_state(job) if state is None else state
        except UnsupportedValueError as problem:
            error = str(problem)
        error = error or _reserve_report(target, rank)
        if error is None and state is not None:
            self._thread = threading.Thread(target=_write_files, args=(target, rank, state), name="dtkit-checkpoint")
            self._thread.start()
        message = None if error is None else f"rank {rank} on {socket.gethostname()}: {error}"
        seconds, is_remote = time.perf_counter() - begun, target != Path(folder)
        return {"error": message, "seconds": seconds, "torch": torch.__version__, "is_remote": is_remote}

    def _wait_for_previous(self) -> str | None:
        """Wait until the previous save is written. Return why the next one can't start, or None."""
        if self._thread is not None:
            self._thread.join(timeouts.PREVIOUS_SAVE_TIMEOUT_S)
            if self._thread.is_alive():
                return f"the previous save is still being written after {timeouts.PREVIOUS_SAVE_TIMEOUT_S:.0f} s"
        return None


def _choose_folder(folder: Path, token: str, staging: Path | None) -> tuple[Path, str | None]:
    """Return where to write, and why that is impossible, or None."""
    error = _check_same_folder(folder, token)
    if error is None or staging is None:
        return folder, error
    own_folder = staging / token
    try:
        own_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        return own_folder, problem.strerror or type(problem).__name__
    return own_folder, None


def _check_same_folder(folder: Path, token: str) -> str | None:
    """Return why this process doesn't see the notebook's folder, or None if it does."""
    with contextlib.suppress(OSError):
        if (folder / TOKEN_FILE).read_text(encoding="utf-8") == token:
            return None
    return (
        f"it does not see {folder.parent} as the notebook does. The notebook and all engines must share a checkpoint's "
        "folder; on several hosts, use a network file system"
    )


def _write_files(folder: Path, rank: int, state: ShardedState) -> None:
    """Write a rank's tensors, and then its report."""
    path = folder / get_rank_filename(rank)
    try:
        _write_report(folder, rank, _write_tensors(path, state))
    except (OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            path.unlink()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        with contextlib.suppress(OSError):  # the notebook notices a missing report
            _write_report(folder, rank, {"error": f"rank {rank} on {socket.gethostname()}: {reason}"})


def _reserve_report(folder: Path, rank: int) -> str | None:
    """Reserve space for the report, so that it can be written to a full disk. Return an error, or None."""
    try:
        write_synced(_get_partial_report_path(folder, rank), " " * _RESERVED_REPORT_BYTES)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def _write_report(folder: Path, rank: int, report: Mapping[str, Any]) -> None:
    """Write the report into the reserved file, and rename it once it is complete."""
    with _get_partial_report_path(folder, rank).open("r+", encoding="utf-8") as file:
        file.write(json.dumps(report))
        file.flush()
        os.fsync(file.fileno())
        file.truncate()
    _get_partial_report_path(folder, rank).replace(folder / get_report_filename(rank))


def _get_partial_report_path(folder: Path, rank: int) -> Path:
    return folder / f".{get_report_filename(rank)}"


def _write_tensors(path: Path, state: ShardedState) -> dict[str, Any]:
    positions = {
        name: [
            SAFETENSORS_NAMES[shard.tensor.dtype],
            list(shard.full_shape),
            [[list(offset), list(size), list(start)] for offset, size, start in shard.split_blocks()],
        ]
        for name, shard in state.shards.items()
    }
    written = safetensors_file.write_tensors(path, {name: shard.tensor for name, shard in state.shards.items()})
    return {"file": {path.name: written}, "shards": positions, "facts": state.facts}


def restore_checkpoint(
    job: StatefulJob, folder: str, index: Mapping[str, Any], files: Sequence[str], facts: Mapping[str, Any]
) -> tuple[int, float, dict[str, tuple[Any, Any]]]:
    """Restore a job from a checkpoint. A collective.

    Return (step, learning rate, options that the checkpoint overruled).
    """
    with FileReader(Path(folder), index, files, facts) as reader:
        overruled = restore_state(job, reader)
    return job.step, job.lr, overruled


def restore_checkpoint_weights(
    job: StatefulJob, folder: str, index: Mapping[str, Any], files: Sequence[str], facts: Mapping[str, Any]
) -> None:
    """Put a checkpoint's weights back into a job that goes on from its own step. A collective."""
    with FileReader(Path(folder), index, files, facts) as reader:
        restore_weights(job, reader)
