"""Recovery of a job after engines were lost or got out of sync. The job is rebuilt with the survivors' state.

Each survivor reports its step, and whether its parameters are of that step (after an interrupted update they are not).
The state is taken from the first of these sources that is complete:

1. The survivors, at the furthest step of which they hold every part of the model. Under data parallelism, one survivor
  is enough. All ranks get its state through shared memory, so that they are equal again. State that belongs to one rank
  returns to that rank (:mod:`dtkit.engine.state.survivors`).
2. The furthest snapshot in the survivors' memory that has every rank's part
   (:mod:`dtkit.engine.state.peer_snapshots`).
3. The last snapshot on disk, a checkpoint that the run itself writes into the cluster's folder.
4. The start of the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from typing import TYPE_CHECKING

from dtkit.errors import CheckpointError, ClusterError, EmptyEnginesError, format_ranks
from dtkit.history import engine_outbox
from dtkit.messages import ALL_STATE, OPTIMIZER_STATE, PER_RANK_STATE, JobPosition
from dtkit.rpc.protocol import JobOperations, StateOperations, make_call
from dtkit.rpc.replacement import replace_lost_ranks
from dtkit.training import recovered_data
from dtkit.training.recovered_state import RecoveredState, load_interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.checkpoint.checkpoint import Checkpoint
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.training.config import RunPlan
    from dtkit.types import EngineLoss

FAILURE_MODES = ("repair", "shrink", "pause")
_FROM_DISK, _FROM_START = "the last snapshot, from disk", "the start, because there is no snapshot"


@dataclasses.dataclass(frozen=True)
class RecoveryResult:
    """Result of a recovery: the step from which a run continues."""

    step: int
    lr: float
    lost_steps: int
    """Number of updates that were lost."""
    duration_s: float
    """Seconds that the recovery took."""
    source: str
    """Source of the state, in words; empty if survivors were at this step."""
    lost_ranks: Sequence[int]
    """Ranks that were lost before the recovery or during it, numbered as before it."""


def choose_sources(
    positions: Mapping[int, JobPosition], model_shard_ids: Mapping[int, object]
) -> tuple[int, list[int]] | None:
    """Return (step, ranks) of the survivors that send the state, one for each part; None if a part is missing.

    `model_shard_ids` has the part of the model on each rank, including lost ranks.
    """
    wanted = set(model_shard_ids.values())
    for step in sorted({position.step for position in positions.values()}, reverse=True):
        holders: dict[object, int] = {}
        for rank, position in sorted(positions.items()):
            if position.step == step and position.is_intact:
                holders.setdefault(model_shard_ids[rank], rank)
        if holders.keys() == wanted:
            return step, sorted(holders.values())
    return None


def choose_snapshot_sources(
    positions: Mapping[int, JobPosition], world_size: int
) -> tuple[int, dict[int, list[int]]] | None:
    """Return (step, {rank: ranks whose parts it sends}) of the furthest snapshot in the survivors' memory.

    Every rank sends its own part if it can. None if every snapshot lacks some part.
    """
    for step in sorted({step for position in positions.values() for step in position.snapshots}, reverse=True):
        there = {rank: position.snapshots.get(step, ()) for rank, position in sorted(positions.items())}
        holders = {part: rank for rank, parts in there.items() for part in parts}
        holders |= {rank: rank for rank, parts in there.items() if rank in parts}
        if len(holders) == world_size:
            return step, {rank: [p for p in range(world_size) if holders[p] == rank] for rank in set(holders.values())}
    return None


def query_positions(engine_group: EngineGroup, job: str, lost_ranks: Sequence[int] = ()) -> dict[int, JobPosition]:
    """Return the position of every survivor. This needs no process group."""
    survivors = [rank for rank in range(engine_group.world_size) if rank not in lost_ranks]
    return engine_group.call_independently(make_call(JobOperations.job_status, job=job), survivors)


def is_out_of_sync(positions: Mapping[int, JobPosition]) -> bool:
    """Return whether ranks differ in step, or one is partially updated."""
    return len({position.step for position in positions.values()}) > 1 or not all(
        s.is_intact for s in positions.values()
    )


_PARTIALLY_UPDATED = "an update had begun on a rank and not ended, so that its part of the model was of no step"


def explain_out_of_sync(positions: Mapping[int, JobPosition]) -> str:
    """Return why ranks can't continue as they are, in words."""
    if not all(position.is_intact for position in positions.values()):
        return _PARTIALLY_UPDATED
    furthest = max(position.step for position in positions.values())
    ahead = [rank for rank, position in sorted(positions.items()) if position.step == furthest]
    return f"{format_ranks(ahead)} had made the update of step {furthest - 1}, and others were broken off before theirs"


def fetch_survivor_state(
    engine_group: EngineGroup, job: str, positions: Mapping[int, JobPosition], model_shard_ids: Mapping[int, object]
) -> RecoveredState | None:
    """Fetch the survivors' state, before the group is formed again; None if it is incomplete."""
    remaining = dict(positions)
    while (chosen := choose_sources(remaining, model_shard_ids)) is not None:
        step, sources = chosen
        is_at_step = {rank: position.step == step for rank, position in remaining.items() if position.is_intact}
        scopes = [
            ALL_STATE if rank in sources else PER_RANK_STATE if is_level else OPTIMIZER_STATE
            for rank, is_level in is_at_step.items()
        ]
        calls = [make_call(StateOperations.export_state, job=job, scope=scope) for scope in scopes]
        payloads = engine_group.call_independently(calls, list(is_at_step))
        if payloads.keys() >= set(sources):
            return RecoveredState(step, tuple(payloads.values()))
        _drop_failed_sources(remaining, sources, payloads)
    return None


def fetch_snapshot_state(
    engine_group: EngineGroup, job: str, positions: Mapping[int, JobPosition], world_size: int, *, after_step: int
) -> RecoveredState | None:
    """Fetch a snapshot from the survivors' memory; None if there is none after `after_step`."""
    remaining = dict(positions)
    while (chosen := choose_snapshot_sources(remaining, world_size)) is not None and chosen[0] > after_step:
        step, givers = chosen
        ranks = sorted(givers)
        calls = [make_call(StateOperations.export_snapshot, job=job, step=step, ranks=givers[rank]) for rank in ranks]
        payloads = engine_group.call_independently(calls, ranks)
        if payloads.keys() >= set(ranks):
            return RecoveredState(
                step, tuple(payloads.values()), f"the last snapshot, from {_describe_memory_source(givers)}"
            )
        _drop_failed_sources(remaining, ranks, payloads)
    return None


def _drop_failed_sources(
    positions: dict[int, JobPosition], ranks: Sequence[int], payloads: Mapping[int, Payload]
) -> None:
    """Drop the ranks that sent nothing (lost since, or out of memory), and discard what the others sent."""
    for rank in ranks:
        if rank not in payloads:
            del positions[rank]
    for payload in payloads.values():
        payload.discard()


def _describe_memory_source(sources: Mapping[int, Sequence[int]]) -> str:
    """Return a text that names whose memory had the lost parts."""
    mirrors = [str(rank) for rank, parts in sorted(sources.items()) if set(parts) - {rank}]
    if not mirrors:
        return "each node's own memory"
    return f"node {mirrors[0]}'s memory" if len(mirrors) == 1 else f"the memory of nodes {' and '.join(mirrors)}"


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Rebuilds one run's job on all ranks."""

    engine_group: EngineGroup
    plan: RunPlan
    snapshot_folder: Path
    """The folder of the run's own checkpoints."""
    on_source: Callable[[int], object] = bool
    """Called with the step of the state that was found, before the engines' unread results are removed."""
    on_further_loss: Callable[[Mapping[int, EngineLoss]], object] = bool
    """Called with reasons by rank if more engines are lost during the recovery."""

    def __call__(self, lost_ranks: Sequence[int]) -> RecoveryResult:
        """Bring all ranks to the furthest step that can be restored. Blocks until they have reached it.

        Raises ClusterError if that is impossible, and ValueError if the strategy can't work on fewer ranks.
        """
        group, job = self.engine_group, self.plan.job
        group.check_owned()  # must come before any engine is ended
        started_at = time.monotonic()
        shrink = 0 < len(lost_ranks) < group.world_size and self.plan.options.on_failure == "shrink"
        if shrink:
            self._check_world_size(group.world_size - len(lost_ranks))
        positions = query_positions(group, job, lost_ranks)
        state, snapshot = self._find_state(positions)
        self.on_source(state.step if state is not None else 0 if snapshot is None else snapshot.step)
        rebuilt: list[tuple[int, float]] = []
        all_lost_ranks = set(lost_ranks)

        def rebuild() -> None:
            engine_outbox.remove_all(group.folder, job)  # also those of lost ranks; `on_source` has read them
            if state is not None:
                rebuilt[:] = [self.plan.job_spec.rebuild(group, job, state.payloads)]
            else:
                rebuilt[:] = [self._restore_snapshot(snapshot)]

        def note_further_loss(losses: Mapping[int, EngineLoss]) -> None:
            all_lost_ranks.update(losses)
            self.on_further_loss(losses)

        with contextlib.ExitStack() as at_end:
            if state is not None:
                at_end.enter_context(state.keep_during_recovery(group.folder, job, is_owned=self._is_owned))
            data = None if positions else recovered_data.load(self.snapshot_folder)
            if shrink:
                recovered_data.discard(self.snapshot_folder)
            try:
                replace_lost_ranks(
                    group, lost_ranks, shrink=shrink, rebuild=rebuild, data=data, on_further_loss=note_further_loss
                )
            except EmptyEnginesError as error:
                raise error if snapshot is None else self._rescue(snapshot) from None
        step, lr = rebuilt[0]
        furthest = max((position.step for position in positions.values()), default=0)
        source = (_FROM_DISK if snapshot is not None else _FROM_START) if state is None else state.source
        lost_steps, duration_s = max(0, furthest - step), time.monotonic() - started_at
        return RecoveryResult(step, lr, lost_steps, duration_s, source, sorted(all_lost_ranks))

    def _find_state(self, positions: Mapping[int, JobPosition]) -> tuple[RecoveredState | None, Checkpoint | None]:
        """Return the survivors' state, or the one that a notebook had stored when it died in a recovery; else the
        furthest snapshot.
        """
        group, job, world_size = self.engine_group, self.plan.job, self.engine_group.world_size
        shard_ids = {rank: self.plan.options.strategy.model_shard_id(world_size, rank) for rank in range(world_size)}
        state = fetch_survivor_state(group, job, positions, shard_ids)
        earlier = load_interrupted(group.folder, job)
        if state is not None and earlier is not None:
            earlier.discard(group.folder, job)
        if state is not None or earlier is not None:
            return state or earlier, None
        disk = self._find_disk_snapshot()
        after_step = 0 if disk is None else disk.step - 1
        return fetch_snapshot_state(group, job, positions, world_size, after_step=after_step), disk

    def _is_owned(self) -> bool:
        return not self.engine_group.is_superseded

    def _find_disk_snapshot(self) -> Checkpoint | None:
        from dtkit.checkpoint.checkpoint import Checkpoint

        try:
            return Checkpoint(self.snapshot_folder)
        except CheckpointError:
            return None

    def _restore_snapshot(self, snapshot: Checkpoint | None) -> tuple[int, float]:
        """Go back to the last snapshot on disk; without one, to the start of the training."""
        from dtkit.training.resume import ResumePoint

        lr = self.plan.job_spec.build(self.engine_group, self.plan.job, uninitialized=snapshot is not None)
        if snapshot is None:
            return 0, lr
        return snapshot.step, ResumePoint(snapshot).restore_job(self.engine_group, self.plan.job)[0]

    def _rescue(self, snapshot: Checkpoint) -> EmptyEnginesError:
        """Copy the snapshot to the run's checkpoints, since the engines' data are gone. Return the error to raise."""
        folder = self.plan.options.checkpoint_policy.default_folder
        assert folder is not None
        path = folder / snapshot.path.name
        head = "all engines ended, and the notebook had no copy of their data."
        try:
            shutil.copytree(snapshot.path, path, dirs_exist_ok=True)
        except OSError as error:
            return EmptyEnginesError(
                f"{head} The run's last snapshot can't be copied to {path}: {error.strerror or error}"
            )
        return EmptyEnginesError(
            f"{head} The run's last snapshot is a checkpoint now: cluster.train(..., resume_from={str(path)!r}) "
            f"continues from step {snapshot.step:,}"
        )

    def _check_world_size(self, world_size: int) -> None:
        if world_size < 1:
            raise ClusterError("no engine is left; start another cluster, and resume from a checkpoint there")
        self.plan.options.strategy.build_mesh(world_size)
        self.plan.options.strategy.check(world_size, self.plan.spec.batch_size)
