"""A notebook's lease on a cluster: a lock, and the reaper, which ends the processes when the lock is free."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from typing import TYPE_CHECKING

import psutil

from dtkit._util import timeouts
from dtkit._util.deadline import wait_until
from dtkit._util.process import ProcessId
from dtkit.cluster import reaper

if TYPE_CHECKING:
    from pathlib import Path


class Lease:
    """Lock and reaper of one cluster folder."""

    reaper: ProcessId
    """Process that ends the cluster after the lock has been free for too long."""

    def __init__(self, folder: Path, lease_s: float, job_lease_s: float) -> None:
        self._folder, self._lease_s, self._job_lease_s = folder, lease_s, job_lease_s
        # locks: while trying to lock the file
        self._state_lock = threading.Lock()
        self._holds_file_lock = self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, folder: Path, lease_s: float, job_lease_s: float) -> Lease:
        """Take the lock, and start the reaper."""
        lease = cls(folder, lease_s, job_lease_s)
        lease._acquire(timeouts.LOCK_TIMEOUT_S)
        lease.write_members([])
        lease._process = reaper.start_reaper(folder)
        lease.reaper = ProcessId.from_pid(lease._process.pid)
        return lease

    @classmethod
    def take_over(cls, folder: Path, lease_s: float, job_lease_s: float, reaper_id: ProcessId) -> Lease:
        """Use the reaper of another notebook, and take the lock when that notebook frees it."""
        lease = cls(folder, lease_s, job_lease_s)
        lease.reaper = reaper_id
        threading.Thread(target=lease._acquire_when_free, name="dtkit-lock", daemon=True).start()
        return lease

    def write_members(self, pids: list[int]) -> None:
        """Report all processes that run now to the reaper."""
        reaper.write_members(self._folder, pids, self._lease_s, self._job_lease_s)

    def release(self) -> None:
        """Free the lock, because another notebook owns the cluster or the cluster has ended. Idempotent."""
        with self._state_lock:
            self._is_closed = True
            if self._holds_file_lock:
                self._holds_file_lock = False
                reaper.release_lock(self._folder)

    def end_cluster(self) -> None:
        """Let the reaper end all processes at once, and wait for it. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=timeouts.REAPER_EXIT_TIMEOUT_S)
            self._process = None
        elif self.reaper.is_alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.reaper.pid).terminate()
            wait_until(lambda: not self.reaper.is_alive, timeouts.REAPER_EXIT_TIMEOUT_S)
        self.release()

    def _acquire_when_free(self) -> None:
        """Take the lock as soon as the other notebook frees it."""
        pause = threading.Event()
        while not self._is_closed:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                self._acquire(0.0)
                return
            pause.wait(timeouts.OWNERSHIP_RETRY_S)

    def _acquire(self, timeout: float) -> None:
        with self._state_lock:  # otherwise, a lock taken while another thread closes would never be freed
            if not self._is_closed:
                reaper.acquire_lock(self._folder, timeout)
                self._holds_file_lock = True
