"""Calls that ipyparallel delivers to agents and engines by reference."""

from __future__ import annotations

import os
import pickle
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class AgentCall:
    """Callable that ipyparallel sends by reference, like :class:`dtkit.engine.entrypoint.Entrypoint`."""

    def __call__(self, message: bytes) -> list[bytes]:
        """Call a function of :mod:`dtkit.cluster.agent.host_agent`; return its pickled value, or its error's text."""
        from dtkit.cluster.agent import host_agent

        # unpickles: a request of the notebook, which has the cluster's key
        operation, arguments = pickle.loads(message)
        try:
            value = getattr(host_agent.get_agent(), operation)(**arguments)
        # broad: the notebook raises it
        except Exception as error:  # noqa: BLE001
            return [pickle.dumps((False, f"{type(error).__name__}: {error}"))]
        return [pickle.dumps((True, value))]


class IdentifyCall:
    """Callable that returns which process of which host an engine is."""

    def __call__(self) -> list[bytes]:
        """Return the pickled (hostname, pid), in the form of an agent's reply."""
        return [pickle.dumps((True, (socket.gethostname(), os.getpid())))]


def dump_call(operation: str, arguments: Mapping[str, Any]) -> bytes:
    """Return the message of a call."""
    return pickle.dumps((operation, dict(arguments)), protocol=pickle.HIGHEST_PROTOCOL)
