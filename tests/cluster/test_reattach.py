"""Clusters whose kernel died or was superseded, and the notebook that attaches to them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import dtkit
from dtkit._util.process import ProcessId
from dtkit.cluster import cluster_file, reaper
from dtkit.health.status import EngineStatus, get_status_path
from dtkit.history import engine_outbox
from dtkit.history.between_steps import read_time_between
from dtkit.messages import END_EARLY_PREFIX
from tests.support.locks import is_owned
from tests.support.reattach import NOTEBOOK, check_run_continues, get_engine_process, notebook
from tests.support.recovery import wait_for_step
from tests.support.small import check_usable
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter runtime folder of this test alone."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))


def test_attach_continues_the_run_of_a_killed_kernel():
    with notebook() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            check_run_continues(cluster)


def test_attach_shows_the_timeline_and_the_last_comparison_of_replicas(tmp_path: Path):
    with notebook() as process:
        wait_until(lambda: list(tmp_path.rglob("replica-check.json")), 30)  # the notebook stores it once a second
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert run.timeline.ranks == [0, 1]
            assert run.timeline.steps[-1] < run.status.step
            assert run.consistency is not None
            assert run.consistency.differing_ranks == ()


@pytest.mark.slow
def test_attach_after_a_kill_during_a_pause_continues_the_run(tmp_path: Path):
    """The request to end a dispatch early must not outlive the notebook.

    Jupyter interrupts a kernel before it restarts it, so a restart leaves such a request.
    """
    request_end = """
    started.wait(60)
    folder = cluster._engine_group.cluster_folder
    set_end_early, folder.set_end_early = folder.set_end_early, lambda *_, **__: None  # the driver can't withdraw it
    set_end_early(run._driver.progress.plan.job, enabled=True)
"""
    with notebook(NOTEBOOK.replace("    started.wait(60)\n", request_end.lstrip("\n"))) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert list(tmp_path.glob(f"*/{END_EARLY_PREFIX}*"))
        with dtkit.attach() as cluster:
            check_run_continues(cluster)


@pytest.mark.slow
def test_attach_after_a_kill_during_a_dispatch_continues_the_run():
    """One rank has the dispatch and waits for the other one, which never gets it."""
    send_to_one_rank = """
    send = cluster._engine_group.transport.send

    def send_to_rank_0(rank, message, listen=None):
        threading.Event().wait() if started.is_set() and rank == 1 else None
        return send(rank, message, listen)

    cluster._engine_group.transport.send = send_to_rank_0
    started.wait(60)
"""
    with notebook(NOTEBOOK.replace("    started.wait(60)\n", send_to_one_rank.lstrip("\n"))) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        start = time.monotonic()
        with dtkit.attach() as cluster:
            assert time.monotonic() - start < 20  # less than the 30 s that engines have for their own calls
            check_run_continues(cluster)


@pytest.mark.slow
def test_attached_run_survives_the_loss_of_an_engine():
    with notebook() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            assert cluster.current_run is not None
            cluster._engine_group.transport.kill([1])
            run = cluster.current_run
            check_run_continues(cluster)
            assert "repair" in [event.kind for event in run.history.events]


def test_attached_run_knows_whether_higher_is_better():
    """The metric's name does not say it. The notebook has defined the metric, and has been killed."""
    metric = """
def margin(output, target):
    return output.mean()

margin.higher_is_better = True

if __name__ == "__main__":
"""
    options = "metrics={'margin': margin}, validation=oracle.data(), shuffle="
    code = NOTEBOOK.replace('if __name__ == "__main__":\n', metric).replace("shuffle=", options)
    with notebook(code) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert run.history.directions == {"margin": True}


def list_stored_steps(folder: Path, rank: int) -> set[int]:
    """Return the steps of the dispatch results that a rank has on disk."""
    (job,) = (path.name for path in (folder / "runs").iterdir())
    return {
        int(step)
        for result, _ in engine_outbox.read_dispatches(folder, job, rank)
        for step in np.asarray(result.rows)["step"]
    }


def check_rows(cluster: dtkit.Cluster, lost: set[int]) -> None:
    """Check that rank 0 has one row per step, and rank 1 one for each step that it stored."""
    assert cluster.current_run is not None
    rows, stop = cluster.current_run.history.rows(), cluster.current_run.status.step
    steps = {rank: rows["step"][rows["rank"] == rank].tolist() for rank in (0, 1)}
    assert steps[0] == list(range(stop))
    assert steps[1] == list(range(min(max(lost) + 1, stop)))


@pytest.mark.slow
def test_attach_after_losing_kernel_and_engine_continues_the_run(tmp_path: Path):
    """The engine ends during a dispatch, and the notebook has not read the previous result."""
    with notebook() as process:
        (folder,) = tmp_path.iterdir()
        engine = get_engine_process(folder, 1)
        process.send_signal(signal.SIGSTOP)
        before = list_stored_steps(folder, 1)
        wait_until(
            lambda: max(list_stored_steps(folder, 1), default=-1) > max(before, default=-1) or is_idle(folder, 1)
        )
        engine.kill()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        engine.wait(10)
        lost = list_stored_steps(folder, 1)
        assert lost
        with dtkit.attach() as cluster:
            check_rows(cluster, lost)
            check_run_continues(cluster)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_attach_after_losing_kernel_and_idle_engine_continues_the_run(tmp_path: Path):
    """The last result of the engine is unread, and only its outbox still has it."""
    with notebook() as process:
        (folder,) = tmp_path.iterdir()
        stop_between_dispatches(process, folder)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        engine = get_engine_process(folder, 1)
        engine.kill()
        engine.wait(10)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert cluster._engine_group.membership.engine_sys_path  # the remaining engine was asked
            check_rows(cluster, {run.status.step - 1})  # each step has a row of both ranks
            check_run_continues(cluster)
            run.release()
            assert not (folder / "runs" / run._driver.progress.plan.job).exists()


EVALUATES = NOTEBOOK.replace(
    "    run = cluster.train(", "    options.update(validation=oracle.data())\n    run = cluster.train("
)


@pytest.mark.slow
def test_attach_restores_evaluations_that_the_notebook_had_not_read(tmp_path: Path):
    with notebook(EVALUATES) as process:
        (folder,) = tmp_path.iterdir()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        wait_until(lambda: all(list((folder / "runs").glob(f"*/unread-evaluation-{rank}.*")) for rank in (0, 1)))
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            step = run.status.step
            evaluated = [e.step for e in run.history.evaluations]
            assert evaluated == list(range(6, step + (step in evaluated), 6))  # the last one may still be due
            run.step(6)
            assert [e.step for e in run.history.evaluations] == list(range(6, step + 7, 6))


def is_idle(folder: Path, rank: int) -> bool:
    status = EngineStatus.from_json(get_status_path(folder, rank).read_text())
    return status.op is None and status.stalled_s > 1


def stop_between_dispatches(process: subprocess.Popen[str], folder: Path) -> None:
    """Stop the notebook while no engine has a dispatch. A stop while it sends one is repeated."""
    for _ in range(5):
        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(is_idle(folder, rank) for rank in (0, 1)))
            return
        process.send_signal(signal.SIGCONT)
    raise AssertionError("an engine was busy whenever the notebook was stopped")


# The run can't end before another notebook has taken the cluster over.
UNENDED = NOTEBOOK.replace(
    "    started.wait(60)\n",
    """
    group, pause = cluster._engine_group, threading.Event()
    send = group.transport.send

    def send_in_time(rank, message, listen=None):
        while run.status.step > 1000 and not group.is_superseded:
            pause.wait(0.02)
        return send(rank, message, listen)

    group.transport.send = send_in_time
    started.wait(60)
""".lstrip("\n"),
)


@pytest.mark.slow
def test_superseded_notebook_raises_and_leaves_the_cluster_alone(tmp_path: Path):
    with notebook(UNENDED) as process:
        name = next(tmp_path.iterdir()).name
        with pytest.raises(dtkit.errors.ClusterError, match="other notebooks use the clusters"):
            dtkit.attach()
        with pytest.raises(dtkit.errors.ClusterError, match=r"still runs\. Close the cluster there"):
            dtkit.attach(name)
        assert process.poll() is None
        with dtkit.attach(name, force=True) as cluster:
            check_taken_over(process, cluster)


def check_taken_over(process: subprocess.Popen[str], cluster: dtkit.Cluster) -> None:
    check_run_continues(cluster)
    printed, _ = process.communicate("", timeout=30)
    assert "SupersededError another notebook, or this one by attaching again, has taken" in printed
    check_usable(cluster)


LISTENING = NOTEBOOK.replace(
    "    sys.stdin.read()\n",
    """
    for line in sys.stdin:
        try:
            exec(line)
        except BaseException as error:
            print(">", type(error).__name__, str(error).partition(chr(10))[0], flush=True)
        else:
            print("> done", flush=True)
""",
)


def execute_line(process: subprocess.Popen[str], line: str) -> str:
    """Execute a line in the other notebook, and return its outcome."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return next(line for line in process.stdout if line.startswith("> ")).removeprefix("> ")


@pytest.mark.slow
def test_attached_run_keeps_its_elapsed_time():
    """It also counts the time between the steps, which the engines don't know."""
    with notebook(LISTENING) as process:
        execute_line(process, "run.pause()")
        found = execute_line(process, "raise ValueError(run.status.elapsed_s)")
        elapsed_s = float(found.removeprefix("ValueError "))
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            assert cluster.current_run is not None
            assert cluster.current_run.status.elapsed_s == pytest.approx(elapsed_s)
            assert elapsed_s > cluster.current_run.history.totals()["step_s"].sum()


VALIDATED = NOTEBOOK.replace("shuffle=", "validation=oracle.data(), validation_every=1, shuffle=")


@pytest.mark.slow
def test_times_of_an_attached_run_never_exceed_its_elapsed_time():
    with notebook(VALIDATED) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        # sleeps: engines wait for a notebook, next to a validation
        time.sleep(1)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert read_time_between(run.history).whole_s <= run.status.elapsed_s
            run.step(50)
            assert read_time_between(run.history).whole_s <= run.status.elapsed_s


FAILING = LISTENING.replace("loss=oracle.mean_loss", "loss=fail_on_request").replace(
    'if __name__ == "__main__":',
    """
import os

def fail_on_request(output, target):
    if os.path.exists(os.environ["DTKIT_TEST_FAIL"]) and oracle.torch.distributed.get_rank() == 1:
        raise ValueError("on request")
    return oracle.mean_loss(output, target)

if __name__ == "__main__":""",
)


@pytest.fixture
def request_failure(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File whose existence lets the loss of FAILING raise."""
    path = tmp_path_factory.mktemp("failure") / "requested"
    monkeypatch.setenv("DTKIT_TEST_FAIL", str(path))
    return path


@pytest.mark.parametrize("sees_it", [True, False], ids=["before the restart", "after the restart"])
@pytest.mark.slow
def test_attached_run_has_failed_if_user_code_raised(request_failure: Path, *, sees_it: bool):
    with notebook(FAILING) as process:
        if sees_it:
            request_failure.touch()
            assert execute_line(process, "run.wait(60)").startswith("EngineError rank 1 on ")
        else:
            process.send_signal(signal.SIGSTOP)
            request_failure.touch()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        if not sees_it:  # the engines have up to two dispatches of a second
            wait_until(lambda: all(is_idle(folder, rank) for folder in get_folders() for rank in (0, 1)))
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert run.status.state is dtkit.types.State.FAILED
            assert isinstance(run.exception, dtkit.errors.EngineError)
            assert str(run.exception).splitlines()[0].endswith(f"step {run.status.step}: ValueError: on request")
            assert [event.kind for event in run.history.events].count("error") == 1
            with pytest.raises(dtkit.errors.EngineError, match="on request"):
                run.wait()
            check_usable(cluster)


def get_folders() -> list[Path]:
    return list(Path(os.environ["JUPYTER_RUNTIME_DIR"]).glob("dtkit-*"))


@pytest.mark.slow
def test_attached_run_that_was_stopped_is_stopped_and_can_be_extended():
    with notebook(LISTENING) as process:
        assert execute_line(process, "run.stop()") == "done\n"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert run.status.state is dtkit.types.State.STOPPED
            end = run.status.step + 5
            run.extend(steps=5)
            run.wait(60)
            assert (run.status.state, run.status.step) == (dtkit.types.State.COMPLETED, end)


PAUSED = LISTENING.replace("    started.wait(60)\n", "    run.pause()\n    run.step(110)\n")


@pytest.mark.slow
def test_superseded_notebook_cannot_change_the_persisted_run(tmp_path: Path):
    """The older notebook continues without knowing; only the newer one may write the run's record."""
    with notebook(PAUSED) as process:
        newer = dtkit.attach(next(tmp_path.iterdir()).name, force=True)
        run = newer.current_run
        assert run is not None
        assert execute_line(process, "run.note('I am still here')") == "done\n"
        assert execute_line(process, "run.resume()") == "done\n"
        assert execute_line(process, "run.wait(60)").startswith(
            "SupersededError another notebook, or this one by attaching again, has taken"
        )
        assert execute_line(process, "cluster.repair()").startswith(
            "SupersededError another notebook, or this one by attaching again, has taken"
        )
        execute_line(process, "run.note('and on')")
        execute_line(process, "run.release()")
        run.resume()
        wait_for_step(run, run.status.step + 50)
        run.pause()
        with dtkit.attach(newer.folder.name, force=True) as cluster:
            last = cluster.current_run
            assert last is not None
            assert [e.text for e in last.history.events[:-1]] == [e.text for e in run.history.events]
            assert "taken over" in last.history.events[-1].text
            assert "here" not in " ".join(event.text for event in last.history.events)
            check_run_continues(cluster)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_failed_attach_leaves_the_cluster_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The previous owner keeps the cluster, and ends it."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
    cluster = dtkit.attach()
    monkeypatch.setattr("dtkit.cluster.attach._restore_run", raise_missing_module)
    with pytest.raises(dtkit.errors.ClusterError, match=r"needs the module 'absent'.* The cluster is as it was"):
        dtkit.attach(cluster.folder.name, force=True)
    assert not cluster._engine_group.is_superseded
    assert is_owned(cluster.folder)  # otherwise the reaper ends it
    check_usable(cluster)
    cluster.close()
    assert list(tmp_path.iterdir()) == []


def raise_missing_module(*_: object) -> None:
    raise ModuleNotFoundError("No module named 'absent'", name="absent")


def test_attach_returns_the_cluster_that_this_notebook_has(capsys: pytest.CaptureFixture[str]):
    with dtkit.Cluster(1, threads=1) as cluster:
        assert dtkit.attach() is cluster
        assert dtkit.attach(cluster.folder.name) is cluster
        assert f"this notebook already has {cluster.folder.name}" in capsys.readouterr().out
        check_usable(cluster)
        with dtkit.attach(cluster.folder.name, force=True) as newer:
            with pytest.raises(dtkit.errors.DtkitError, match=r"has taken this cluster over") as caught:
                cluster.run(print)
            assert not re.search(r"\d{10}", str(caught.value))  # a number of an owner
            check_usable(newer)


@pytest.mark.slow
def test_second_attach_sees_what_the_first_one_did():
    with notebook() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        first = dtkit.attach()
        assert first.current_run is not None
        first.current_run.resume()
        wait_for_step(first.current_run, first.current_run.status.step + 50)
        with dtkit.attach(first.folder.name, force=True) as cluster:
            check_run_continues(cluster)
        first.close()


SCRIPT = """
import dtkit

if __name__ == "__main__":
    dtkit.Cluster(1, threads=1, keep_alive=True)
"""


@pytest.mark.slow
def test_cluster_with_keep_alive_outlives_its_script():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
    with dtkit.attach() as cluster:
        assert cluster.current_run is None
        check_usable(cluster)


@pytest.mark.slow
def test_attach_refuses_a_cluster_whose_controller_was_killed(tmp_path: Path):
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
    (folder,) = tmp_path.iterdir()
    processes = reaper._find_processes(folder)
    controllers = [process for process in processes if any("controller" in word for word in process.cmdline())]
    try:
        for process in controllers:
            process.kill()
        wait_until(lambda: not any(ProcessId(process.pid, process.create_time()).is_alive for process in controllers))
        message = rf"the controller of {folder.name}, .* has ended.*Start another cluster with dtkit\.Cluster\(\)"
        with pytest.raises(dtkit.errors.ClusterError, match=message):
            dtkit.attach(folder.name)
    finally:
        shutil.rmtree(folder)
    assert not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.slow
def test_cluster_ends_when_its_folder_is_removed(tmp_path: Path):
    """systemd removes the runtime folder when a user logs out; nobody could find the processes then."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
    (folder,) = tmp_path.iterdir()
    processes = reaper._find_processes(folder)
    assert len(processes) > 3  # controller, schedulers, engine, nanny
    shutil.rmtree(folder)
    assert not psutil.wait_procs(processes, timeout=30)[1]


CLOSING = """
import dtkit

if __name__ == "__main__":
    dtkit.attach().close()
"""


@pytest.fixture
def older(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a copy of dtkit of another version."""
    folder = tmp_path_factory.mktemp("older")
    shutil.copytree(Path(dtkit.__file__).parent, folder / "dtkit", ignore=shutil.ignore_patterns("__pycache__"))
    version_file = folder / "dtkit" / "_util" / "installation.py"
    version_file.write_text(version_file.read_text().replace(f'"{dtkit.__version__}"', '"0.0.1"'))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.slow
def test_attach_refuses_a_cluster_of_another_version(older: Path, tmp_path: Path):
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=older, check=True, timeout=60)
    try:
        (running,) = cluster_file.find_running(tmp_path)
        message = (
            rf"^{running.name} was started by dtkit 0\.0\.1, and this is {dtkit.__version__}\. Take it over with that"
        )
        with pytest.raises(dtkit.errors.VersionMismatchError, match=message):
            dtkit.attach()
        assert cluster_file.find_running(tmp_path) == [running]
    finally:
        subprocess.run([sys.executable, "-c", CLOSING], cwd=older, check=True, timeout=60)
    assert cluster_file.find_running(tmp_path) == []


def test_attach_without_a_running_cluster_raises():
    with pytest.raises(dtkit.errors.ClusterError, match=r"no cluster of yours is running on this machine; start one"):
        dtkit.attach()
