"""Start of the fork server of one cluster: ``python -m dtkit.cluster.forkserver FOLDER DESCRIPTOR``."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from dtkit.cluster.forkserver import engine
from dtkit.cluster.forkserver.server import ForkServer


def main(folder: Path, listener: socket.socket) -> None:
    """Serve; in a forked process, run the engine."""
    engine.load()
    ForkServer(listener).serve()
    engine.become_engine(folder / "log")


if __name__ == "__main__":
    main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))  # port: a file in the cluster's private folder
