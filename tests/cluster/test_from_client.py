"""Engines that dtkit did not start: it trains on them, and leaves them unchanged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import ipyparallel as ipp
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import dtkit
from tests.support.small import check_usable, train

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

LONG = 100_000  # steps; no test waits for them


@pytest.fixture(scope="module")
def client() -> Iterator[ipp.Client]:
    """Client of a plain ipyparallel cluster of two engines."""
    with ipp.Cluster(n=2, log_level=50) as client:
        client.wait_for_engines(2, timeout=60, interactive=False)
        yield client


@pytest.fixture
def cluster(client: ipp.Client) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_client(client, device="cpu", threads=1) as attached:
        yield attached


def is_group_formed() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def test_training_equals_training_on_engines_started_by_dtkit(cluster: dtkit.Cluster, cluster2: dtkit.Cluster):
    run, own_run = train(cluster, epochs=2), train(cluster2, epochs=2)
    run.wait(60)
    own_run.wait(60)
    state, expected = run.model.state_dict(), own_run.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert [node.engine_id for node in cluster.nodes] == [0, 1]
    assert len({node.pid for node in cluster.nodes}) == 2


def test_close_leaves_the_engines_alive_and_empty(client: ipp.Client):
    with dtkit.Cluster.from_client(client) as cluster:
        run = train(cluster, steps=LONG)  # RUNNING when the cluster closes
        folder = Path(cluster.folder)
        pids = [node.pid for node in cluster.nodes]
        assert client[:].apply_sync(is_group_formed) == [True, True]
    assert run.status.state is dtkit.types.State.STOPPED
    assert not folder.exists()
    assert client[:].apply_sync(__import__("os").getpid) == pids
    assert client[:].apply_sync(is_group_formed) == [False, False]
    with pytest.raises(dtkit.errors.ClusterClosedError):
        cluster.run(print)
    with dtkit.Cluster.from_client(client) as again:
        check_usable(again)


def test_last_client_to_attach_owns_the_engines(cluster: dtkit.Cluster, client: ipp.Client):
    run = train(cluster, start=False)
    with dtkit.Cluster.from_client(client) as other:
        check_usable(other)
        with pytest.raises(dtkit.errors.EngineError, match="or this one by attaching again, has taken"):
            cluster.run(print)
        run.resume()
        with pytest.raises(dtkit.errors.RefusedError, match="or this one by attaching again, has taken"):
            run.wait(60)
        check_usable(other)


def test_engine_with_another_version_is_refused_naming_both_versions(client: ipp.Client):
    client[1].execute("from dtkit._util import installation; kept = installation.VERSION", block=True)
    client[1].execute("installation.VERSION = '0.0.1'", block=True)
    try:
        message = rf"dtkit is {dtkit.__version__} in the notebook and 0.0.1 on rank 1 \(.*\); they must be equal"
        with pytest.raises(dtkit.errors.VersionMismatchError, match=message):
            dtkit.Cluster.from_client(client)
    finally:
        client[1].execute("installation.VERSION = kept", block=True)
    with dtkit.Cluster.from_client(client) as cluster:
        check_usable(cluster)


def test_engine_without_dtkit_is_refused(client: ipp.Client):
    hidden = "import sys; kept = {k: sys.modules.pop(k) for k in list(sys.modules) if k.split('.')[0] == 'dtkit'}"
    client[0].execute(hidden + "; sys.modules['dtkit'] = None", block=True)
    try:
        with pytest.raises(
            dtkit.errors.VersionMismatchError, match=r"rank 0 can't load dtkit .*Install the same dtkit-jupyter"
        ):
            dtkit.Cluster.from_client(client)
    finally:
        client[0].execute("sys.modules.update(kept)", block=True)
    with dtkit.Cluster.from_client(client) as cluster:
        check_usable(cluster)


def test_from_client_refuses_other_objects():
    with pytest.raises(TypeError, match=r"client must be an ipyparallel\.Client"):
        dtkit.Cluster.from_client(3)


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """IPython shell without a history on disk."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    yield shell
    InteractiveShell.clear_instance()


@pytest.mark.slow
def test_px_reaches_the_engines_between_dispatches(cluster: dtkit.Cluster, shell: InteractiveShell, capsys):
    cluster.activate()
    run = train(cluster, steps=LONG)
    started = threading.Event()
    run.subscribe(lambda: run.status.step > 3 and started.set())
    assert started.wait(60)
    for k in range(3):
        before = run.status.step
        result = shell.run_cell(f"%%px\nimport torch.distributed as dist\nprint('rank', dist.get_rank(), {k})")
        assert result.success
        printed = capsys.readouterr().out
        assert f"rank 0 {k}" in printed
        assert f"rank 1 {k}" in printed
        assert run.status.state is dtkit.types.State.RUNNING
        assert run.status.step >= before
    # Collectives work, since all ranks are at the same step.
    collective = "%%px\nimport torch\nt = torch.ones(1)\ndist.all_reduce(t)\nprint('sum', t.item())"
    assert shell.run_cell(collective).success
    assert capsys.readouterr().out.count("sum 2.0") == 2
    assert not shell.run_cell("%%px\n1 / 0").success
    assert run.status.state is dtkit.types.State.RUNNING
    end = run.stop()
    assert run.history.num_steps == end
    check_usable(cluster)
