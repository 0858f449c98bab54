"""Faults beside the matrix, which befall no rank's code: the notebook, the controller, the disk, and impatient people.

``python -m tests.faults.besides FOLDER`` is a notebook's process that is going to be killed.
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
from tests.faults.trap import Minefield

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.faults.runner import Stage

PACE_S = 0.1
"""What a step takes here, so that there is time to do something to it."""
RETURN_S = 0.5 + 2 * PACE_S
"""From one interrupt to the end of `wait`."""
BROKEN_S = 3.0
"""From a second one until all engines are idle."""
_PATIENCE_S = 60.0


# -- interrupts ------------------------------------------------------------------------------------------------


def once(stage: Stage) -> None:
    """The run pauses at a step's end, and goes on when asked to."""
    run = stage.train(_pace(stage))
    run.resume()
    seconds = _interrupted(run, [0.5])
    _tell(stage, run, seconds, RETURN_S, "pause")
    _goes_on(stage, run)


def twice(stage: Stage) -> None:
    """A rank is in an endless loop: the first interrupt waits for its step's end, the second breaks it off."""
    run = stage.train()
    stage.trap.set()
    run.resume()
    _until(lambda: stage.trap.sprung_at is not None, "the trap springs")
    seconds = _interrupted(run, [0.2, 1.0])
    _tell(stage, run, seconds, BROKEN_S, "pause")
    _goes_on(stage, run)


def ten_times(stage: Stage) -> None:
    """In a row, while a rank is in an endless loop; then once for each of ten cells."""
    run = stage.train()
    stage.trap.set()
    run.resume()
    _until(lambda: stage.trap.sprung_at is not None, "the trap springs")
    _interrupted(run, [0.2] + [0.1] * 9)
    _until(lambda: run.status.state is State.PAUSED, "the run pauses")
    _goes_on(stage, run)
    run = stage.train(_pace(stage))
    run.resume()
    worst = 0.0
    for _ in range(10):
        worst = max(worst, _interrupted(run, [0.05]))
        run.resume()
    _tell(stage, run, worst, RETURN_S, "pause", State.RUNNING)
    _goes_on(stage, run)


def _interrupted(run: dtkit.Run, pauses: Sequence[float]) -> float:
    """Press the button after each of these pauses while a cell waits. Seconds from the last press to its end."""
    pressed: list[float] = []

    def press() -> None:
        for pause in pauses:
            threading.Event().wait(pause)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    with _cell() as cell, quiet():
        cell.set()
        thread.start()
        try:
            run.wait(_PATIENCE_S)
        except KeyboardInterrupt:
            cell.clear()
            ended = time.monotonic()
        else:
            raise AssertionError("an interrupt of wait is not raised")
        thread.join(_PATIENCE_S)
    return max(0.0, ended - pressed[-1])


@contextlib.contextmanager
def _cell() -> Iterator[threading.Event]:
    """While the event is set, a cell runs, and SIGINT interrupts it; else it does nothing, as in an idle kernel."""
    runs = threading.Event()

    def interrupt(*_: object) -> None:
        if runs.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield runs
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(stage: Stage, run: dtkit.Run, seconds: float, limit: float, kind: str, state: State = State.PAUSED) -> None:
    outcome, limit = stage.outcome, limit * expect.crowd()
    outcome.detected_s, outcome.lost = seconds, "no step lost"
    outcome.shown = next((event.text for event in run.history.events if event.kind == kind), "")
    expect.check(outcome, bool(outcome.shown), "the log says nothing of it")
    expect.check(outcome, seconds <= limit, f"wait ended after {seconds:.2f} s, limit {limit:.2f} s")
    expect.check(outcome, run.status.state is state, f"the run is {run.status.state.value}, not {state.value}")


def _goes_on(stage: Stage, run: dtkit.Run) -> None:
    if run.status.state is State.PAUSED:
        run.resume()
    with quiet():
        run.wait(_PATIENCE_S)
    expect.completed(stage, run)


# -- the disk --------------------------------------------------------------------------------------------------


def disk_full(stage: Stage) -> None:
    """On one rank: nothing is written, the error says why, the older checkpoint stays; the run goes on, and saves."""
    run, outcome, folder = stage.train(), stage.outcome, stage.trap.path.parent / "checkpoints"
    run.step(stage.trap.step - 1)
    with quiet():
        run.save(folder)
    run.step()
    stage.cluster.run(_limit_files, stage.trap.rank, 100)
    begun = time.monotonic()
    try:
        with quiet():
            run.save(folder)
    except dtkit.errors.CheckpointError as error:
        outcome.shown, outcome.detected_s = str(error), time.monotonic() - begun
    expect.check(outcome, "File too large" in outcome.shown, "the error does not say why")
    expect.check(outcome, dtkit.Checkpoint(folder).step == stage.trap.step - 1, "the older checkpoint is gone")
    stage.cluster.run(_limit_files, stage.trap.rank, resource.RLIM_INFINITY)
    with quiet():
        run.save(folder)
    expect.check(outcome, dtkit.Checkpoint(folder).step == stage.trap.step, "it does not save again")
    outcome.lost = "the checkpoint"
    _goes_on(stage, run)


def _limit_files(rank: int, size: int) -> None:
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# -- the controller --------------------------------------------------------------------------------------------


def controller(stage: Stage) -> None:
    """It is killed, with its schedulers: the run says so and ends; a new cluster goes on from the checkpoint."""
    folder, outcome = stage.trap.path.parent / "checkpoints", stage.outcome
    with quiet():
        cluster = dtkit.Cluster(2, threads=1)
    with cluster:
        how: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 4, "checkpoint_dir": folder}
        run = training.start(cluster, "DataParallel", _pace(stage), **how)
        run.resume()
        _until(lambda: run.status.step >= 10, "ten steps are taken")
        engines = [psutil.Process(node.pid) for node in cluster.nodes]
        killed = time.time()
        _kill_controller(cluster)
        _until(lambda: run.status.state.has_ended, "the run ends")
        _note_end(stage, run, killed)
    left = psutil.wait_procs(engines, timeout=10)[1]
    expect.check(outcome, not left, f"{len(left)} engines live on after close")
    again = stage.train(resume_from=folder)
    outcome.lost = f"{run.status.step - again.status.step} steps lost"
    _goes_on(stage, again)


def _kill_controller(cluster: dtkit.Cluster) -> None:
    process = psutil.Process(cluster._transport._cluster.controller.process.pid)
    for one in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def _note_end(stage: Stage, run: dtkit.Run, killed: float) -> None:
    outcome = stage.outcome
    told = next((event for event in run.history.events if event.kind == "error" and event.time >= killed), None)
    if told is not None:
        outcome.detected_s, outcome.shown = told.time - killed, told.text
    expect.check(outcome, told is not None and "controller" in told.text, f"the run says {run.exception!r}")
    limit = expect.CONTROLLER_S * expect.crowd()
    expect.check(outcome, (outcome.detected_s or 0) <= limit, f"told after {outcome.detected_s} s, limit {limit:.1f} s")


# -- the kernel ------------------------------------------------------------------------------------------------


def kernel(stage: Stage) -> None:
    """It is killed in the midst of a run; another one attaches, and goes on with the run and its whole history."""
    outcome = stage.outcome
    command = [sys.executable, "-m", "tests.faults.besides", str(stage.trap.path.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as notebook:
        try:
            assert notebook.stdout is not None
            name = next(line.split()[1] for line in notebook.stdout if line.startswith("READY"))
        finally:
            notebook.kill()
    begun = time.monotonic()
    with quiet():
        cluster = dtkit.attach(name)
    with cluster:
        run = cluster.current_run
        outcome.detected_s = time.monotonic() - begun
        if not expect.check(outcome, run is not None, "there is no run") or run is None:
            return
        outcome.shown = f"attached at step {run.status.step}, {run.status.state.value}"
        outcome.lost = "no step lost"
        _goes_on(stage, run)


def notebook(folder: Path) -> None:
    """What is killed: a run of slow steps. Says which cluster it has once some are taken."""
    with dtkit.Cluster(2, threads=1) as cluster:
        run = training.start(cluster, "DataParallel", Minefield(folder / "mine", 3 * PACE_S), steps=STEPS)
        run.resume()
        _until(lambda: run.status.step >= 4, "four steps are taken")
        print(f"\nREADY {cluster.folder.name}", flush=True)
        run.wait(_PATIENCE_S)


def _pace(stage: Stage) -> Minefield:
    return Minefield(stage.trap.path.with_name("mine"), PACE_S)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline, pause = time.monotonic() + _PATIENCE_S, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_PATIENCE_S:g} s: {what}")
        pause.wait(0.01)


BESIDES: dict[str, Callable[[Stage], None]] = {
    "interrupt once": once,
    "interrupt twice": twice,
    "interrupt ten times": ten_times,
    "disk full": disk_full,
    "controller killed": controller,
    "kernel killed": kernel,
}

if __name__ == "__main__":
    notebook(Path(sys.argv[1]))
