"""Identity of a process. Pids are reused, so a process is identified by its pid and its start time."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import signal
import sys

import psutil

from dtkit._util import timeouts
from dtkit._util.deadline import wait_until


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """One process of this host. Compare with `matches`, since start times shift when the system's clock is set."""

    pid: int
    start_time: float
    """Seconds since the epoch."""

    @classmethod
    def from_pid(cls, pid: int | None = None) -> ProcessId:
        """Return the identity of a process, by default this one. Raise ProcessLookupError if there is none."""
        pid = os.getpid() if pid is None else pid
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(errno.ESRCH, f"no process with pid {pid} is running; name one that is") from None

    def matches(self, other: ProcessId) -> bool:
        """Return whether both identify the same process."""
        difference = abs(self.start_time - other.start_time)
        return self.pid == other.pid and difference <= timeouts.PROCESS_START_TOLERANCE_S

    def find(self) -> psutil.Process | None:
        """Return the process, also as a zombie; None if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if self.matches(ProcessId(self.pid, process.create_time())):
                return process
        return None

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        with contextlib.suppress(psutil.Error):
            process = self.find()
            return process is not None and process.status() != psutil.STATUS_ZOMBIE
        return False

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait for the process to end, and return whether it has. A large one takes a while after its last sign."""
        return wait_until(lambda: not self.is_alive, timeout_s)

    def wait_until_reaped(self, timeout_s: float) -> bool:
        """Wait for the parent of a process that has ended to take note of that, and return whether it has."""
        return wait_until(lambda: self.find() is None, timeout_s)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Let Linux make this process the parent of descendants whose parent ends, so that it can reap them.

    No-op on other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent_pid: int) -> None:
    """Let Linux kill this process when the thread that has started it ends. Ends it now if its parent has ended.

    No-op on other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
