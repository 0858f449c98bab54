"""Faults outside the ranks' code: of the notebook, the controller and the disk, and repeated interrupts.

``python -m tests.faults.other_faults FOLDER`` runs a notebook that the test kills.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

import dtkit
from dtkit.types import State
from tests.faults import expect, training
from tests.faults.cells import STEPS
from tests.faults.quiet import quiet
from tests.faults.trap import RepeatedTrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.faults.runner import Stage

STEP_S = 0.1
"""Seconds of a step, so that there is time to disturb it."""
RETURN_S = 0.5 + 2 * STEP_S
"""Limit from one interrupt to the end of `wait`."""
ABORT_S = 3.0
"""Limit from a second interrupt until all engines are idle."""
_PATIENCE_S = 60.0


# -- interrupts ------------------------------------------------------------------------------------------------


def interrupt_once(stage: Stage) -> None:
    """Interrupt once: the run pauses at the end of a step, and can be resumed."""
    run = stage.train(_make_slow_steps(stage))
    run.resume()
    seconds = _interrupt(run, [0.5])
    _record_interrupt(stage, run, seconds, RETURN_S, "pause")
    _check_continues(stage, run)


def interrupt_twice(stage: Stage) -> None:
    """Interrupt an endless step twice: the first waits for the step's end, the second aborts the step."""
    run = stage.train()
    stage.trap.arm()
    run.resume()
    _wait_until(lambda: stage.trap.fired_at is not None, "the trap fires")
    seconds = _interrupt(run, [0.2, 1.0])
    _record_interrupt(stage, run, seconds, ABORT_S, "pause")
    _check_continues(stage, run)


def interrupt_ten_times(stage: Stage) -> None:
    """Interrupt an endless step ten times, and then ten `wait` calls once each."""
    run = stage.train()
    stage.trap.arm()
    run.resume()
    _wait_until(lambda: stage.trap.fired_at is not None, "the trap fires")
    _interrupt(run, [0.2] + [0.1] * 9)
    _wait_until(lambda: run.status.state is State.PAUSED, "the run pauses")
    _check_continues(stage, run)
    run = stage.train(_make_slow_steps(stage))
    run.resume()
    worst = 0.0
    for _ in range(10):
        worst = max(worst, _interrupt(run, [0.05]))
        run.resume()
    _record_interrupt(stage, run, worst, RETURN_S, "pause", State.RUNNING)
    _check_continues(stage, run)


def _interrupt(run: dtkit.Run, pauses: Sequence[float]) -> float:
    """Send an interrupt after each pause while a cell waits, and return the seconds from the last one to its end."""
    sent_at: list[float] = []

    def send_interrupts() -> None:
        for pause in pauses:
            threading.Event().wait(pause)
            sent_at.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send_interrupts)
    with _cell() as is_running, quiet():
        is_running.set()
        thread.start()
        try:
            run.wait(_PATIENCE_S)
        except KeyboardInterrupt:
            is_running.clear()
            ended = time.monotonic()
        else:
            raise AssertionError("wait did not raise KeyboardInterrupt")
        thread.join(_PATIENCE_S)
    return max(0.0, ended - sent_at[-1])


@contextlib.contextmanager
def _cell() -> Iterator[threading.Event]:
    """Treat SIGINT as a kernel does: it interrupts a running cell (the event is set) and has no effect without one."""
    is_running = threading.Event()

    def interrupt(*_: object) -> None:
        if is_running.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield is_running
    finally:
        signal.signal(signal.SIGINT, before)


def _record_interrupt(
    stage: Stage, run: dtkit.Run, seconds: float, limit: float, kind: str, state: State = State.PAUSED
) -> None:
    outcome, limit = stage.outcome, limit * expect.get_load_factor()
    outcome.detected_s, outcome.lost = seconds, "no step lost"
    outcome.shown = next((event.text for event in run.history.events if event.kind == kind), "")
    expect.check(outcome, bool(outcome.shown), "the log does not mention it")
    expect.check(outcome, seconds <= limit, f"wait ended after {seconds:.2f} s, limit {limit:.2f} s")
    expect.check(outcome, run.status.state is state, f"the run is {run.status.state.value}, not {state.value}")


def _check_continues(stage: Stage, run: dtkit.Run) -> None:
    if run.status.state is State.PAUSED:
        run.resume()
    with quiet():
        run.wait(_PATIENCE_S)
    expect.check_completed(stage, run)


# -- the disk --------------------------------------------------------------------------------------------------


def disk_full(stage: Stage) -> None:
    """Limit the file size on one rank: the save fails with a reason, and the run continues and can save later."""
    run, outcome, folder = stage.train(), stage.outcome, stage.trap.path.parent / "checkpoints"
    run.step(stage.trap.step - 1)
    with quiet():
        run.save(folder)
    run.step()
    stage.cluster.run(_limit_files, stage.trap.rank, 100)
    start = time.monotonic()
    try:
        with quiet():
            run.save(folder)
    except dtkit.errors.CheckpointError as error:
        outcome.shown, outcome.detected_s = str(error), time.monotonic() - start
    expect.check(outcome, "File too large" in outcome.shown, "the error has no reason")
    expect.check(outcome, dtkit.Checkpoint(folder).step == stage.trap.step - 1, "the older checkpoint is gone")
    stage.cluster.run(_limit_files, stage.trap.rank, resource.RLIM_INFINITY)
    with quiet():
        run.save(folder)
    expect.check(outcome, dtkit.Checkpoint(folder).step == stage.trap.step, "the next save fails")
    outcome.lost = "the checkpoint"
    _check_continues(stage, run)


def _limit_files(rank: int, size: int) -> None:
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# -- the controller --------------------------------------------------------------------------------------------


def controller(stage: Stage) -> None:
    """Kill the controller: the run ends with this reason, and a new cluster resumes from the checkpoint."""
    folder, outcome = stage.trap.path.parent / "checkpoints", stage.outcome
    with quiet():
        cluster = dtkit.Cluster(2, threads=1)
    with cluster:
        options: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 4, "checkpoint_dir": folder}
        run = training.start(cluster, "DataParallel", _make_slow_steps(stage), **options)
        run.resume()
        _wait_until(lambda: run.status.step >= 10, "ten steps are taken")
        engines = [psutil.Process(node.pid) for node in cluster.nodes]
        killed_at = time.time()
        _kill_controller(cluster)
        _wait_until(lambda: run.status.state.has_ended, "the run ends")
        _record_end(stage, run, killed_at)
    alive = psutil.wait_procs(engines, timeout=10)[1]
    expect.check(outcome, not alive, f"{len(alive)} engines are alive after close")
    resumed = stage.train(resume_from=folder)
    outcome.lost = f"{run.status.step - resumed.status.step} steps lost"
    _check_continues(stage, resumed)


def _kill_controller(cluster: dtkit.Cluster) -> None:
    process = psutil.Process(cluster._engine_group.transport._launcher._cluster.controller.process.pid)
    for child in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _record_end(stage: Stage, run: dtkit.Run, killed_at: float) -> None:
    outcome = stage.outcome
    entry = next((event for event in run.history.events if event.kind == "error" and event.time >= killed_at), None)
    if entry is not None:
        outcome.detected_s, outcome.shown = entry.time - killed_at, entry.text
    expect.check(outcome, entry is not None and "controller" in entry.text, f"the run raised {run.exception!r}")
    limit = expect.CONTROLLER_S * expect.get_load_factor()
    expect.check(
        outcome, (outcome.detected_s or 0) <= limit, f"logged after {outcome.detected_s} s, limit {limit:.1f} s"
    )


# -- the kernel ------------------------------------------------------------------------------------------------


def kernel(stage: Stage) -> None:
    """Kill the kernel during a run: another one attaches and continues the run with its whole history."""
    outcome = stage.outcome
    command = [sys.executable, "-m", "tests.faults.other_faults", str(stage.trap.path.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as notebook:
        try:
            assert notebook.stdout is not None
            name = next(line.split()[1] for line in notebook.stdout if line.startswith("READY"))
        finally:
            notebook.kill()
    start = time.monotonic()
    with quiet():
        cluster = dtkit.attach(name)
    with cluster:
        run = cluster.current_run
        outcome.detected_s = time.monotonic() - start
        if not expect.check(outcome, run is not None, "there is no run") or run is None:
            return
        outcome.shown = f"attached at step {run.status.step}, {run.status.state.value}"
        outcome.lost = "no step lost"
        _check_continues(stage, run)


def notebook(folder: Path) -> None:
    """Train with slow steps until this process is killed. Print the cluster's name after four steps."""
    with dtkit.Cluster(2, threads=1) as cluster:
        run = training.start(cluster, "DataParallel", RepeatedTrap(folder / "repeated", 3 * STEP_S), steps=STEPS)
        run.resume()
        _wait_until(lambda: run.status.step >= 4, "four steps are taken")
        print(f"\nREADY {cluster.folder.name}", flush=True)
        run.wait(_PATIENCE_S)


def _make_slow_steps(stage: Stage) -> RepeatedTrap:
    return RepeatedTrap(stage.trap.path.with_name("repeated"), STEP_S)


def _wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline, pause = time.monotonic() + _PATIENCE_S, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_PATIENCE_S:g} s: {description}")
        pause.wait(0.01)


OTHER_FAULTS: dict[str, Callable[[Stage], None]] = {
    "interrupt once": interrupt_once,
    "interrupt twice": interrupt_twice,
    "interrupt ten times": interrupt_ten_times,
    "disk full": disk_full,
    "controller killed": controller,
    "kernel killed": kernel,
}

if __name__ == "__main__":
    notebook(Path(sys.argv[1]))
