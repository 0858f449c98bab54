"""A rank's side of the store between hosts, with torch.distributed's interface. See :mod:`.store_server`."""

from __future__ import annotations

import datetime as dt
import json
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it by name only

from dtkit._util import timeouts
from dtkit.engine.comm.store_server import authenticate, set_receive_timeout

if TYPE_CHECKING:
    from dtkit.messages import StoreAddress


class HostStore(Store):
    """Store of one generation. Keep a reference for the life of the process group, since torch keeps none."""

    def __init__(self, place: StoreAddress, timeout_s: float) -> None:
        super().__init__()
        self._generation, self._timeout_s = place.generation, timeout_s
        # locks: while one small message goes to the server and back
        self._lock = threading.Lock()
        self._connection = _connect(place)

    def close(self) -> None:
        """Close the connection. Later calls raise OSError."""
        with self._lock:
            self._connection.close()

    # -- torch.distributed.Store ------------------------------------------------------------------------------

    @property
    def timeout(self) -> dt.timedelta:
        """Limit of `get` and `wait`."""
        return dt.timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: dt.timedelta) -> None:
        """Set the limit of `get` and `wait`."""
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask("set", name=key, value=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key])
        _, value = self._ask("get", name=key)
        return bytes(value or b"")

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return int(self._ask("add", name=key, amount=amount)[0])

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these have values."""
        return bool(self._ask("check", names=list(keys))[0])

    def wait(self, keys: list[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until all of these have values."""
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline, pause = time.monotonic() + limit, threading.Event()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"Wait timeout: {', '.join(keys)} did not appear in the store within {limit:g} s")
            pause.wait(timeouts.STORE_POLL_S)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Store a value if the current one is the expected one. Return the value that is then stored."""
        expected = expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
        desired = desired_value.encode() if isinstance(desired_value, str) else bytes(desired_value)
        return bytes(self._ask("compare_set", name=key, expected=expected.hex(), value=desired)[1] or b"")

    def delete_key(self, key: str) -> bool:
        """Remove a value, and return whether there was one."""
        return bool(self._ask("delete", name=key)[0])

    def num_keys(self) -> int:
        """Return the number of values."""
        return int(self._ask("count")[0])

    def _ask(self, operation: str, *, value: bytes | None = None, **fields: Any) -> tuple[Any, bytes | None]:
        header = {"operation": operation, "generation": self._generation, "has_value": value is not None, **fields}
        with self._lock:
            self._connection.send_bytes(json.dumps(header).encode())
            if value is not None:
                self._connection.send_bytes(value)
            answer = json.loads(self._connection.recv_bytes())
            has_data = operation == "compare_set" or (operation == "get" and answer)
            return answer, self._connection.recv_bytes() if has_data else None


def _connect(place: StoreAddress) -> Connection:
    try:
        client = socket.create_connection((place.address, place.port), timeouts.REACH_TIMEOUT_S)
    except OSError as error:
        raise ConnectionError(
            f"{socket.gethostname()} can't reach {place.address} port {place.port}, where the ranks meet: "
            f"{error.strerror or error}. Name the network between the hosts, as in interface='eth0'"
        ) from None
    client.settimeout(None)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(client.detach())
    set_receive_timeout(connection, timeouts.STORE_ANSWER_TIMEOUT_S)
    try:
        authenticate(connection, place.key, is_server=False)
    except (AuthenticationError, EOFError, OSError):
        connection.close()
        raise ConnectionError(f"{place.address} port {place.port} refused this cluster's key") from None
    return connection
