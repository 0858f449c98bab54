"""The reaper: a process that outlives the notebook, and ends a cluster's processes when nobody owns them any more.

The notebook holds a lock on a file in the cluster's folder. However the notebook ends, the system frees the lock, so no
heartbeats are needed. When the lock has been free for the length of the lease, the reaper ends every process of the
cluster. It uses SIGKILL, which also ends stopped and stuck engines. It then deletes the cluster's shared-memory files
and its folder. On SIGTERM from the notebook (`close`), it does the same at once.

It runs as ``python -m dtkit.cluster.reaper FOLDER``, without torch and ipyparallel.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dtkit._util import files, timeouts
from dtkit._util.deadline import wait_until
from dtkit._util.process import ProcessId
from dtkit.rpc import shared_memory
from dtkit.rpc.cluster_folder import JOB_FLAG

if TYPE_CHECKING:
    from collections.abc import Iterable

LOCK_FILE, MEMBERS_FILE = "owner.lock", "members.json"
MARKER_VARIABLE = "IPP_PROFILE_DIR"
"""Environment variable of every process that ipyparallel starts for a cluster, which children inherit."""
_MAX_KILL_ROUNDS = 5
"""Each round finds processes that were forked during the one before."""


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """Start the reaper of a folder that has its lock and its list of members.

    The reaper inherits SIGTERM blocked and unblocks it when it can handle it, so that no early SIGTERM is lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        command = [sys.executable, "-m", "dtkit.cluster.reaper", str(folder)]
        null = subprocess.DEVNULL  # the reaper may outlive this process, and would keep its pipes open
        return subprocess.Popen(command, start_new_session=True, stdin=null, stdout=null, stderr=null)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_members(folder: Path, pids: list[int], lease_s: float, job_lease_s: float) -> None:
    """Report this cluster's processes and leases to the reaper."""
    members = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            members.append(dataclasses.astuple(ProcessId.from_pid(pid)))
    text = json.dumps({"members": members, "lease_s": lease_s, "job_lease_s": job_lease_s})
    files.replace_file(folder / MEMBERS_FILE, text)


_descriptors: dict[Path, int] = {}  # of the lock files that this process has locked
_holder_counts: collections.Counter[Path] = collections.Counter()  # number of threads that hold each lock
# locks: while a file is locked, which is tried once
_table_lock = threading.Lock()


def acquire_lock(folder: Path, timeout: float = timeouts.LOCK_TIMEOUT_S) -> None:
    """Own the cluster until `release_lock`. Retries, since the reaper may hold the lock for a moment.

    A lock belongs to the whole process, and closing any descriptor of the file frees it. So each process has one
    descriptor, and counts its holders.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            _acquire_or_share(folder)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            pause.wait(timeouts.LOCK_POLL_S)
        else:
            return


def _acquire_or_share(folder: Path) -> None:
    with _table_lock:
        if folder not in _descriptors:
            _descriptors[folder] = _open_locked(folder)
        _holder_counts[folder] += 1


def _open_locked(folder: Path) -> int:
    """Lock the file and return its descriptor. Raise BlockingIOError if another process has locked it."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def release_lock(folder: Path) -> None:
    """Release this holder's lock; the last one in this process frees it. No-op in a forked process."""
    with _table_lock:
        if folder not in _descriptors:
            return
        _holder_counts[folder] -= 1
        if not _holder_counts[folder]:
            del _holder_counts[folder]
            os.close(_descriptors.pop(folder))


def _reset_after_fork() -> None:
    """Drop the parent's locks, which a child doesn't hold. The table may have been in use during the fork."""
    global _table_lock  # noqa: PLW0603 - no thread of the child could release the old one
    # locks: while a file is locked, which is tried once
    _table_lock = threading.Lock()
    _holder_counts.clear()
    while _descriptors:
        os.close(_descriptors.popitem()[1])  # the parent keeps its lock


os.register_at_fork(after_in_child=_reset_after_fork)


def _is_owned_elsewhere(folder: Path) -> bool:
    """Return whether another process holds the lock. A holder must not call this, because it would free its lock.

    Raise FileNotFoundError if the folder is being removed.
    """
    with (folder / LOCK_FILE).open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _find_processes(folder: Path) -> list[psutil.Process]:
    """Return the cluster's running processes: its members, their descendants, and those that have its marker.

    The marker also finds orphans, and processes that were forked while the list was written or whose start was
    interrupted.
    """
    processes = [process for process in psutil.process_iter() if _is_marked(process, folder)]
    for pid, start_time in _read_members(folder)["members"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := ProcessId(pid, start_time).find()) is not None:
                processes += [process, *process.children(recursive=True)]
    return [process for process in dict.fromkeys(processes) if _is_running(process)]


def _read_members(folder: Path) -> Any:
    """Return what `write_members` wrote; no members and no lease if the folder was removed."""
    try:
        return json.loads((folder / MEMBERS_FILE).read_text())
    except FileNotFoundError:
        return {"members": [], "lease_s": 0.0, "job_lease_s": 0.0}


def read_lease_s(folder: Path) -> float:
    """Return the seconds that a cluster's processes live without a notebook, with the job that they may have now."""
    members = _read_members(folder)
    return float(members["job_lease_s" if (folder / JOB_FLAG).exists() else "lease_s"])


def _is_marked(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process inherited this folder's marker in its environment."""
    with contextlib.suppress(psutil.Error, OSError):
        return bool(process.environ().get(MARKER_VARIABLE) == str(folder))
    return False


def kill_members(folder: Path, pids: Iterable[int]) -> None:
    """Kill those of these processes that belong to this folder's cluster."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if _is_marked(process, folder):
                process.kill()


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _signal_and_wait(processes: list[psutil.Process], signum: int, timeout_s: float) -> None:
    """Send a signal, and wait until all have ended or are zombies. Their parents may never reap zombies."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)
    wait_until(lambda: not any(map(_is_running, processes)), timeout_s)


def _kill_below_parents(processes: list[psutil.Process]) -> None:
    """Kill these processes; topmost parents last, so that they reap their children.

    An orphan's zombie stays where the system's first process reaps none, as in many containers.
    """
    parents: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parents[process.pid] = process.ppid()
    above = [process for process in processes if parents.get(process.pid) not in parents]
    below = [process for process in processes if parents.get(process.pid) in parents]
    _signal_and_wait(below, signal.SIGKILL, timeouts.KILL_TIMEOUT_S)
    wait_until(lambda: not any(map(_has_zombies, above)), timeouts.KILL_TIMEOUT_S)
    _signal_and_wait([process for process in above if _is_running(process)], signal.SIGKILL, timeouts.KILL_TIMEOUT_S)


def _has_zombies(process: psutil.Process) -> bool:
    """Return whether it hasn't reaped all that have ended: its own children, and those that they left to it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(not _is_running(child) for child in process.children())
    return False


def _end_cluster(folder: Path, grace_s: float) -> None:
    """End all processes, then delete their files."""
    if grace_s:
        _signal_and_wait(_find_processes(folder), signal.SIGTERM, grace_s)
    for _ in range(_MAX_KILL_ROUNDS):
        if not (processes := _find_processes(folder)):
            break
        _kill_below_parents(processes)
    shared_memory.remove_owned_files(ProcessId.from_pid())
    shutil.rmtree(folder, ignore_errors=True)


def main(folder: Path) -> None:
    """Watch until the lease is over or SIGTERM arrives."""
    is_terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_terminated.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    free_since: float | None = None
    while not is_terminated.wait(timeouts.REAPER_POLL_S):
        limit_s = read_lease_s(folder)
        try:
            if _is_owned_elsewhere(folder):
                free_since = None
                continue
        except FileNotFoundError:
            break  # no notebook can take over without these files; the marker finds the processes
        free_since = free_since or time.monotonic()
        if time.monotonic() - free_since >= limit_s:
            _end_cluster(folder, grace_s=0)
            return
    _end_cluster(folder, timeouts.TERM_GRACE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
