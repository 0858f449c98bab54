"""The state that survivors gave, while a job is made anew: it is nowhere else then.

It lies in shared memory, which ends with the cluster and not with the notebook. What it takes to find it again is put
down in the run's folder (see :mod:`dtkit.history.run_log`) for as long as that lasts: should the notebook die in the
midst of a recovery, the one that takes the cluster over makes it again, with that state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING

from dtkit.history.run_log import RUNS_FOLDER
from dtkit.rpc import pickling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dtkit.rpc.payload import Payload

_FILENAME = "rescued.pkl"


@dataclasses.dataclass(frozen=True)
class RecoveredState:
    """Of this step, in these shipments."""

    step: int
    payloads: tuple[Payload, ...]
    source: str = ""
    """Where the state comes from, in words, unless survivors stood there."""

    @contextlib.contextmanager
    def keep_during_recovery(self, folder: Path, job: str, *, is_owned: Callable[[], bool]) -> Iterator[None]:
        """Put down for whoever takes over meanwhile, who needs it then; else, while it is `ours`, freed at the end."""
        self._save(folder, job)
        try:
            yield
        finally:
            if is_owned():
                self.discard(folder, job)

    def discard(self, folder: Path, job: str) -> None:
        """Free the shared memory, and forget where it was."""
        _get_path(folder, job).unlink(missing_ok=True)
        for shipment in self.payloads:
            shipment.discard()

    def _save(self, folder: Path, job: str) -> None:
        """Unless nobody will take this run over; that the disk is full is no reason not to recover."""
        path = _get_path(folder, job)
        if not path.parent.is_dir():
            return
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(pickling.dumps(self))
            part.replace(path)


def list_jobs(folder: Path) -> list[str]:
    """Of a cluster: whose state a notebook was about to put back when it ended."""
    return sorted(path.parent.name for path in folder.glob(f"{RUNS_FOLDER}/*/{_FILENAME}"))


def load_interrupted(folder: Path, job: str) -> RecoveredState | None:
    """What a notebook put down that ended in the midst of a recovery."""
    path = _get_path(folder, job)
    # unpickles: written by this user's earlier notebook; nobody else can write to its folder
    return pickling.loads(path.read_bytes()) if path.exists() else None


def _get_path(folder: Path, job: str) -> Path:
    return folder / RUNS_FOLDER / job / _FILENAME
