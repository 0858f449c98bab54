"""Process 1 of a host: sets its name and mounts its private folders, then reaps processes that have ended.

Usage: python init.py NAME FILE_FOR_ETC_HOSTS. Runs in new namespaces, and prints "ready" when the host is.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PRIVATE_FOLDERS = ("/tmp", "/dev/shm", "/run")


def main(name: str, hosts_file: str) -> None:
    """Set the host up, and reap forever."""
    socket.sethostname(name)
    for folder in PRIVATE_FOLDERS:
        _mount("-t", "tmpfs", "-o", "mode=1777", f"dtkit-{name}", folder)
    _mount("--bind", hosts_file, "/etc/hosts")
    Path("/run/sshd").mkdir(mode=0o755)  # sshd ends without a word if this is missing
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    print("ready", flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
