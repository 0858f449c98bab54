"""Engines that somebody else started: dtkit trains on them, and leaves them as it found them."""

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

LONG = 100_000  # steps that nobody waits for


@pytest.fixture(scope="module")
def client() -> Iterator[ipp.Client]:
    """A plain ipyparallel cluster of two engines."""
    with ipp.Cluster(n=2, log_level=50) as client:
        client.wait_for_engines(2, timeout=60, interactive=False)
        yield client


@pytest.fixture
def cluster(client: ipp.Client) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_client(client, device="cpu", threads=1) as attached:
        yield attached


def group_is_formed() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def test_training_is_the_same_as_on_engines_of_our_own(cluster: dtkit.Cluster, cluster2: dtkit.Cluster):
    run, ours = train(cluster, epochs=2), train(cluster2, epochs=2)
    run.wait(60)
    ours.wait(60)
    found, expected = run.model.state_dict(), ours.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [node.engine_id for node in cluster.nodes] == [0, 1]
    assert len({node.pid for node in cluster.nodes}) == 2


def test_close_leaves_the_engines_alive_and_empty(client: ipp.Client):
    with dtkit.Cluster.from_client(client) as cluster:
        run = train(cluster, steps=LONG)  # RUNNING when the cluster closes
        folder = Path(cluster._folder)
        pids = [node.pid for node in cluster.nodes]
        assert client[:].apply_sync(group_is_formed) == [True, True]
    assert run.status.state is dtkit.types.State.STOPPED
    assert not folder.exists()
    assert client[:].apply_sync(__import__("os").getpid) == pids
    assert client[:].apply_sync(group_is_formed) == [False, False]
    with pytest.raises(dtkit.errors.ClusterClosedError):
        cluster.run(print)
    with dtkit.Cluster.from_client(client) as again:
        check_usable(again)


def test_the_last_to_attach_owns_the_engines(cluster: dtkit.Cluster, client: ipp.Client):
    run = train(cluster, start=False)
    with dtkit.Cluster.from_client(client) as other:
        check_usable(other)
        with pytest.raises(dtkit.errors.EngineError, match="another notebook attached meanwhile"):
            cluster.run(print)
        run.resume()
        with pytest.raises(dtkit.errors.RefusedError, match="another notebook has taken this cluster over"):
            run.wait(60)
        check_usable(other)


def test_an_engine_with_another_version_is_refused_with_both_named(client: ipp.Client):
    client[1].execute("import dtkit; kept = dtkit.__version__; dtkit.__version__ = '0.0.1'", block=True)
    try:
        message = rf"dtkit is {dtkit.__version__} in the notebook and 0.0.1 on rank 1 \(.*\); they must be equal"
        with pytest.raises(dtkit.errors.VersionMismatchError, match=message):
            dtkit.Cluster.from_client(client)
    finally:
        client[1].execute("dtkit.__version__ = kept", block=True)
    with dtkit.Cluster.from_client(client) as cluster:
        check_usable(cluster)


def test_an_engine_without_dtkit_is_refused(client: ipp.Client):
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


def test_what_is_no_client_is_refused():
    with pytest.raises(TypeError, match=r"client must be an ipyparallel\.Client"):
        dtkit.Cluster.from_client(3)


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """An IPython of the test's own, without a history on disk."""
    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell.instance(config=config)
    yield made
    InteractiveShell.clear_instance()


def test_px_reaches_the_engines_between_dispatches(cluster: dtkit.Cluster, shell: InteractiveShell, capsys):
    cluster.activate()
    run = train(cluster, steps=LONG)
    begun = threading.Event()
    run.subscribe(lambda: run.status.step > 3 and begun.set())
    assert begun.wait(60)
    for k in range(3):
        before = run.status.step
        done = shell.run_cell(f"%%px\nimport torch.distributed as dist\nprint('here', dist.get_rank(), {k})")
        assert done.success
        said = capsys.readouterr().out
        assert f"here 0 {k}" in said
        assert f"here 1 {k}" in said
        assert run.status.state is dtkit.types.State.RUNNING
        assert run.status.step >= before
    # A collective works, too: the ranks stand at the same step.
    collective = "%%px\nimport torch\nt = torch.ones(1)\ndist.all_reduce(t)\nprint('sum', t.item())"
    assert shell.run_cell(collective).success
    assert capsys.readouterr().out.count("sum 2.0") == 2
    assert not shell.run_cell("%%px\n1 / 0").success
    assert run.status.state is dtkit.types.State.RUNNING
    end = run.stop()
    assert run.history.num_steps == end
    check_usable(cluster)
