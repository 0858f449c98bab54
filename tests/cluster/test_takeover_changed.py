"""A run that is no longer what it was asked to be (longer, or of fewer ranks), taken over by another kernel."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from dtkit.training import persisted_run
from tests.support.oracle import BATCH, SAMPLES
from tests.support.takeover import NOTEBOOK, STEPS, check_goes_on, engine_of, notebook

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.cluster

TRAINS = "    run = cluster.train("
EXTENDED = NOTEBOOK.replace(TRAINS, f"    options.update(steps=100)\n{TRAINS}").replace(
    "    there = threading",
    f"""
    run.wait(60)
    run.extend(steps={STEPS - 100})
    there = threading""",
)
SHARING = NOTEBOOK.replace("dtkit.Cluster(2,", "dtkit.Cluster(3,").replace(
    TRAINS,
    f"""
    options.update(strategy=dtkit.DataParallel(balance="auto"), on_failure="shrink")
{TRAINS}""",
)
SHRUNK = SHARING.replace(
    "    there.wait(60)\n",
    """
    there.wait(60)
    fewer = threading.Event()
    run.subscribe(lambda: any(event.kind == "repair" for event in run.history.events) and fewer.set())
    cluster.kill([2])
    assert fewer.wait(60)
""",
)


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of this test alone."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)


@pytest.mark.slow
def test_an_extended_run_goes_on_to_its_later_end():
    with notebook(EXTENDED) as process:
        kill(process)
        with dtkit.attach() as cluster:
            check_goes_on(cluster)


def check_two_share(cluster: dtkit.Cluster) -> None:
    """Each batch between the two that are left, all of it, to the end."""
    run = cluster.current_run
    assert run is not None
    assert (cluster.world_size, run.spec.world_size) == (2, 2)
    fewer = run.status.step
    assert fewer < STEPS
    run.resume()
    run.wait(120)
    assert run.status.state is dtkit.types.State.COMPLETED
    totals = run.history.totals()
    assert totals["step"].tolist() == list(range(STEPS))
    per_epoch = -(-SAMPLES // BATCH)
    last = np.arange(STEPS) % per_epoch == per_epoch - 1
    wanted = np.where(last, SAMPLES % BATCH, BATCH)
    assert totals["samples"][fewer:].tolist() == wanted[fewer:].tolist()
    assert set(totals["ranks"][fewer:].tolist()) == {2}


@pytest.mark.slow
def test_a_run_that_went_on_with_fewer_is_shared_by_those_that_are_left():
    with notebook(SHRUNK) as process:
        kill(process)
        with dtkit.attach() as cluster:
            check_two_share(cluster)


def test_a_run_that_goes_on_with_fewer_as_it_is_taken_over_is_shared_by_those(tmp_path: Path):
    with notebook(SHARING) as process:
        (folder,) = tmp_path.iterdir()
        engine = engine_of(folder, 2)
        kill(process)
        engine.kill()
        engine.wait(10)
        with dtkit.attach() as cluster:
            check_two_share(cluster)


@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=["of one engine", "of all"])
@pytest.mark.slow
def test_a_job_that_ended_as_it_was_taken_over_is_made_anew(monkeypatch: pytest.MonkeyPatch, ranks: list[int]):
    """From what the others hold; where none has it, from the last snapshot, and of replicas there is none."""
    take_up = persisted_run.load

    def taken_up(cluster: dtkit.Cluster, job: str) -> Any:
        found = take_up(cluster, job)
        cluster.call_all("release", keys=[job], ranks=ranks)
        return found

    monkeypatch.setattr(persisted_run, "load", taken_up)
    with notebook() as process:
        kill(process)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            if ranks == [0]:
                check_goes_on(cluster)
            else:
                assert run.history.events[-1].text == "taken over at step 0 (the beginning, for want of a snapshot)"
                run.resume()
                run.wait(60)
                assert run.history.totals()["step"].tolist()[-STEPS:] == list(range(STEPS))
