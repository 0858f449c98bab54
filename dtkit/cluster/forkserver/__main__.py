"""Start of a fork server: ``python -m dtkit.cluster.forkserver FOLDER DESCRIPTOR [AGENT_PID]``.

The server of an agent ends with it, and its engines end with the server.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from dtkit._util.process import end_with_parent
from dtkit.cluster.forkserver import engine
from dtkit.cluster.forkserver.server import ForkServer


def main(folder: Path, listener: socket.socket, agent_pid: int | None) -> None:
    """Serve; in a forked process, run the engine."""
    if agent_pid is not None:
        end_with_parent(agent_pid)
    engine.load()
    server_pid = os.getpid()
    ForkServer(listener, folder).serve()
    if agent_pid is None:
        engine.become_engine(folder / "log")
    else:
        engine.become_remote_engine(folder / "log", server_pid)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        socket.socket(fileno=int(sys.argv[2])),  # port: a file in the cluster's private folder
        int(sys.argv[3]) if len(sys.argv) > 3 else None,
    )
