"""How engines of this host have ended: their parent, which alone is told, notes it in the cluster's folder."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_KNOWN_CAUSES = {
    signal.SIGKILL: "which the kernel sends when memory runs out",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGBUS: "a crash in compiled code, or full shared memory",
    signal.SIGABRT: "a crash in compiled code",
    signal.SIGTERM: "which a scheduler sends as a job ends",
}


def write_exit_code(folder: Path, pid: int, code: int) -> None:
    """Note the exit code of a process: its exit status, or the number of a signal, negative."""
    with contextlib.suppress(OSError):  # the cluster's folder is being removed
        _get_path(folder, pid).write_text(str(code))


def read_exit_code(folder: Path, pid: int) -> int | None:
    """Return the exit code of a process that its parent has reaped, or None if it is unknown."""
    try:
        return int(_get_path(folder, pid).read_text())
    except (OSError, ValueError):
        return None


def describe_exit(code: int | None) -> str:
    """Return a text such as " (exit status 3)"; empty if the code is unknown."""
    if code is None:
        return ""
    if code >= 0:
        return f" (exit status {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f" (killed by signal {-code})"
    cause = _KNOWN_CAUSES.get(signal.Signals(-code))
    return f" (killed by signal {-code}, {name}{f', {cause}' if cause else ''})"


def get_code(status: os.waitid_result) -> int:
    """Return the exit code that `os.waitid` reports."""
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _get_path(folder: Path, pid: int) -> Path:
    return folder / f"exit-{pid}"
