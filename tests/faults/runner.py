"""Runs of cells on one cluster, which is replaced when a cell breaks it."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

import dtkit
from tests.faults import expect, training
from tests.faults.cells import ANYWHERE, ENGINES, FIRST, LAST, OUTSIDE, STEP_PLACES, STEPS
from tests.faults.group_trap import fail_on, plant_in_group
from tests.faults.other_faults import OTHER_FAULTS
from tests.faults.quiet import quiet
from tests.faults.trap import Slowness, Trap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tests.faults.cells import Cell

LIMIT_S = 150.0
"""Longest time of a cell."""
COLLECTIVE_S = 6.0
MEMORY = "3GB"


@dataclasses.dataclass
class Outcome:
    """Outcome of a cell; `problems` is empty if it passed."""

    cell: Cell
    step: int
    rank: int
    detected_s: float | None = None
    """Seconds from the fault to its first log entry."""
    recovered_s: float | None = None
    """Seconds from the fault to the end of the repair."""
    shown: str = ""
    lost: str = ""
    took_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


class Ground:
    """Cluster for cells, and the final states of undisturbed trainings on it."""

    def __init__(self, spares: int = 1) -> None:
        self._spares = spares
        self._cluster: dtkit.Cluster | None = None
        self._expected_states: dict[str, dict[str, torch.Tensor]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="dtkit-faults-"))
        self._num_folders = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_cluster()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def cluster(self) -> dtkit.Cluster:
        """The cluster, started if there is none."""
        if self._cluster is None:
            options: dict[str, Any] = {"step_timeout": COLLECTIVE_S, "memory_limit": MEMORY, "spares": self._spares}
            with quiet():
                self._cluster = dtkit.Cluster(ENGINES, threads=1, **options)
        return self._cluster

    def close_cluster(self) -> None:
        """Close the cluster, so that the next cell gets a new one."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def make_folder(self) -> Path:
        """Return a new empty folder."""
        self._num_folders += 1
        folder = self._folder / str(self._num_folders)
        folder.mkdir()
        return folder

    def get_expected_state(self, strategy: str) -> dict[str, torch.Tensor]:
        """Return the final parameters of an undisturbed training."""
        if strategy not in self._expected_states:
            run = training.start(self.cluster, strategy, steps=STEPS)
            run.resume()
            with quiet():
                run.wait(LIMIT_S)
            self._expected_states[strategy] = run.model.state_dict()
        return self._expected_states[strategy]


def run_cell(cell: Cell, ground: Ground, seed: int) -> Outcome:
    """Run a cell and return its outcome. A cluster that the cell broke is closed."""
    generator = cell.make_random(seed)
    step, rank = generator.randint(FIRST, LAST), generator.choice(range(ENGINES))
    place = cell.place if cell.place not in (ANYWHERE, OUTSIDE) else generator.choice(STEP_PLACES)
    if place == "data" and not cell.loads_data(rank):
        rank = 0
    outcome, start = Outcome(cell, step, rank), time.monotonic()
    try:
        expected_state = ground.get_expected_state(cell.strategy)
        trap = Trap(
            cell.fault if cell.place != OUTSIDE else "endless loop", place, rank, step, ground.make_folder() / "trap"
        )
        process = psutil.Process(ground.cluster.nodes[rank].pid)
        _get_scenario(cell)(Stage(cell, ground.cluster, trap, expected_state, outcome, process))
    except (dtkit.errors.DtkitError, AssertionError, TimeoutError, OSError, RuntimeError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    outcome.problems += _check_next_training(cell, ground)
    if outcome.problems:
        ground.close_cluster()
    outcome.took_s = time.monotonic() - start
    return outcome


@dataclasses.dataclass(frozen=True)
class Stage:
    """Everything that a cell's scenario needs."""

    cell: Cell
    cluster: dtkit.Cluster
    trap: Trap
    expected_state: dict[str, torch.Tensor]
    outcome: Outcome
    process: psutil.Process
    """Process of the rank that the fault hits."""

    def train(self, trap: Trap | Slowness | None = None, **options: Any) -> dtkit.Run:
        """Create a run that has not begun."""
        return training.start(self.cluster, self.cell.strategy, trap or self.trap, **({"steps": STEPS} | options))


def _run_step_fault(stage: Stage) -> None:
    run = stage.train()
    stage.trap.arm()
    run.resume()
    expect.check_end(stage, run, _wait(run))


def _run_checkpoint_fault(stage: Stage) -> None:
    run = stage.train()
    run.step(stage.trap.step)
    stage.trap.arm()
    error: BaseException | None = None
    try:
        with quiet():
            run.save(stage.trap.path.parent / "checkpoints")
    except dtkit.errors.CheckpointError as raised:
        error = raised
    expect.check_save(stage, run, error)
    run.resume()
    expect.check_end(stage, run, _wait(run))


def _run_forming_fault(stage: Stage) -> None:
    """Fail a call next to a paused run, so that the group is formed again, and hit a rank while it is formed."""
    run, trap = stage.train(), stage.trap
    run.step(trap.step)
    stage.cluster.run(plant_in_group, trap)
    trap.arm()
    error: BaseException | None = None
    try:
        with quiet():
            stage.cluster.run(fail_on, 1 - trap.rank)
    except dtkit.errors.EngineError as raised:
        error = raised
    expect.check_failed_call(stage, error)
    run.resume()
    expect.check_end(stage, run, _wait(run))


def _run_slow_rank(stage: Stage) -> None:
    run = stage.train(Slowness(stage.trap.rank))
    run.resume()
    expect.check_end(stage, run, _wait(run))


def _get_scenario(cell: Cell) -> Callable[[Stage], None]:
    if cell.place == OUTSIDE:
        return OTHER_FAULTS[cell.fault]
    return _run_slow_rank if cell.outcome == "named" else SCENARIOS.get(cell.place, _run_step_fault)


SCENARIOS = {"checkpoint": _run_checkpoint_fault, "forming": _run_forming_fault}


def _wait(run: dtkit.Run) -> BaseException | None:
    """Wait for the run, and return the error that this raises."""
    with quiet():
        try:
            run.wait(LIMIT_S)
        except dtkit.errors.DtkitError as error:
            return error
    return None


def _check_next_training(cell: Cell, ground: Ground) -> list[str]:
    """Train on the same cluster with the same strategy and another, and return the problems."""
    try:
        for strategy in (cell.strategy, "DataParallel"):
            run = training.start(ground.cluster, strategy, steps=3)
            run.resume()
            with quiet():
                run.wait(LIMIT_S)
            if run.status.step != 3 or ground.cluster.world_size != ENGINES:
                return [f"the next training ended at step {run.status.step}"]
    except (dtkit.errors.DtkitError, TimeoutError) as error:
        return [f"the cluster can't train any more: {type(error).__name__}: {error}".partition("\n")[0]]
    return []
