"""The address by which other hosts reach a host."""

from __future__ import annotations

import pytest

from dtkit.cluster.agent import addresses

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["fe80::1", "10.0.0.2", "fd00::2"], "ib0": ["fd00::9"], "down": []}


def test_address_is_the_one_that_ssh_has_reached():
    assert addresses.choose_address("127.0.0.1", {"SSH_CONNECTION": "10.0.0.1 4000 10.0.0.2 22"}) == "10.0.0.2"
    assert addresses.find_interface("10.0.0.2", INTERFACES) == "eth0"


def test_without_ssh_the_route_to_the_controller_decides():
    assert addresses.choose_address("127.0.0.1", {}) == "127.0.0.1"


def test_an_interface_has_an_address_of_either_version():
    assert addresses.find_address("eth0", INTERFACES) == "10.0.0.2"
    assert addresses.find_address("ib0", INTERFACES) == "fd00::9"


@pytest.mark.parametrize("name", ["eth7", "down"])
def test_a_wrong_interface_is_refused_with_all_addresses(name: str):
    with pytest.raises(
        LookupError, match=rf"no interface '{name}' with an address; there are lo \(127\.0\.0\.1\), eth0"
    ):
        addresses.find_address(name, INTERFACES)


def test_an_address_that_no_interface_has_is_refused_with_all_addresses():
    with pytest.raises(LookupError, match=r"no interface has 10\.0\.0\.3; there are lo"):
        addresses.find_interface("10.0.0.3", INTERFACES)
