"""Worker processes that run user code for an engine: those of torch's DataLoader.

They are forked, so that they have everything defined in a notebook, and share memory. The system ends them when their
engine ends.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

import torch

from dtkit._util.process import end_with_parent


def make_worker_loader(
    dataset: torch.utils.data.Dataset[Any], num_workers: int, **options: Any
) -> torch.utils.data.DataLoader[Any]:
    """Return a DataLoader whose workers are forked, and return each item of the dataset as it is."""
    # waits: the user's code; torch checks every 5 s that its workers are alive
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_identity,
        worker_init_fn=_WorkerInit(os.getpid()),
        multiprocessing_context="fork" if sys.platform.startswith("linux") else None,
        generator=torch.Generator().manual_seed(0),  # without it, torch draws from the job's random numbers
        **options,
    )


def start_workers(loader: torch.utils.data.DataLoader[Any]) -> Any:
    """Fork the workers, or restart those that exist; return the iterator.

    Workers end with the calling thread, the main thread.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # Python 3.12: of a process with threads
        return iter(loader)


def _identity(batch: Any) -> Any:
    return batch


class _WorkerInit:
    """Function that a worker process calls first."""

    def __init__(self, engine_pid: int) -> None:
        self._engine_pid = engine_pid

    def __call__(self, _worker_id: int) -> None:
        """Ignore interrupts, and have the system end this process with the engine."""
        # The descriptor is the engine's, which would treat this process's interrupt as its own.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent(self._engine_pid)
