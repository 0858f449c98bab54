"""The store at which ranks on several hosts meet: bytes by name, for one generation of the process group after another.

It listens on only one address. Every connection begins with a challenge in both directions, by HMAC with a random key.
The ranks receive the key over the encrypted connection to the notebook. Later messages are not encrypted; they hold
addresses of sockets, but no user data. Messages are JSON and bytes, so nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BACKLOG = 1024
_KEY_BYTES = 32


class StoreServer:
    """Serves in daemon threads until the process ends."""

    def __init__(self, address: str) -> None:
        self.address, self.key = address, secrets.token_bytes(_KEY_BYTES)
        self._values: dict[tuple[int, str], bytes] = {}
        # locks: while a dictionary is read or changed
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # port: on the chosen address alone; every connection must know the key
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept_loop, name="dtkit-store", daemon=True).start()

    def forget_before(self, generation: int) -> None:
        """Forget the values of earlier generations."""
        with self._lock:
            self._values = {name: value for name, value in self._values.items() if name[0] >= generation}

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept_loop(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                # waits: a daemon thread; nobody waits for it
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), name="dtkit-store-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_receive_timeout(client, timeouts.STORE_HANDSHAKE_TIMEOUT_S)
        with (
            Connection(client.detach()) as connection,
            contextlib.suppress(AuthenticationError, EOFError, OSError, ValueError),
        ):
            authenticate(connection, self.key, is_server=True)
            set_receive_timeout(connection, None)
            while True:
                header = json.loads(connection.recv_bytes())
                value = connection.recv_bytes() if header.pop("has_value", False) else b""
                answer, data = self._handle(value=value, **header)
                connection.send_bytes(json.dumps(answer).encode())
                if data is not None:
                    connection.send_bytes(data)

    def _handle(self, operation: str, generation: int, **fields: Any) -> tuple[Any, bytes | None]:
        """Return (answer as JSON, bytes that follow)."""
        with self._lock:
            return _OPERATIONS[operation](self._values, generation, **fields)


_Values = dict[tuple[int, str], bytes]
_Answer = tuple[Any, bytes | None]


def _set(values: _Values, generation: int, *, name: str, value: bytes) -> _Answer:
    values[generation, name] = value
    return None, None


def _get(values: _Values, generation: int, *, name: str, value: bytes) -> _Answer:
    del value
    return (generation, name) in values, values.get((generation, name))


def _add(values: _Values, generation: int, *, name: str, amount: int, value: bytes) -> _Answer:
    del value
    number = int(values.get((generation, name), b"0")) + amount
    values[generation, name] = str(number).encode()
    return number, None


def _check(values: _Values, generation: int, *, names: Sequence[str], value: bytes) -> _Answer:
    del value
    return all((generation, name) in values for name in names), None


def _compare_set(values: _Values, generation: int, *, name: str, expected: str, value: bytes) -> _Answer:
    """Set the value if the current one is the expected one; a missing value counts as an empty one. Return the value
    that is then stored.
    """
    present = values.get((generation, name))
    if (present or b"").hex() == expected:
        present = values[generation, name] = value
    return None, bytes.fromhex(expected) if present is None else present


def _delete(values: _Values, generation: int, *, name: str, value: bytes) -> _Answer:
    del value
    return values.pop((generation, name), None) is not None, None


def _count(values: _Values, generation: int, *, value: bytes) -> _Answer:
    del value
    return sum(place[0] == generation for place in values), None


_OPERATIONS: Mapping[str, Callable[..., _Answer]] = {
    "set": _set,
    "get": _get,
    "add": _add,
    "check": _check,
    "compare_set": _compare_set,
    "delete": _delete,
    "count": _count,
}


def set_receive_timeout(connection: Any, seconds: float | None) -> None:
    """Limit the wait for each message; None removes the limit."""
    whole = 0 if seconds is None else int(seconds)
    packed = whole.to_bytes(8, "little") + (0).to_bytes(8, "little")
    with socket.socket(fileno=connection.fileno()) as view:
        view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        view.detach()


def authenticate(connection: Connection, key: bytes, *, is_server: bool) -> None:
    """Prove knowledge of the key in both directions. Raises AuthenticationError for another key."""
    steps = [deliver_challenge, answer_challenge]
    for step in steps if is_server else reversed(steps):
        step(connection, key)
