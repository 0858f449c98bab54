"""Kernels killed while they rebuild a job whose state is on no engine: the state must survive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

import dtkit
from dtkit.dashboard.summary import lost_nodes
from tests.support.marks import slow
from tests.support.reattach import NOTEBOOK, REPLICAS, check_run_continues, notebook
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

DEATH = """
    import os, pickle
    from dtkit.training.config import JobSpec
    from dtkit.rpc.membership import Membership

    def die():
        os.kill(os.getpid(), 9)

    def die_after(kind, name, **required):
        method = getattr(kind, name)

        def call_and_die(self, *args, **options):
            result = method(self, *args, **options)
            die() if required.items() <= options.items() else None
            return result

        setattr(kind, name, call_and_die)

    send = cluster._engine_group.transport.send

    def send_to_rank_0(rank, message, listen=None):
        die() if rank == 1 and pickle.loads(message).op == "rebuild_job" else None
        return send(rank, message, listen)
"""
LOSS = """
    print("ready", flush=True)
    cluster._engine_group.transport.kill([1])
"""
MOMENTS = {
    "in a new group": "die_after(Membership, 'form_process_group', ranks_changed=True)",
    "half sent": "cluster._engine_group.transport.send = send_to_rank_0",
    "rebuilt": "die_after(JobSpec, 'rebuild')",
}
PIPELINE = dtkit.Pipeline(2, 2)


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter runtime folder of this test alone."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))


def make_dying_notebook(moment: str, strategy: dtkit.Strategy) -> str:
    """Return the code of a notebook that loses an engine and dies at `moment` of the recovery."""
    train_line, ready_line = "    run = cluster.train(", '    print("ready", flush=True)\n'
    every = 60 if strategy is PIPELINE else None
    code = NOTEBOOK.replace("step > 100", "step > 120")  # a pipeline returns to step 120
    code = code.replace(
        train_line, f"    options.update(strategy=dtkit.{strategy!r}, snapshot_every={every})\n{train_line}"
    )
    return code.replace(ready_line, f"{DEATH.lstrip()}    {MOMENTS[moment]}{LOSS}".replace("import", "    import", 1))


def list_processes(folder: Path) -> list[psutil.Process]:
    """Return the processes whose runtime folder is `folder`."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("JUPYTER_RUNTIME_DIR") == str(folder):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


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
@pytest.mark.slow
def test_attach_after_a_kill_during_recovery_continues_the_run(tmp_path: Path, moment: str, strategy: dtkit.Strategy):
    with notebook(make_dying_notebook(moment, strategy)) as process:
        process.wait(60)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert lost_nodes.update_lost_nodes({}, run.history.events) == {}  # no rank is missing
            check_run_continues(cluster, strategy, repeated=strategy is PIPELINE)
            assert not list(cluster.folder.glob("runs/*/recovered_state*"))
    wait_until(lambda: not list_processes(tmp_path))
