"""The process that outlives the notebook: it ends a cluster's processes when nobody owns them any more.

The notebook holds a lock on a file in the cluster's folder. The system gives the lock up when the notebook ends, in
whatever way; nobody has to notice in time, and no heartbeat can be late. When the lock has been free for as long as
the lease says, the warden ends every process of the cluster by SIGKILL, so an engine that is stopped, stuck in a
lock or holds the GIL ends too. It then deletes the cluster's shared-memory files and its folder. SIGTERM from the
notebook (`close`) does the same at once.

Processes are known by pid and start time, so a pid that was used again is left alone. Run as
``python -m dtkit.cluster.reaper FOLDER``; it needs neither torch nor ipyparallel.
"""

from __future__ import annotations

import collections
import contextlib
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

from dtkit._util import files
from dtkit.rpc import shared_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

LOCK_FILE, MEMBERS_FILE, JOB_FLAG = "owner.lock", "members.json", "job"
POLL_PERIOD_S = 0.5
TERM_GRACE_S = 1.0  # between SIGTERM and SIGKILL on `close`
MARKER_VARIABLE = "IPP_PROFILE_DIR"  # ipyparallel gives it to whatever a cluster starts, and children inherit it
_MAX_KILL_ROUNDS = 5  # what was forked while others were being killed is found in the next round


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """Start the warden of a folder that has its lock and its members. It inherits SIGTERM blocked, and lets it through
    once it can act on it: asked to end everything while it still loads, it does so.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        command = [sys.executable, "-m", "dtkit.cluster.reaper", str(folder)]
        nowhere = subprocess.DEVNULL  # it may outlive us, and would hold whatever pipe we write to
        return subprocess.Popen(command, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_members(folder: Path, pids: list[int], lease_s: float, job_lease_s: float) -> None:
    """Tell the warden which processes are this cluster's. Atomic: it never reads half a file."""
    members = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            members.append([pid, psutil.Process(pid).create_time()])
    text = json.dumps({"members": members, "lease_s": lease_s, "job_lease_s": job_lease_s})
    files.replace_file(folder / MEMBERS_FILE, text)


_descriptors: dict[Path, int] = {}  # of the locks that this process holds
_holder_counts: collections.Counter[Path] = collections.Counter()  # how many want each
# locks: while a file is locked, which is tried once
_table_lock = threading.Lock()


def acquire_lock(folder: Path, timeout: float = 5.0) -> None:
    """Own the cluster, until `release_lock`. The warden holds the lock for moments only, so it is tried again.

    A lock belongs to the process, not to who took it in there: a second one would get it too, and whoever closes any
    descriptor of the file gives it up for both. So there is one descriptor, and a count of those who hold it.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            _acquire_or_share(folder)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            pause.wait(0.01)
        else:
            return


def _acquire_or_share(folder: Path) -> None:
    with _table_lock:
        if folder not in _descriptors:
            _descriptors[folder] = _open_locked(folder)
        _holder_counts[folder] += 1


def _open_locked(folder: Path) -> int:
    """A descriptor that holds the lock. BlockingIOError where another process does."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def release_lock(folder: Path) -> None:
    """Own it no longer; the last holder in this process gives it up. In a process that was forked it does nothing."""
    with _table_lock:
        if folder not in _descriptors:
            return
        _holder_counts[folder] -= 1
        if not _holder_counts[folder]:
            del _holder_counts[folder]
            os.close(_descriptors.pop(folder))


def _reset_after_fork() -> None:
    """A child holds none of its parent's locks; the table may have been in use as it was copied."""
    global _table_lock  # noqa: PLW0603 - nobody in the child could release the old one
    # locks: while a file is locked, which is tried once
    _table_lock = threading.Lock()
    _holder_counts.clear()
    while _descriptors:
        os.close(_descriptors.popitem()[1])  # which takes nothing from the parent


os.register_at_fork(after_in_child=_reset_after_fork)


def _is_owned_elsewhere(folder: Path) -> bool:
    """Whether another process holds the lock. One that holds it must not ask: it would give it up."""
    with (folder / LOCK_FILE).open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _find_processes(folder: Path) -> list[psutil.Process]:
    """The cluster's processes that still live: its members, their descendants, and whoever carries its mark.

    The mark finds what no list can: what was forked while the list was made, or by a parent that is gone (the
    controller's schedulers), or by a start that was killed half-way.
    """
    found = [process for process in psutil.process_iter() if _is_marked(process, folder)]
    for pid, created in _read_members(folder)["members"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                found += [process, *process.children(recursive=True)]
    return [process for process in dict.fromkeys(found) if _is_running(process)]


def _read_members(folder: Path) -> Any:
    """What `write_members` wrote; of a folder that somebody removed, that there are none, and no lease."""
    try:
        return json.loads((folder / MEMBERS_FILE).read_text())
    except FileNotFoundError:
        return {"members": [], "lease_s": 0.0, "job_lease_s": 0.0}


def _is_marked(process: psutil.Process, folder: Path) -> bool:
    """Whether a process was started by the cluster of this folder, by the environment that it inherited."""
    with contextlib.suppress(psutil.Error, OSError):
        return bool(process.environ().get(MARKER_VARIABLE) == str(folder))
    return False


def kill_members(folder: Path, pids: Iterable[int]) -> None:
    """End those of these processes that are the cluster's of this folder, at once."""
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
    """Send a signal and wait until all have ended, at most so long. (A zombie has: its parent may never ask.)"""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while any(map(_is_running, processes)) and time.monotonic() < deadline:
        pause.wait(0.02)


def _end_cluster(folder: Path, grace_s: float) -> None:
    """End all processes, then delete what they leave."""
    if grace_s:
        _signal_and_wait(_find_processes(folder), signal.SIGTERM, grace_s)
    for _ in range(_MAX_KILL_ROUNDS):
        if not (processes := _find_processes(folder)):
            break
        _signal_and_wait(processes, signal.SIGKILL, 5.0)
    shared_memory.remove_owned_files(shared_memory.ProcessId.from_pid())
    shutil.rmtree(folder, ignore_errors=True)


def main(folder: Path) -> None:
    """Watch until the lease is over or SIGTERM comes."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    free_since: float | None = None
    while not asked.wait(POLL_PERIOD_S):
        if not folder.exists():  # nobody can take over what is left, or find it: the mark does
            break
        lease = _read_members(folder)
        if _is_owned_elsewhere(folder):
            free_since = None
            continue
        free_since = free_since or time.monotonic()
        limit = lease["job_lease_s"] if (folder / JOB_FLAG).exists() else lease["lease_s"]
        if time.monotonic() - free_since >= limit:
            _end_cluster(folder, grace_s=0)
            return
    _end_cluster(folder, TERM_GRACE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
