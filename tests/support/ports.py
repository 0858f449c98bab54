"""What answers at open ports."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_S = 1.0  # for answers of local ports
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
"""Greeting of ZMTP 3.1 (rfc.zeromq.org/spec/37): signature and version. The answer of 64 bytes has the required
mechanism."""


def collect_answers(addresses: Sequence[tuple[str, int]], message: bytes) -> dict[int, bytes]:
    """Send a message to all ports at once, and return the answers within ANSWER_S."""
    with contextlib.ExitStack() as stack:
        ports = {stack.enter_context(socket.create_connection(address, 2)): address[1] for address in addresses}
        for sock in ports:
            sock.sendall(message)
        answers = dict.fromkeys(ports.values(), b"")
        deadline, waiting = time.monotonic() + ANSWER_S, set(ports)
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for sock in select.select(waiting, [], [], remaining)[0]:
                part = b""
                with contextlib.suppress(ConnectionResetError):
                    part = sock.recv(4096)
                answers[ports[sock]] += part
                if not part:
                    waiting.discard(sock)
    return answers


def list_mechanisms(addresses: Sequence[tuple[str, int]]) -> dict[int, bytes]:
    """Return the security mechanism of each port that speaks ZMTP."""
    answers = collect_answers(addresses, GREETING)
    return {port: answer[12:32].rstrip(b"\0") for port, answer in answers.items() if answer[:1] == b"\xff"}
