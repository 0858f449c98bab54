"""Attaching to runs that changed after their start: extended ones, and ones with fewer ranks."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from dtkit.rpc.protocol import DataOperations, make_call
from dtkit.training import persisted_run
from tests.support.oracle import BATCH, SAMPLES
from tests.support.reattach import NOTEBOOK, STEPS, check_run_continues, get_engine_process, notebook

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from dtkit.rpc.engine_group import EngineGroup

pytestmark = pytest.mark.cluster

TRAINS = "    run = cluster.train("
EXTENDED = NOTEBOOK.replace(TRAINS, f"    options.update(steps=100)\n{TRAINS}").replace(
    "    started = threading",
    f"""
    run.wait(60)
    run.extend(steps={STEPS - 100})
    started = threading""",
)
SHARING = NOTEBOOK.replace("dtkit.Cluster(2,", "dtkit.Cluster(3,").replace(
    TRAINS,
    f"""
    options.update(strategy=dtkit.DataParallel(balance="auto"), on_failure="shrink")
{TRAINS}""",
)
SHRUNK = SHARING.replace(
    "    started.wait(60)\n",
    """
    started.wait(60)
    shrunk = threading.Event()
    run.subscribe(lambda: any(event.kind == "repair" for event in run.history.events) and shrunk.set())
    cluster._engine_group.transport.kill([2])
    assert shrunk.wait(60)
""",
)


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter runtime folder of this test alone."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)


@pytest.mark.slow
def test_attached_run_continues_to_its_extended_end():
    with notebook(EXTENDED) as process:
        kill(process)
        with dtkit.attach() as cluster:
            check_run_continues(cluster)


def check_two_share(cluster: dtkit.Cluster) -> None:
    """Check that the two remaining ranks share each whole batch, up to the end."""
    run = cluster.current_run
    assert run is not None
    assert (cluster.world_size, run.spec.world_size) == (2, 2)
    step = run.status.step
    assert step < STEPS
    run.resume()
    run.wait(120)
    assert run.status.state is dtkit.types.State.COMPLETED
    totals = run.history.totals()
    assert totals["step"].tolist() == list(range(STEPS))
    per_epoch = -(-SAMPLES // BATCH)
    last = np.arange(STEPS) % per_epoch == per_epoch - 1
    expected = np.where(last, SAMPLES % BATCH, BATCH)
    assert totals["samples"][step:].tolist() == expected[step:].tolist()
    assert set(totals["ranks"][step:].tolist()) == {2}


@pytest.mark.slow
def test_attached_run_after_a_shrink_uses_the_remaining_ranks():
    with notebook(SHRUNK) as process:
        kill(process)
        with dtkit.attach() as cluster:
            check_two_share(cluster)


@pytest.mark.slow
def test_run_that_shrinks_during_attach_uses_the_remaining_ranks(tmp_path: Path):
    with notebook(SHARING) as process:
        (folder,) = tmp_path.iterdir()
        engine = get_engine_process(folder, 2)
        kill(process)
        engine.kill()
        engine.wait(10)
        with dtkit.attach() as cluster:
            check_two_share(cluster)


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["one engine", "all engines"])
@pytest.mark.slow
def test_job_lost_during_attach_is_rebuilt(monkeypatch: pytest.MonkeyPatch, ranks: list[int]):
    """The job is rebuilt from another rank; without one, from the last snapshot, which replicas don't have."""
    load = persisted_run.load

    def load_and_release(engine_group: EngineGroup, job: str, model_rank: int) -> Any:
        plan = load(engine_group, job, model_rank)
        engine_group.call_all(make_call(DataOperations.release, keys=[job]), ranks=ranks)
        return plan

    monkeypatch.setattr(persisted_run, "load", load_and_release)
    with notebook() as process:
        kill(process)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            if ranks == [0]:
                check_run_continues(cluster)
            else:
                source = "(the start, because there is no snapshot)"
                assert run.history.events[-1].text.startswith(f"taken over at step 0 {source}; it pauses until")
                run.resume()
                run.wait(60)
                assert run.history.totals()["step"].tolist()[-STEPS:] == list(range(STEPS))
