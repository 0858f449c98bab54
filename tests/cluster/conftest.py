"""Clusters that tests share. A test must leave them usable; one that breaks its cluster starts one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dtkit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def cluster2() -> Iterator[dtkit.Cluster]:
    """Two engines, shared by the tests of this folder."""
    with dtkit.Cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="session", params=[2, 4], ids="world{}".format)
def cluster(request: pytest.FixtureRequest) -> Iterator[dtkit.Cluster]:
    """Two engines, then four, each with one thread. Other numbers: ``parametrize("cluster", [3], indirect=True)``.

    Where other arguments are parametrised along with it, pytest wants to be told ``scope="session"``, or it starts a
    cluster for each test.
    """
    with dtkit.Cluster(request.param, threads=1) as started:
        yield started


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests in the order of the number of engines that they want, so that each cluster is started once."""
    items.sort(key=_engines)


def _engines(item: pytest.Item) -> int:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    wanted = parameters.get("cluster", 0)
    return wanted if isinstance(wanted, int) else 0
