"""Clusters that tests share. A test must leave them usable; one that breaks its cluster starts one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dtkit

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

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


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jupyter's runtime folder, empty and for this test alone. Clusters keep their folders in it."""
    folder = tmp_path / "runtime"
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember which tests failed."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


PREFERRED_WORLD_SIZES = (2, 3, 4, 1)
"""Where a test runs on several world sizes, `make test` takes the first of these that it has."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but one world size of each test as slow, and sort by world size: each cluster then starts once."""
    by_test: dict[object, list[pytest.Item]] = {}
    for item in items:
        if _get_world_size(item) and item.path.name not in CHOOSE_THEMSELVES:
            by_test.setdefault(_get_test_and_parameters(item), []).append(item)
    for variants in by_test.values():
        daily = min(map(_get_world_size, variants), key=PREFERRED_WORLD_SIZES.index)
        for item in variants:
            if _get_world_size(item) != daily:
                item.add_marker(pytest.mark.slow)
    items.sort(key=_get_world_size)


CHOOSE_THEMSELVES = ("test_oracle.py",)
"""Files that mark their slow world sizes themselves."""


def _get_test_and_parameters(item: pytest.Item) -> tuple[object, ...]:
    """Return what identifies a test, apart from its world size and the strategy that fits this world size."""
    parameters = {name: value for name, value in item.callspec.indices.items() if name not in ("cluster", "strategy")}
    return item.path, item.function, *sorted(parameters.items())


def _get_world_size(item: pytest.Item) -> int:
    """Return how many engines a test wants of the shared cluster, or 0."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    wanted = parameters.get("cluster", 0)
    return wanted if isinstance(wanted, int) else 0
