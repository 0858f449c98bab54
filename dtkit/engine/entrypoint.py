"""Entry to an engine: ipyparallel calls an `Entrypoint`, which is pickled by reference and imported there.

Only this module uses the engine's IPython shell. It passes a publishing function to the server, and the kernel, whose
SIGINT the session handles from then on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dtkit._util.notebook import get_shell

if TYPE_CHECKING:
    from collections.abc import Callable

MIMETYPE = "application/vnd.dtkit.items+json"
_CONNECTION_INFO_VARIABLE = "IPP_CONNECTION_INFO"
"""Environment variable with the controller's address and key, which the engine has read by now."""


class Entrypoint:
    """Callable with one message of bytes. Returns a list of one reply, so that its reader can remove the reply."""

    def __call__(self, message: bytes) -> list[bytes]:
        """Serve one request on this engine."""
        from dtkit.engine import server

        os.environ.pop(_CONNECTION_INFO_VARIABLE, None)  # a cell that prints its environment must not print the key
        shell = get_shell()
        if shell is None:
            return [server.handle_request(message, None)]
        server.attach_sigint_handler(shell.kernel)
        return [server.handle_request(message, _make_publisher(shell))]


def _make_publisher(shell: Any) -> Callable[[int, list[tuple[str, Any]]], None]:
    def publish(first: int, items: list[tuple[str, Any]]) -> None:
        shell.display_pub.publish({MIMETYPE: {"first": first, "items": items}})

    return publish
