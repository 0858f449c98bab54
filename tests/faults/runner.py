"""Plays a cell on a cluster that lives as long as the cells leave it alive."""

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
from tests.faults.besides import BESIDES
from tests.faults.cells import ANYWHERE, BESIDE, ENGINES, FIRST, LAST, STEP_PLACES, STEPS
from tests.faults.plant import fail_on, plant
from tests.faults.quiet import quiet
from tests.faults.trap import Slowness, Trap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tests.faults.cells import Cell

LIMIT_S = 150.0
"""What a cell may take in all; more, and it hangs."""
COLLECTIVE_S = 6.0
MEMORY = "3GB"


@dataclasses.dataclass
class Outcome:
    """What a cell did. `problems` is empty where all of it was right."""

    cell: Cell
    step: int
    rank: int
    detected_s: float | None = None
    """From the fault to the first word of it in the run's log."""
    recovered_s: float | None = None
    """From the fault to the next step."""
    shown: str = ""
    lost: str = ""
    took_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


class Ground:
    """A cluster to play on, and how trainings end there when nothing happens."""

    def __init__(self, spares: int = 1) -> None:
        self._spares = spares
        self._cluster: dtkit.Cluster | None = None
        self._wanted: dict[str, dict[str, torch.Tensor]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="dtkit-faults-"))
        self._played = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.renew()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def cluster(self) -> dtkit.Cluster:
        """Started where there is none."""
        if self._cluster is None:
            options: dict[str, Any] = {"step_timeout": COLLECTIVE_S, "memory_limit": MEMORY, "spares": self._spares}
            with quiet():
                self._cluster = dtkit.Cluster(ENGINES, threads=1, **options)
        return self._cluster

    def renew(self) -> None:
        """The next cell gets a cluster of its own."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def folder(self) -> Path:
        """An empty one."""
        self._played += 1
        made = self._folder / str(self._played)
        made.mkdir()
        return made

    def undisturbed(self, strategy: str) -> dict[str, torch.Tensor]:
        """How the parameters end when nothing happens."""
        if strategy not in self._wanted:
            run = training.start(self.cluster, strategy, steps=STEPS)
            run.resume()
            with quiet():
                run.wait(LIMIT_S)
            self._wanted[strategy] = run.model.state_dict()
        return self._wanted[strategy]


def play(cell: Cell, ground: Ground, seed: int) -> Outcome:
    """One cell, whatever becomes of it. A cluster that it ruined is closed."""
    dice = cell.dice(seed)
    step, rank = dice.randint(FIRST, LAST), dice.choice(cell.ranks)
    place = cell.place if cell.place not in (ANYWHERE, BESIDE) else dice.choice(STEP_PLACES)
    outcome, begun = Outcome(cell, step, rank), time.monotonic()
    try:
        wanted = ground.undisturbed(cell.strategy)
        trap = Trap(cell.fault if cell.place != BESIDE else "endless loop", place, rank, step, ground.folder() / "trap")
        process = psutil.Process(ground.cluster.nodes[rank].pid)
        _how(cell)(Stage(cell, ground.cluster, trap, wanted, outcome, process))
    except (dtkit.errors.DtkitError, AssertionError, TimeoutError, OSError, RuntimeError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    outcome.problems += _trains_on(cell, ground)
    if outcome.problems:
        ground.renew()
    outcome.took_s = time.monotonic() - begun
    return outcome


@dataclasses.dataclass(frozen=True)
class Stage:
    """All that a cell is played with."""

    cell: Cell
    cluster: dtkit.Cluster
    trap: Trap
    wanted: dict[str, torch.Tensor]
    outcome: Outcome
    process: psutil.Process
    """Of the rank that the fault befalls."""

    def train(self, trap: Trap | Slowness | None = None, **options: Any) -> dtkit.Run:
        """Before its first step."""
        return training.start(self.cluster, self.cell.strategy, trap or self.trap, **({"steps": STEPS} | options))


def _in_a_step(stage: Stage) -> None:
    run = stage.train()
    stage.trap.set()
    run.resume()
    expect.ends(stage, run, _waited(run))


def _in_a_checkpoint(stage: Stage) -> None:
    run = stage.train()
    run.step(stage.trap.step)
    stage.trap.set()
    error: BaseException | None = None
    try:
        with quiet():
            run.save(stage.trap.path.parent / "checkpoints")
    except dtkit.errors.CheckpointError as raised:
        error = raised
    expect.saved(stage, run, error)
    run.resume()
    expect.ends(stage, run, _waited(run))


def _while_forming(stage: Stage) -> None:
    """A paused run; a call fails on one rank, so the group is formed anew; the fault befalls a rank in that."""
    run, trap = stage.train(), stage.trap
    run.step(trap.step)
    stage.cluster.run(plant, trap)
    trap.set()
    error: BaseException | None = None
    try:
        with quiet():
            stage.cluster.run(fail_on, 1 - trap.rank)
    except dtkit.errors.EngineError as raised:
        error = raised
    expect.told(stage, error)
    run.resume()
    expect.ends(stage, run, _waited(run))


def _slow(stage: Stage) -> None:
    run = stage.train(Slowness(stage.trap.rank))
    run.resume()
    expect.ends(stage, run, _waited(run))


def _how(cell: Cell) -> Callable[[Stage], None]:
    """What plays it."""
    if cell.place == BESIDE:
        return BESIDES[cell.fault]
    return _slow if cell.outcome == "named" else PLAYS.get(cell.place, _in_a_step)


PLAYS = {"checkpoint": _in_a_checkpoint, "forming": _while_forming}


def _waited(run: dtkit.Run) -> BaseException | None:
    """What waiting raised."""
    with quiet():
        try:
            run.wait(LIMIT_S)
        except dtkit.errors.DtkitError as error:
            return error
    return None


def _trains_on(cell: Cell, ground: Ground) -> list[str]:
    """What keeps the same cluster from training on, the same strategy and another."""
    try:
        for strategy in (cell.strategy, "DataParallel"):
            run = training.start(ground.cluster, strategy, steps=3)
            run.resume()
            with quiet():
                run.wait(LIMIT_S)
            if run.status.step != 3 or ground.cluster.world_size != ENGINES:
                return [f"the next training ended at step {run.status.step}"]
    except (dtkit.errors.DtkitError, TimeoutError) as error:
        return [f"the cluster does not train on: {type(error).__name__}: {error}".partition("\n")[0]]
    return []
