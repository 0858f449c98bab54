"""Clusters that tests share. A test must leave them usable; a test that breaks a cluster starts its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dtkit
from tests.support.hosts.training import assert_nothing_left
from tests.support.keras_models import import_keras
from tests.support.marks import slow
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from tests.support.hosts.network import Network
    from tests.support.hosts.slurm import Slurm

_FAILED = pytest.StashKey[bool]()


class SharedCluster:
    """One cluster at a time, kept while tests want its number of engines and none of them fails."""

    def __init__(self) -> None:
        self._cluster: dtkit.Cluster | None = None

    def get(self, engines: int) -> dtkit.Cluster:
        """Return a cluster of that many engines, with one thread each."""
        if self._cluster is None or self._cluster.world_size != engines:
            self.close()
            self._cluster = dtkit.Cluster(engines, threads=1)
        return self._cluster

    def close(self) -> None:
        """Close the cluster."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[SharedCluster]:
    """Owner of the shared cluster."""
    owner = SharedCluster()
    yield owner
    owner.close()


@pytest.fixture
def cluster2(request: pytest.FixtureRequest, shared: SharedCluster) -> Iterator[dtkit.Cluster]:
    """Shared cluster of two engines."""
    yield from _lend(request, shared, 2)


@pytest.fixture(params=[2, slow(4)], ids="world{}".format)
def cluster(request: pytest.FixtureRequest, shared: SharedCluster) -> Iterator[dtkit.Cluster]:
    """Shared cluster of two engines, then of four. Other numbers: ``parametrize("cluster", [3], indirect=True)``."""
    yield from _lend(request, shared, request.param)


def _lend(request: pytest.FixtureRequest, shared: SharedCluster, engines: int) -> Iterator[dtkit.Cluster]:
    yield shared.get(engines)
    if request.node.stash.get(_FAILED, False):  # a broken cluster must not fail the tests that follow
        shared.close()


@pytest.fixture
def keras_in_float64() -> Iterator[None]:
    """Let Keras make models in float64."""
    keras = import_keras()
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty Jupyter runtime folder for this test alone; clusters keep their folders in it."""
    folder = tmp_path / "runtime"
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def home(network: Network, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home folder of this test, which all hosts see."""
    folder = network.folder / "home"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def start_by_slurm(slurm: Slurm, network: Network, home: Path, runtime: Path) -> Iterator[Callable[..., dtkit.Cluster]]:
    """Start a cluster on two nodes, and check at the end that nothing of it is left."""

    def start(n: int = 4, launcher: dtkit.Slurm | None = None, **options: Any) -> dtkit.Cluster:
        launcher = launcher or dtkit.Slurm(nodes=2)
        return dtkit.Cluster(n, launcher=launcher, device="cpu", threads=1, **options)

    yield start
    wait_until(lambda: not slurm.list_jobs(), 30)
    assert_nothing_left(network)
    wait_until(lambda: not list(runtime.glob("dtkit-*")), 30)
    assert list(home.rglob("slurm-*.log")) == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember which tests failed."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


PREFERRED_WORLD_SIZES = (2, 3, 4, 1)
"""Preference of `make test` for a test that runs on several world sizes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but one world size of each test as slow, and sort by world size: each cluster then starts once."""
    by_test: dict[object, list[pytest.Item]] = {}
    for item in items:
        if _get_world_size(item) and item.path.name not in SELF_SELECTING_FILES:
            by_test.setdefault(_get_test_and_parameters(item), []).append(item)
    for variants in by_test.values():
        daily = min(map(_get_world_size, variants), key=PREFERRED_WORLD_SIZES.index)
        for item in variants:
            if _get_world_size(item) != daily:
                item.add_marker(pytest.mark.slow)
    items.sort(key=_get_world_size)


SELF_SELECTING_FILES = ("test_oracle.py",)
"""Files that mark their slow world sizes themselves."""


def _get_test_and_parameters(item: pytest.Item) -> tuple[object, ...]:
    """Return what identifies a test, apart from its world size and the strategy that fits it."""
    parameters = {name: value for name, value in item.callspec.indices.items() if name not in ("cluster", "strategy")}
    return item.path, item.function, *sorted(parameters.items())


def _get_world_size(item: pytest.Item) -> int:
    """Return how many engines a test wants of the shared cluster, or 0."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    world_size = parameters.get("cluster", 0)
    return world_size if isinstance(world_size, int) else 0
