"""A kernel that dies or is left behind, and the one that takes its cluster over."""

from __future__ import annotations

import contextlib
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
from dtkit.cluster import cluster_file, reaper
from dtkit.health.status import EngineStatus, get_status_path
from dtkit.history import engine_outbox
from dtkit.types import END_EARLY_PREFIX
from tests.support.locks import owned
from tests.support.recovery import at_step
from tests.support.small import check_usable
from tests.support.takeover import NOTEBOOK, check_goes_on, engine_of, notebook
from tests.support.waiting import until

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of this test alone."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))


def test_the_kernel_was_killed():
    with notebook() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            check_goes_on(cluster)


@pytest.mark.slow
def test_the_kernel_was_killed_while_it_waited_for_a_pause(tmp_path: Path):
    """Its word to the engines, to end what they do, is still there: every step was put off, for ever. Jupyter
    interrupts a kernel before it kills it, so this is what a restart does.
    """
    asks = """
    there.wait(60)
    hurry, cluster.hurry = cluster.hurry, lambda *_, **__: None  # from here on its driver gets no further
    hurry(run._driver.progress.plan.job, wanted=True)
"""
    with notebook(NOTEBOOK.replace("    there.wait(60)\n", asks.lstrip("\n"))) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert list(tmp_path.glob(f"*/{END_EARLY_PREFIX}*"))
        with dtkit.attach() as cluster:
            check_goes_on(cluster)


def test_the_kernel_was_killed_while_it_sent_a_dispatch():
    """One rank has it, and waits for the other one, which never gets it."""
    half = """
    send = cluster._transport.send

    def half(rank, message, listen=None):
        threading.Event().wait() if there.is_set() and rank == 1 else None
        return send(rank, message, listen)

    cluster._transport.send = half
    there.wait(60)
"""
    with notebook(NOTEBOOK.replace("    there.wait(60)\n", half.lstrip("\n"))) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        begun = time.monotonic()
        with dtkit.attach() as cluster:
            assert time.monotonic() - begun < 20  # not the 30 s that an engine may take for what it does by itself
            check_goes_on(cluster)


@pytest.mark.slow
def test_the_kernel_was_killed_and_then_an_engine():
    with notebook() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            assert cluster.current_run is not None
            cluster.kill([1])
            run = cluster.current_run
            check_goes_on(cluster)
            assert "repair" in [event.kind for event in run.history.events]


def left_by(folder: Path, rank: int) -> set[int]:
    """The steps of dispatches that a rank has on disk."""
    (job,) = (path.name for path in (folder / "runs").iterdir())
    return {
        int(step)
        for one, _ in engine_outbox.read_dispatches(folder, job, rank)
        for step in np.asarray(one.rows)["step"]
    }


def check_rows(cluster: dtkit.Cluster, lost: set[int]) -> None:
    """Of the survivor a row for each step, of rank 1 one for each that it left; none twice."""
    assert cluster.current_run is not None
    rows, stop = cluster.current_run.history.rows(), cluster.current_run.status.step
    found = {rank: rows["step"][rows["rank"] == rank].tolist() for rank in (0, 1)}
    assert found[0] == list(range(stop))
    assert found[1] == list(range(min(max(lost) + 1, stop)))


@pytest.mark.slow
def test_the_kernel_was_killed_and_an_engine_with_it(tmp_path: Path):
    """In the midst of a dispatch, after one that the notebook had no time to read."""
    with notebook() as process:
        (folder,) = tmp_path.iterdir()
        engine = engine_of(folder, 1)
        process.send_signal(signal.SIGSTOP)
        before = left_by(folder, 1)
        until(lambda: max(left_by(folder, 1), default=-1) > max(before, default=-1) or idle(folder, 1))
        engine.kill()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        engine.wait(10)
        lost = left_by(folder, 1)
        assert lost
        with dtkit.attach() as cluster:
            check_rows(cluster, lost)
            check_goes_on(cluster)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_kernel_was_killed_and_an_engine_once_it_had_nothing_to_do(tmp_path: Path):
    """What it did last nobody has read, and nobody can ask it any more."""
    with notebook() as process:
        (folder,) = tmp_path.iterdir()
        stop_between_dispatches(process, folder)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        engine = engine_of(folder, 1)
        engine.kill()
        engine.wait(10)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert cluster._engine_sys_path  # the one that is left was asked
            check_rows(cluster, {run.status.step - 1})  # no step is without its row of either rank
            check_goes_on(cluster)
            assert not (folder / "runs" / run._job).exists()  # it was released


EVALUATES = NOTEBOOK.replace(
    "    run = cluster.train(", "    options.update(validation=oracle.data())\n    run = cluster.train("
)


def test_what_evaluations_found_that_the_notebook_did_not_read_is_in_the_history(tmp_path: Path):
    with notebook(EVALUATES) as process:
        (folder,) = tmp_path.iterdir()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        until(lambda: all(list((folder / "runs").glob(f"*/unread-evaluation-{rank}.*")) for rank in (0, 1)))
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            stands = run.status.step
            found = [e.step for e in run.history.evaluations]
            assert found == list(range(6, stands + (stands in found), 6))  # where the run stands, it may be due
            run.step(6)
            assert [e.step for e in run.history.evaluations] == list(range(6, stands + 7, 6))


def idle(folder: Path, rank: int) -> bool:
    found = EngineStatus.from_json(get_status_path(folder, rank).read_text())
    return found.op is None and found.stalled_s > 1


def stop_between_dispatches(process: subprocess.Popen[str], folder: Path) -> None:
    """Once more where it was sending one: the rank that has it waits for the other then."""
    for _ in range(5):
        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(AssertionError):
            until(lambda: all(idle(folder, rank) for rank in (0, 1)))
            return
        process.send_signal(signal.SIGCONT)
    raise AssertionError("an engine had something to do whenever its notebook was stopped")


def test_the_older_notebook_is_told_and_leaves_the_cluster_alone():
    with notebook() as process, dtkit.attach() as cluster:
        check_goes_on(cluster)
        said, _ = process.communicate("", timeout=30)
        assert "SupersededError another notebook has taken this cluster over" in said
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


def tell(process: subprocess.Popen[str], line: str) -> str:
    """Have another notebook execute a line; what becomes of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return next(line for line in process.stdout if line.startswith("> ")).removeprefix("> ")


@pytest.mark.slow
def test_an_older_notebook_spoils_nothing(tmp_path: Path):
    """It does not know yet, and goes on with its run: what is written down of the run is the newer one's alone."""
    with notebook(LISTENING) as process:
        assert tell(process, "run.pause()") == "done\n"
        newer = dtkit.attach(next(tmp_path.iterdir()).name)
        run = newer.current_run
        assert run is not None
        assert tell(process, "run.note('I am still here')") == "done\n"
        assert tell(process, "run.resume()") == "done\n"
        assert tell(process, "run.wait(60)").startswith("SupersededError another notebook has taken this cluster over")
        assert tell(process, "cluster.repair()").startswith(
            "SupersededError another notebook has taken this cluster over"
        )
        tell(process, "run.note('and on')")
        tell(process, "run.release()")
        run.resume()
        at_step(run, run.status.step + 50)
        run.pause()
        with dtkit.attach(newer.folder.name) as cluster:
            last = cluster.current_run
            assert last is not None
            assert [e.text for e in last.history.events[:-1]] == [e.text for e in run.history.events]
            assert "taken over" in last.history.events[-1].text
            assert "here" not in " ".join(event.text for event in last.history.events)
            check_goes_on(cluster)
    assert list(tmp_path.iterdir()) == []


def test_a_takeover_that_fails_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever had the cluster still has it, and ends it."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
    cluster = dtkit.attach()
    monkeypatch.setattr("dtkit.cluster.attach._restore_run", fail)
    with pytest.raises(LookupError, match="unreadable"):
        dtkit.attach(cluster.folder.name)
    assert not cluster.is_superseded
    assert owned(cluster.folder)  # else its warden ends it
    check_usable(cluster)
    cluster.close()
    assert list(tmp_path.iterdir()) == []


def fail(_cluster: dtkit.Cluster) -> None:
    raise LookupError("unreadable")


@pytest.mark.slow
def test_a_second_takeover_finds_what_the_first_one_did():
    with notebook() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        first = dtkit.attach()
        assert first.current_run is not None
        first.current_run.resume()
        at_step(first.current_run, first.current_run.status.step + 50)
        with dtkit.attach(first.folder.name) as cluster:
            check_goes_on(cluster)
        first.close()


SCRIPT = """
import dtkit

if __name__ == "__main__":
    dtkit.Cluster(1, threads=1, keep_alive=True)
"""


@pytest.mark.slow
def test_a_cluster_may_outlive_a_script():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
    with dtkit.attach() as cluster:
        assert cluster.current_run is None
        check_usable(cluster)


def test_a_cluster_whose_controller_was_killed_is_refused(tmp_path: Path):
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
    (folder,) = tmp_path.iterdir()
    processes = reaper._find_processes(folder)
    controllers = [process for process in processes if any("controller" in word for word in process.cmdline())]
    try:
        for process in controllers:
            process.kill()
        until(
            lambda: (
                not any(cluster_file.is_process_alive(process.pid, process.create_time()) for process in controllers)
            )
        )
        told = rf"the controller of {folder.name}, .* has ended.*Start another cluster with dtkit\.Cluster\(\)"
        with pytest.raises(dtkit.errors.ClusterError, match=told):
            dtkit.attach(folder.name)
    finally:
        shutil.rmtree(folder)
    assert not psutil.wait_procs(processes, timeout=30)[1]


def test_a_cluster_whose_folder_somebody_removed_ends(tmp_path: Path):
    """As systemd does with the runtime folder when a user logs out: nobody could find what is left."""
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
    """A folder with a copy of dtkit that is of another version."""
    folder = tmp_path_factory.mktemp("older")
    shutil.copytree(Path(dtkit.__file__).parent, folder / "dtkit", ignore=shutil.ignore_patterns("__pycache__"))
    front = folder / "dtkit" / "__init__.py"
    front.write_text(front.read_text().replace(f'__version__ = "{dtkit.__version__}"', '__version__ = "0.0.1"'))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_a_cluster_of_another_version_is_refused_and_left_to_that_one(older: Path, tmp_path: Path):
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=older, check=True, timeout=60)
    try:
        (found,) = cluster_file.find_running(tmp_path)
        told = rf"^{found.name} was started by dtkit 0\.0\.1, and this is {dtkit.__version__}\. Take it over with that"
        with pytest.raises(dtkit.errors.VersionMismatchError, match=told):
            dtkit.attach()
        assert cluster_file.find_running(tmp_path) == [found]
    finally:
        subprocess.run([sys.executable, "-c", CLOSING], cwd=older, check=True, timeout=60)
    assert cluster_file.find_running(tmp_path) == []


def test_without_a_cluster_there_is_none_to_take_over():
    with pytest.raises(dtkit.errors.ClusterError, match=r"no cluster of yours is running on this machine; start one"):
        dtkit.attach()
