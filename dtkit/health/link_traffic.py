"""Traffic of a connection between two hosts, as an engine reports it in its status."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LinkTraffic:
    """One connection of an engine to a rank of another host, as the engine's kernel counts since its start."""

    local: tuple[str, int]
    """Address and port of this end."""
    remote: tuple[str, int]
    acked_bytes: int
    busy_s: float
    """Seconds in which sent bytes waited for the network, not for the receiver."""
    rate: float
    """Last speed that the kernel measured, in bytes per second."""
