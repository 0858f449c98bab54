"""What is done when engines are lost, or stand apart: the job is made anew, with the state that survivors hold.

Each survivor says at which step it stands, and whether its parameters are of that step (an update that was broken off
in the midst leaves none). The furthest step of which every part of the model is held by some survivor is the one to go
on from: under data parallelism any one survivor will do. What it holds goes through shared memory to all ranks, so that
they are equal again whatever happened; and what each has for itself goes with it, back to that rank
(:mod:`dtkit.engine.state.survivors`). Where a part is held by nobody, the run goes back to its last snapshot. Of the
last ones in memory (:mod:`dtkit.engine.state.peer_snapshots`), each survivor says whose parts it has copies of; the
furthest one of which every rank's part is there is taken, and goes the same way. Where a part is lost together with its
copy, there is the one on disk: a checkpoint that the run writes by itself, beside the training, into the cluster's
folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dtkit.errors import CheckpointError, ClusterError, EngineError, format_ranks
from dtkit.history import engine_outbox
from dtkit.training.recovered_state import RecoveredState, load_interrupted
from dtkit.types import ALL_STATE, OPTIMIZER_STATE, PER_RANK_STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.checkpoint.checkpoint import Checkpoint
    from dtkit.cluster.cluster import Cluster
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.strategies.base import Strategy
    from dtkit.training.config import JobSpec

FAILURE_MODES = ("repair", "shrink", "pause")
_FROM_DISK, _FROM_START = "the last snapshot, from disk", "the beginning, for want of a snapshot"
_MAX_ATTEMPTS = 3  # of a recovery in which further engines are lost


@dataclasses.dataclass(frozen=True)
class JobPosition:
    """Where a rank's job stands, and whether its parameters are of that step."""

    step: int
    is_intact: bool
    lr: float = 0.0
    snapshots: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    """Of which snapshots there are copies in its memory: {step: ranks whose parts these are}."""


@dataclasses.dataclass(frozen=True)
class RecoveryResult:
    """How a run goes on."""

    step: int
    """From here."""
    lr: float
    lost_steps: int
    """Updates that were made and are gone."""
    duration_s: float
    """What it took."""
    source: str = ""
    """Where the state comes from, in words, unless survivors stood there."""


def choose_sources(
    positions: Mapping[int, JobPosition], model_shard_ids: Mapping[int, object]
) -> tuple[int, list[int]] | None:
    """(step, ranks): who gives the state, one rank for each of the model's parts; None where a part is nowhere.

    `parts` says for every rank there was which part of the model it held.
    """
    wanted = set(model_shard_ids.values())
    for step in sorted({standing.step for standing in positions.values()}, reverse=True):
        holders: dict[object, int] = {}
        for rank, standing in sorted(positions.items()):
            if standing.step == step and standing.is_intact:
                holders.setdefault(model_shard_ids[rank], rank)
        if holders.keys() == wanted:
            return step, sorted(holders.values())
    return None


def choose_snapshot_sources(
    positions: Mapping[int, JobPosition], world_size: int
) -> tuple[int, dict[int, list[int]]] | None:
    """(step, {rank: whose parts it gives}) of the furthest snapshot that survivors have in memory, every rank its own
    part if it can; None where each lacks some.
    """
    for step in sorted({step for standing in positions.values() for step in standing.snapshots}, reverse=True):
        there = {rank: standing.snapshots.get(step, ()) for rank, standing in sorted(positions.items())}
        holders = {part: rank for rank, parts in there.items() for part in parts}
        holders |= {rank: rank for rank, parts in there.items() if rank in parts}
        if len(holders) == world_size:
            return step, {rank: [p for p in range(world_size) if holders[p] == rank] for rank in set(holders.values())}
    return None


def query_positions(cluster: EngineGroup, job: str, lost_ranks: Sequence[int] = ()) -> dict[int, JobPosition]:
    """Where every survivor stands. Needs no process group."""
    found = cluster.call_independently(
        "job_status", [r for r in range(cluster.world_size) if r not in lost_ranks], job=job
    )
    return {rank: JobPosition(*said) for rank, said in found.items()}


def is_out_of_sync(positions: Mapping[int, JobPosition]) -> bool:
    """Whether ranks differ in step, or one is torn."""
    return len({standing.step for standing in positions.values()}) > 1 or not all(
        s.is_intact for s in positions.values()
    )


_PARTIALLY_UPDATED = "an update had begun on a rank and not ended, so that its part of the model was of no step"


def explain_out_of_sync(positions: Mapping[int, JobPosition]) -> str:
    """Why ranks can't go on as they stand, in words."""
    if not all(standing.is_intact for standing in positions.values()):
        return _PARTIALLY_UPDATED
    furthest = max(standing.step for standing in positions.values())
    ahead = [rank for rank, standing in sorted(positions.items()) if standing.step == furthest]
    return f"{format_ranks(ahead)} had made the update of step {furthest - 1}, and others were broken off before theirs"


def fetch_survivor_state(
    cluster: EngineGroup, job: str, positions: Mapping[int, JobPosition], model_shard_ids: Mapping[int, object]
) -> RecoveredState | None:
    """Take the state from the survivors, before anything is formed anew; None where they don't have all of it."""
    left = dict(positions)
    while (chosen := choose_sources(left, model_shard_ids)) is not None:
        step, sources = chosen
        whole = {rank: standing.step == step for rank, standing in left.items() if standing.is_intact}
        each = [
            {"what": ALL_STATE if rank in sources else PER_RANK_STATE if level else OPTIMIZER_STATE}
            for rank, level in whole.items()
        ]
        found = cluster.call_independently("export_state", list(whole), each=each, job=job)
        if found.keys() >= set(sources):
            return RecoveredState(step, tuple(found.values()))
        _drop_failed_sources(left, sources, found)
    return None


def fetch_snapshot_state(
    cluster: EngineGroup, job: str, positions: Mapping[int, JobPosition], world_size: int, *, after_step: int
) -> RecoveredState | None:
    """The same of a snapshot in the survivors' memory; None where there is none behind step `beyond`."""
    left = dict(positions)
    while (chosen := choose_snapshot_sources(left, world_size)) is not None and chosen[0] > after_step:
        step, givers = chosen
        ranks = sorted(givers)
        each = [{"parts": givers[rank]} for rank in ranks]
        found = cluster.call_independently("export_snapshot", ranks, each=each, job=job, step=step)
        if found.keys() >= set(ranks):
            return RecoveredState(
                step, tuple(found.values()), f"the last snapshot, from {_describe_memory_source(givers)}"
            )
        _drop_failed_sources(left, ranks, found)
    return None


def _drop_failed_sources(
    positions: dict[int, JobPosition], ranks: Sequence[int], payloads: Mapping[int, Payload]
) -> None:
    """Who gave nothing has been lost meanwhile, or has no memory for it; what others gave is of no use."""
    for rank in ranks:
        if rank not in payloads:
            del positions[rank]
    for shipment in payloads.values():
        shipment.discard()


def _describe_memory_source(sources: Mapping[int, Sequence[int]]) -> str:
    """In whose memory that lay which is lost; where nothing is, each had its own."""
    mirrors = [str(rank) for rank, parts in sorted(sources.items()) if set(parts) - {rank}]
    if not mirrors:
        return "each node's own memory"
    return f"node {mirrors[0]}'s memory" if len(mirrors) == 1 else f"the memory of nodes {' and '.join(mirrors)}"


def replace_and_rebuild(
    cluster: EngineGroup, lost_ranks: Sequence[int], rebuild: Callable[[], Any], *, shrink: bool
) -> None:
    """Replace the engines of these ranks, or go on without them, and have `rebuild` make the job anew and fill it.

    Tried again when further engines are lost on the way.
    """
    for attempt in range(_MAX_ATTEMPTS):
        try:
            _replace_or_shrink(cluster, lost_ranks, shrink=shrink)
            _check_not_all_new(cluster)
            rebuild()
        except EngineError as error:
            lost_ranks = sorted({*cluster.find_lost_ranks(), *(f.rank for f in error.failures if f.kind == "stuck")})
            if not lost_ranks or attempt == _MAX_ATTEMPTS - 1:
                raise
        else:
            break


def _check_not_all_new(cluster: EngineGroup) -> None:
    if cluster.clear_if_all_new():
        raise ClusterError(
            "no engine is left that holds the data and the model; the cluster is whole again, but empty. Train anew, "
            "or from a checkpoint: cluster.train(..., resume_from=path)"
        )


def _replace_or_shrink(cluster: EngineGroup, lost_ranks: Sequence[int], *, shrink: bool) -> None:
    if not lost_ranks:
        cluster.form_process_group(ranks_changed=True)
    elif shrink:
        cluster.shrink(lost_ranks)
    else:
        cluster.replace(lost_ranks)


@dataclasses.dataclass(frozen=True)
class Recovery:
    """How one run's job is made anew."""

    cluster: Cluster
    job: str
    job_spec: JobSpec
    strategy: Strategy
    batch_size: int
    allow_shrink: bool
    """Whether to go on without the lost ranks; else they are replaced."""
    snapshot_folder: Path
    """The folder of the run's own checkpoints."""

    def __call__(self, lost_ranks: Sequence[int]) -> RecoveryResult:
        """Bring all ranks to the furthest step that can be had. Blocks until they stand there.

        Raises ClusterError where that can't be, ValueError where the strategy can't work on fewer ranks.
        """
        self.cluster.check_owned()  # before any engine is ended
        began = time.monotonic()
        shrink = bool(lost_ranks) and self.allow_shrink
        if shrink:
            self._check_world_size(self.cluster.world_size - len(lost_ranks))
        standings = query_positions(self.cluster, self.job, lost_ranks)
        rescued, disk = self._find_state(standings)
        found: list[tuple[int, float]] = []

        def rebuild() -> None:
            engine_outbox.remove_all(self.cluster.folder, self.job)  # of lost ranks, too; whoever recovers has read it
            if rescued is not None:
                found[:] = [self.job_spec.rebuild(self.cluster, self.job, rescued.payloads)]
            else:
                found[:] = [self._restore_snapshot(disk)]

        with contextlib.ExitStack() as finally_:
            if rescued is not None:
                finally_.enter_context(
                    rescued.keep_during_recovery(self.cluster.folder, self.job, is_owned=self._is_owned)
                )
            replace_and_rebuild(self.cluster, lost_ranks, rebuild, shrink=shrink)
        step, lr = found[0]
        furthest = max((standing.step for standing in standings.values()), default=0)
        source = (_FROM_DISK if disk is not None else _FROM_START) if rescued is None else rescued.source
        return RecoveryResult(step, lr, max(0, furthest - step), time.monotonic() - began, source)

    def _find_state(self, positions: Mapping[int, JobPosition]) -> tuple[RecoveredState | None, Checkpoint | None]:
        """What to go on with: survivors' state, or what a notebook had taken of it that died in a recovery; else the
        furthest snapshot.
        """
        cluster, job, world_size = self.cluster, self.job, self.cluster.world_size
        parts = {rank: self.strategy.model_shard_id(world_size, rank) for rank in range(world_size)}
        rescued, earlier = fetch_survivor_state(cluster, job, positions, parts), load_interrupted(cluster.folder, job)
        if rescued is not None and earlier is not None:
            earlier.discard(cluster.folder, job)
        if rescued is not None or earlier is not None:
            return rescued or earlier, None
        disk = self._find_disk_snapshot()
        beyond = 0 if disk is None else disk.step - 1
        return fetch_snapshot_state(cluster, job, positions, world_size, after_step=beyond), disk

    def _is_owned(self) -> bool:
        return not self.cluster.is_superseded

    def _find_disk_snapshot(self) -> Checkpoint | None:
        """The last snapshot there."""
        from dtkit.checkpoint.checkpoint import Checkpoint

        try:
            return Checkpoint(self.snapshot_folder)
        except CheckpointError:
            return None

    def _restore_snapshot(self, snapshot: Checkpoint | None) -> tuple[int, float]:
        """To the last snapshot on disk; without one, to where the training began."""
        from dtkit.training.resume import ResumePoint

        lr = self.job_spec.build(self.cluster, self.job, uninitialized=snapshot is not None)
        if snapshot is None:
            return 0, lr
        return snapshot.step, ResumePoint(snapshot).restore_job(self.cluster, self.job)[0]

    def _check_world_size(self, world_size: int) -> None:
        if world_size < 1:
            raise ClusterError("no engine is left; start another cluster, and resume from a checkpoint there")
        self.strategy.build_mesh(world_size)
        self.strategy.check(world_size, self.batch_size)
