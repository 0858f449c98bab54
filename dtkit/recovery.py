"""What is done when engines are lost, or stand apart: the job is made anew, with the state that survivors hold.

Each survivor says at which step it stands, and whether its parameters are of that step (an update that was broken off
in the midst leaves none). The furthest step of which every part of the model is held by some survivor is the one to go
on from: under data parallelism any one survivor will do. What it holds goes through shared memory to all ranks, so that
they are equal again whatever happened. Where a part is held by nobody, the run goes back to its last snapshot: a
checkpoint that it writes by itself, beside the training, into the cluster's folder.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dtkit import unread
from dtkit.errors import CheckpointError, ClusterError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.cluster import Cluster
    from dtkit.order import Order
    from dtkit.ranks import Ranks
    from dtkit.shipment import Shipment
    from dtkit.strategies.base import Strategy

MODES = ("repair", "shrink", "pause")
_TRIES = 3  # of a recovery in which further engines are lost


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a rank's job stands, and whether its parameters are of that step."""

    step: int
    whole: bool
    lr: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recovered:
    """How a run goes on."""

    step: int
    """From here."""
    lr: float
    lost_steps: int
    """Updates that were made and are gone."""
    seconds: float
    """What it took."""


@dataclasses.dataclass(frozen=True)
class Rescued:
    """State that survivors gave: of this step, in these shipments."""

    step: int
    furthest: int
    """Where some survivor stood."""
    shipments: tuple[Shipment, ...]

    def discard(self) -> None:
        """Free the shared memory."""
        for shipment in self.shipments:
            shipment.discard()


def choose(standings: Mapping[int, Standing], parts: Mapping[int, object]) -> tuple[int, list[int]] | None:
    """(step, ranks): who gives the state, one rank for each of the model's parts; None where a part is nowhere.

    `parts` says for every rank there was which part of the model it held.
    """
    wanted = set(parts.values())
    for step in sorted({standing.step for standing in standings.values()}, reverse=True):
        holders: dict[object, int] = {}
        for rank, standing in sorted(standings.items()):
            if standing.step == step and standing.whole:
                holders.setdefault(parts[rank], rank)
        if holders.keys() == wanted:
            return step, sorted(holders.values())
    return None


def stand(cluster: Ranks, job: str, lost: Sequence[int] = ()) -> dict[int, Standing]:
    """Where every survivor stands. Needs no process group."""
    found = cluster.alone("standing", [r for r in range(cluster.world_size) if r not in lost], job=job)
    return {rank: Standing(*said) for rank, said in found.items()}


def apart(standings: Mapping[int, Standing]) -> bool:
    """Whether ranks differ in step, or one is torn."""
    return len({standing.step for standing in standings.values()}) > 1 or not all(s.whole for s in standings.values())


def rescue(cluster: Ranks, job: str, lost: Sequence[int], parts: Mapping[int, object]) -> Rescued | None:
    """Take the state from the survivors, before anything is formed anew; None where they don't have all of it."""
    standings = stand(cluster, job, lost)
    chosen = choose(standings, parts)
    if chosen is None:
        return None
    step, sources = chosen
    level = [rank for rank, standing in standings.items() if standing.step == step]
    each = [{"tensors": rank in sources} for rank in level]
    found = cluster.alone("rescue", level, each=each, job=job)
    furthest = max(standing.step for standing in standings.values())
    return Rescued(step, furthest, tuple(found[rank] for rank in level if rank in found))


def recover(
    cluster: Ranks, lost: Sequence[int], rescued: Rescued | None, rebuild: Callable[[], Any], *, shrink: bool
) -> None:
    """Replace the engines of these ranks, or go on without them, and have `rebuild` make the job anew and fill it.

    Tried again when further engines are lost on the way.
    """
    todo = list(lost)
    for attempt in range(_TRIES):
        try:
            _renew(cluster, todo, shrink=shrink)
            _check_held(cluster)
            rebuild()
        except EngineError as error:
            todo = sorted({*cluster.lost(), *(f.rank for f in error.failures if f.kind == "stuck")})
            if not todo or attempt == _TRIES - 1:
                raise
        else:
            break
    if rescued is not None:
        rescued.discard()


def _check_held(cluster: Ranks) -> None:
    if len(cluster.bare) == cluster.world_size:
        cluster.bare.clear()  # they are alike again
        raise ClusterError(
            "no engine is left that holds the data and the model; the cluster is whole again, but empty. Train anew, "
            "or from a checkpoint: cluster.train(..., resume=path)"
        )


def _renew(cluster: Ranks, lost: Sequence[int], *, shrink: bool) -> None:
    if not lost:
        cluster.form(others=True)
    elif shrink:
        cluster.shrink(lost)
    else:
        cluster.replace(lost)


@dataclasses.dataclass(frozen=True)
class Recovery:
    """How one run's job is made anew."""

    cluster: Cluster
    job: str
    order: Order
    strategy: Strategy
    batch_size: int
    shrinks: bool
    """Whether to go on without the lost ranks; else they are replaced."""
    snapshots: Path
    """The folder of the run's own checkpoints."""

    def __call__(self, lost: Sequence[int]) -> Recovered:
        """Bring all ranks to the furthest step that can be had. Blocks until they stand there.

        Raises ClusterError where that can't be, ValueError where the strategy can't work on fewer ranks.
        """
        began = time.monotonic()
        world_size = self.cluster.world_size
        shrink = bool(lost) and self.shrinks
        if shrink:
            self._check_fewer(world_size - len(lost))
        parts = {rank: self.strategy.part_of(world_size, rank) for rank in range(world_size)}
        rescued = rescue(self.cluster, self.job, lost, parts)
        found: list[tuple[int, float]] = []

        def rebuild() -> None:
            unread.remove(self.cluster.folder, self.job)  # of lost ranks, too; whoever recovers has read it
            lr = self.order.build(self.cluster, self.job)
            if rescued is not None:
                found[:] = self.cluster.ask("revive", job=self.job, shipments=rescued.shipments)
            else:
                found[:] = [self._back(lr)]

        recover(self.cluster, lost, rescued, rebuild, shrink=shrink)
        step, lr = found[0]
        furthest = 0 if rescued is None else rescued.furthest
        return Recovered(step, lr, max(0, furthest - step), time.monotonic() - began)

    def _back(self, lr: float) -> tuple[int, float]:
        """To the last snapshot; without one, to where the training began."""
        from dtkit.checkpoint import Checkpoint
        from dtkit.resuming import Resumption

        try:
            snapshot = Checkpoint(self.snapshots)
        except CheckpointError:
            return 0, lr
        return snapshot.step, Resumption(snapshot).put_into(self.cluster, self.job)[0]

    def _check_fewer(self, world_size: int) -> None:
        if world_size < 1:
            raise ClusterError("no engine is left; start another cluster, and resume from a checkpoint there")
        self.strategy.mesh(world_size)
        self.strategy.check(world_size, self.batch_size)
