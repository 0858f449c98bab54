"""The door of an engine: ipyparallel calls an `Entrypoint`, which is pickled by reference and imported there.

It is the one place on an engine that knows IPython: it hands whoever serves a way to publish, and the kernel, whose
handling of interrupts is decided there from then on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MIMETYPE = "application/vnd.dtkit.items+json"
_CONNECTION_INFO_VARIABLE = (
    "IPP_CONNECTION_INFO"  # how ipyparallel tells an engine where to connect, and the key: read by now
)


class Entrypoint:
    """Callable with one message of bytes; answers a list of one, so that who reads it can take it out."""

    def __call__(self, message: bytes) -> list[bytes]:
        """Serve one request on this engine."""
        from IPython import get_ipython

        from dtkit.engine import server

        os.environ.pop(_CONNECTION_INFO_VARIABLE, None)  # a cell that prints its environment must not print it
        shell = get_ipython()
        if shell is None:
            return [server.handle_request(message, None)]
        server.attach_sigint_handler(shell.kernel)
        return [server.handle_request(message, _make_publisher(shell))]


def _make_publisher(shell: Any) -> Callable[[int, list[tuple[str, Any]]], None]:
    def publish(first: int, items: list[tuple[str, Any]]) -> None:
        shell.display_pub.publish({MIMETYPE: {"first": first, "items": items}})

    return publish
