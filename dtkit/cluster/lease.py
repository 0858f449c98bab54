"""A notebook's hold on the processes of a cluster: a lock, and the reaper that ends them when the lock is free."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import psutil

from dtkit._util import timeouts
from dtkit._util.process import ProcessId
from dtkit.cluster import reaper

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Lease:
    """Lock and reaper of one cluster folder."""

    def __init__(self, folder: Path, lease_s: float, job_lease_s: float, reaper_id: ProcessId | None = None) -> None:
        """Start a reaper; or, given the one of another notebook, take the lock when that is free."""
        self._folder, self._lease_s, self._job_lease_s = folder, lease_s, job_lease_s
        # locks: for a try to lock a file
        self._lock, self._holds_lock, self._is_closed = threading.Lock(), False, False
        self._process: subprocess.Popen[bytes] | None = None
        if reaper_id is None:
            self._acquire(timeouts.LOCK_TIMEOUT_S)
            self.write_members([])
            self._process = reaper.start_reaper(folder)
            self.reaper = ProcessId.from_pid(self._process.pid)
        else:
            self.reaper = reaper_id
            threading.Thread(target=self._acquire_when_free, name="dtkit-lock", daemon=True).start()

    def write_members(self, pids: list[int]) -> None:
        """Report all processes that run by now to the reaper."""
        reaper.write_members(self._folder, pids, self._lease_s, self._job_lease_s)

    def release(self) -> None:
        """Free the lock: another notebook has the cluster, or it has ended. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._holds_lock:
                self._holds_lock = False
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
        with self._lock:  # a lock that is taken while another thread closes would never be freed
            if not self._is_closed:
                reaper.acquire_lock(self._folder, timeout)
                self._holds_lock = True


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until `condition` is true; return whether it became true in time."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(timeouts.PROCESS_POLL_S)
    return True
