"""Stacks that a process of this host writes upon a signal, when its watchdog is silent.

faulthandler writes all stacks from C. This needs no interpreter, and the frames are stable because no Python runs. A
stopped process gets no signal, since it would reply later. The process that signals must be on the same host: the
notebook, or the host's agent. It signals only a process with a known start time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.process import ProcessId
from dtkit.health.status import get_dump_path

if TYPE_CHECKING:
    from pathlib import Path


def get_process_state(pid: int, start_time: float) -> str:
    """Return a process's state on this host; "ended" also if another process has its pid."""
    import psutil

    try:
        process = ProcessId(pid, start_time).find()
        if process is None:
            return "ended"
        status = str(process.status())
    except psutil.NoSuchProcess:
        return "ended"
    except psutil.Error:  # no permission
        return "unknown"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "ended"
    return "running" if status == psutil.STATUS_RUNNING else "sleeping"


def dump_stacks(folder: Path, rank: int, pid: int, process_state: str) -> str:
    """Let a process write its stacks, and return them; empty if it can't.

    The process must have a handler: without one, the signal would end it.
    """
    if process_state not in ("running", "sleeping"):
        return ""
    try:
        return _signal_and_read(get_dump_path(folder, rank), pid)
    except OSError:  # the process has just ended, or the folder is gone
        return ""


def _signal_and_read(path: Path, pid: int) -> str:
    """Signal a process, and return the text that it appends to the file."""
    begin = path.stat().st_size
    os.kill(pid, signal.SIGUSR1)
    pause, deadline, size = threading.Event(), time.monotonic() + timeouts.STACK_DUMP_TIMEOUT_S, begin
    while time.monotonic() < deadline:
        pause.wait(timeouts.STACK_DUMP_POLL_S)
        before, size = size, path.stat().st_size
        if begin < size == before:
            break
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
