"""A kernel that is killed while it makes a job anew, whose state is in no engine then: nothing is lost by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

import dtkit
from dtkit.dashboard.summary import lost_nodes
from tests.support.marks import slow
from tests.support.takeover import NOTEBOOK, REPLICAS, check_goes_on, notebook
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

DIES = """
    import os, pickle
    from dtkit.training.config import JobSpec
    from dtkit.rpc.engine_group import EngineGroup

    def die():
        os.kill(os.getpid(), 9)

    def after(kind, name, **wanted):
        work = getattr(kind, name)

        def last(self, *args, **options):
            found = work(self, *args, **options)
            die() if wanted.items() <= options.items() else None
            return found

        setattr(kind, name, last)

    send = cluster._transport.send

    def half(rank, message, listen=None):
        die() if rank == 1 and pickle.loads(message).op == "rebuild_job" else None
        return send(rank, message, listen)
"""
LOSES = """
    print("ready", flush=True)
    cluster.kill([1])
"""
MOMENTS = {
    "in a new group": "after(EngineGroup, 'form_process_group', ranks_changed=True)",
    "half sent": "cluster._transport.send = half",
    "put back": "after(JobSpec, 'rebuild')",
}
PIPELINE = dtkit.Pipeline(2, 2)


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of this test alone."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))


def dying(moment: str, strategy: dtkit.Strategy) -> str:
    """A notebook that loses an engine, and dies at that moment of what follows."""
    trains, ready = "    run = cluster.train(", '    print("ready", flush=True)\n'
    every = 60 if strategy is PIPELINE else None
    code = NOTEBOOK.replace("step > 100", "step > 120")  # a pipeline goes back to 120
    code = code.replace(trains, f"    options.update(strategy=dtkit.{strategy!r}, snapshot_every={every})\n{trains}")
    return code.replace(ready, f"{DIES.lstrip()}    {MOMENTS[moment]}{LOSES}".replace("import", "    import", 1))


def processes(folder: Path) -> list[psutil.Process]:
    """All that were started with these papers."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("JUPYTER_RUNTIME_DIR") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


DAILY_MOMENT = "in a new group"


@pytest.mark.parametrize(
    ("moment", "strategy"),
    [
        (DAILY_MOMENT, REPLICAS),
        *(slow(moment, REPLICAS) for moment in MOMENTS if moment != DAILY_MOMENT),
        slow("half sent", PIPELINE),
    ],
    ids=[*MOMENTS, "pipeline half sent"],
)
def test_a_kernel_that_was_killed_amid_a_recovery(tmp_path: Path, moment: str, strategy: dtkit.Strategy):
    with notebook(dying(moment, strategy)) as process:
        process.wait(60)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert lost_nodes.update_lost_nodes({}, run.history.events) == {}  # all are there again
            check_goes_on(cluster, strategy, back=strategy is PIPELINE)
            assert not list(cluster.folder.glob("runs/*/rescued*"))
    until(lambda: not processes(tmp_path))
