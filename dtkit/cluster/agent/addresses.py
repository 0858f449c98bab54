"""The address and the interface by which other hosts reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

Interfaces = dict[str, list[str]]
"""Addresses by name of the interface."""


def list_interfaces() -> Interfaces:
    """Return the IPv4 and IPv6 addresses of each interface that is up."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [address.address.partition("%")[0] for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def choose_address(controller: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the address at which this host was reached by SSH, else the one on the route to the controller."""
    connection = (os.environ if environment is None else environment).get("SSH_CONNECTION", "").split()
    if len(connection) == 4:
        return connection[2].partition("%")[0]
    family = socket.AF_INET6 if ":" in controller else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # port: connects without sending anything
        probe.connect((controller, 9))
        return str(probe.getsockname()[0])


def find_interface(address: str, interfaces: Interfaces) -> str:
    """Return the name of the interface that has an address. Raise LookupError with all addresses if none has it."""
    for name, addresses in interfaces.items():
        if address in addresses:
            return name
    raise LookupError(f"no interface has {address}; there are {describe_interfaces(interfaces)}")


def find_address(interface: str, interfaces: Interfaces) -> str:
    """Return the address of an interface, IPv4 if it has one. Raise LookupError with all addresses if it is unknown."""
    usable = [text for text in interfaces.get(interface, []) if not _is_link_local(text)]
    if not usable:
        raise LookupError(f"no interface {interface!r} with an address; there are {describe_interfaces(interfaces)}")
    return min(usable, key=lambda text: ":" in text)


def describe_interfaces(interfaces: Interfaces) -> str:
    """Return names and addresses, for an error."""
    return ", ".join(f"{name} ({' '.join(texts)})" for name, texts in interfaces.items() if texts)


def _is_link_local(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text).is_link_local
    return True
