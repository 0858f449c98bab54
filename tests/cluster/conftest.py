"""Clusters that tests share. A test must leave them usable; one that breaks its cluster starts one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dtkit

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_FAILED = pytest.StashKey[bool]()


class Shared:
    """One cluster at a time, for as long as tests want that many engines, and none of them fails."""

    def __init__(self) -> None:
        self._cluster: dtkit.Cluster | None = None

    def of(self, engines: int) -> dtkit.Cluster:
        """So many, each with one thread."""
        if self._cluster is None or self._cluster.world_size != engines:
            self.close()
            self._cluster = dtkit.Cluster(engines, threads=1)
        return self._cluster

    def close(self) -> None:
        """End it."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """What clusters are lent from."""
    found = Shared()
    yield found
    found.close()


@pytest.fixture
def cluster2(request: pytest.FixtureRequest, shared: Shared) -> Iterator[dtkit.Cluster]:
    """Two engines."""
    yield from _lent(request, shared, 2)


@pytest.fixture(params=[2, 4], ids="world{}".format)
def cluster(request: pytest.FixtureRequest, shared: Shared) -> Iterator[dtkit.Cluster]:
    """Two engines, then four. Other numbers: ``parametrize("cluster", [3], indirect=True)``."""
    yield from _lent(request, shared, request.param)


def _lent(request: pytest.FixtureRequest, shared: Shared, engines: int) -> Iterator[dtkit.Cluster]:
    yield shared.of(engines)
    if request.node.stash.get(_FAILED, False):  # what broke it is told once, not again by all tests that follow
        shared.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember which tests failed."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests in the order of the number of engines that they want, so that each cluster is started once."""
    items.sort(key=_engines)


def _engines(item: pytest.Item) -> int:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    wanted = parameters.get("cluster", 0)
    return wanted if isinstance(wanted, int) else 0
