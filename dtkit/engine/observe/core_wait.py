"""How long the training thread waited for a core, as the kernel measures it.

The second number of ``/proc/thread-self/schedstat`` is the time in nanoseconds in which a thread was ready to run while
other threads had the cores. A thread that sleeps, or waits for data, a lock or a message, isn't ready and adds none.
See https://docs.kernel.org/scheduler/sched-stats.html.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

_FILE = Path("/proc/thread-self/schedstat")


def read_core_wait_s(file: Path = _FILE) -> float | None:
    """Return the seconds that the calling thread has waited for a core; None where the kernel doesn't count them."""
    try:
        run_ns, wait_ns, _ = map(int, file.read_text().split())
    except (OSError, ValueError):
        return None
    return wait_ns / 1e9 if run_ns else None  # without these counts, a kernel reports zeros


class CoreWait:
    """Seconds of dispatches, and those in which their thread waited for a core. The training thread calls all methods.

    Threads that compute for this one, such as torch's own, are not counted.
    """

    def __init__(self) -> None:
        self._begun: tuple[int, float, float] | None = None
        self._waited_s = self._seconds = 0.0

    def start(self) -> None:
        """Begin to count, with a dispatch: the time between dispatches doesn't count."""
        waited_s = read_core_wait_s()
        self._begun = None if waited_s is None else (threading.get_ident(), time.perf_counter(), waited_s)

    def stop(self) -> None:
        """Add what was counted since the start; no-op without one."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != threading.get_ident():
            return
        waited_s = read_core_wait_s()
        if waited_s is not None:
            self._seconds += time.perf_counter() - begun[1]
            self._waited_s += waited_s - begun[2]

    def take(self) -> tuple[float, float] | None:
        """Return (seconds that the thread waited, seconds of its dispatches) since the last call; None without any."""
        counted = self._waited_s, self._seconds
        self._waited_s = self._seconds = 0.0
        return counted if counted[1] > 0 else None
