"""Ending an agent when its SSH connection ends.

When a connection ends, SSH doesn't signal a process without a terminal. But the server closes the other end of the
process's output. `poll` reports that at once, even if the process never writes.
"""

from __future__ import annotations

import os
import select
import stat
import threading

_OUTPUT = 1


def exit_on_hangup() -> None:
    """Let a thread end this process when its output is closed. No-op if the output is a file or a terminal."""
    mode = os.fstat(_OUTPUT).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        output = os.dup(_OUTPUT)  # stays open if stdout is closed or replaced
        threading.Thread(target=_wait_and_exit, args=(output,), name="dtkit-hangup", daemon=True).start()


def _wait_and_exit(output: int) -> None:
    poll = select.poll()
    poll.register(output, 0)  # errors and hang-ups alone
    poll.poll()
    os._exit(0)  # the host's reaper ends the engines and deletes the files
