"""The store between hosts: its values, its key, and where it listens."""

from __future__ import annotations

import dataclasses
import datetime as dt
import socket
from typing import TYPE_CHECKING

import psutil
import pytest

from dtkit._util import timeouts
from dtkit.engine.comm.host_store import HostStore
from dtkit.engine.comm.store_server import StoreServer
from dtkit.messages import StoreAddress

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[StoreServer]:
    """A store on loopback."""
    started = StoreServer("127.0.0.1")
    yield started
    started.close()


def connect(server: StoreServer, generation: int = 0) -> HostStore:
    return HostStore(StoreAddress(server.address, server.port, server.key, generation), timeout_s=5.0)


def test_values_are_seen_by_other_ranks_of_the_generation(server: StoreServer):
    one, two, later = connect(server), connect(server), connect(server, generation=1)
    one.set("address", b"\x00\xff")
    assert two.get("address") == b"\x00\xff"
    assert not later.check(["address"])
    assert [one.add("count", 2), two.add("count", 3)] == [2, 5]
    assert two.check(["address", "count"])
    assert not two.check(["address", "missing"])
    assert one.num_keys() == 2
    assert one.delete_key("count")
    assert not one.delete_key("count")
    server.forget_before(1)
    assert one.num_keys() == 0
    for store in (one, two, later):
        store.close()


def test_compare_set_follows_torch(server: StoreServer):
    store = connect(server)
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.compare_set("new", "expected", "value") == b"expected"
    store.close()


def test_a_wait_for_a_missing_value_ends(server: StoreServer):
    store = connect(server)
    with pytest.raises(RuntimeError, match=r"Wait timeout: a did not appear in the store within 0\.01 s"):
        store.wait(["a"], dt.timedelta(seconds=0.01))
    store.close()


def test_another_key_is_refused(server: StoreServer):
    place = StoreAddress(server.address, server.port, server.key, 0)
    with pytest.raises(ConnectionError, match="refused this cluster's key"):
        HostStore(dataclasses.replace(place, key=b"another"), timeout_s=5.0)
    right = HostStore(place, timeout_s=5.0)  # the server still serves
    right.set("a", b"1")
    right.close()


def test_a_stranger_who_sends_noise_gets_nothing_and_stops_nothing(server: StoreServer):
    with socket.create_connection((server.address, server.port), 5) as stranger:
        stranger.sendall(b"\x00\x00\x00\x03abc" * 100)
        store = connect(server)
        store.set("a", b"1")
        store.close()


def test_the_store_listens_on_its_address_alone(server: StoreServer):
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == server.port] == ["127.0.0.1"]


def test_the_key_is_not_in_the_text_of_an_address(server: StoreServer):
    place = StoreAddress(server.address, server.port, b"very secret", 0)
    assert "secret" not in repr(place)
    assert len(server.key) == 32


def test_an_address_that_nobody_serves_names_the_remedy(server: StoreServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeouts, "REACH_TIMEOUT_S", 2.0)
    server.close()
    with pytest.raises(ConnectionError, match=r"can't reach 127\.0\.0\.1 port \d+.*interface='eth0'"):
        HostStore(StoreAddress(server.address, server.port, server.key, 0), timeout_s=5.0)
