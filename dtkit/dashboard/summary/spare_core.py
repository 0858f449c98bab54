"""Whether a view may draw without slowing the training: some core is left to it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from dtkit._util.resources import count_cores

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView


def has_spare_core(run: RunView) -> bool:
    """Return whether this host has more cores than the run's engines on it have threads."""
    own = [node for node in run.nodes if node.host == socket.gethostname() and node.device == "cpu"]
    return sum(node.threads for node in own) < count_cores()
