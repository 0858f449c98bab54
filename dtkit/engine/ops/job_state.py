"""Checkpoints and snapshots of a job, and its state after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.checkpoint.folders import STAGING_FOLDER
from dtkit.history.between_steps import CHECKPOINTS, SNAPSHOTS
from dtkit.rpc.protocol import StateOperations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.ops.state import EngineState
    from dtkit.engine.state.writer import CheckpointWriter
    from dtkit.messages import CheckpointReport, SnapshotReport
    from dtkit.rpc.payload import Payload


class StateOps(StateOperations):
    """See :class:`~dtkit.rpc.protocol.StateOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._checkpoint_writer: CheckpointWriter | None = None

    def save_checkpoint(
        self, *, job: str, step: int, folder: str, token: str, from_snapshot: bool = False, may_stage: bool = False
    ) -> CheckpointReport:
        """Copy the state of a job, which must be at `step`, and begin to write it."""
        from dtkit.engine.state import peer_snapshots
        from dtkit.engine.state.writer import CheckpointWriter

        state = self._state
        training, rank = state.get_job(job, step), state.get_group().rank
        snapshots = state.snapshots.get(job, ()) if from_snapshot else ()
        copy = peer_snapshots.find_own_part(snapshots, step, rank)
        writer = self._checkpoint_writer = self._checkpoint_writer or CheckpointWriter()
        staging = state.cluster_folder / STAGING_FOLDER if may_stage else None
        with state.get_boundary_timer(job).measure(CHECKPOINTS):
            return state.run_abortable(lambda: writer.start_save(training, folder, token, copy, staging=staging))

    def restore_checkpoint(
        self, *, job: str, folder: str, index: Mapping[str, Any], files: Sequence[str], facts: Mapping[str, Any]
    ) -> tuple[int, float, dict[str, tuple[Any, Any]]]:
        """Restore the state of a job that has just been built."""
        from dtkit.engine.state import writer

        training = self._state.get_job(job)
        result = self._state.run_abortable(lambda: writer.restore_checkpoint(training, folder, index, files, facts))
        training.partially_updated = False
        return result

    def restore_weights(
        self,
        *,
        job: str,
        step: int,
        folder: str,
        index: Mapping[str, Any],
        files: Sequence[str],
        facts: Mapping[str, Any],
    ) -> None:
        """Put the weights of a checkpoint back into a job, which must be at `step` and stays there."""
        from dtkit.engine.state import writer

        training = self._state.get_job(job, step)
        training.partially_updated = True  # until all of it is there
        self._state.run_abortable(lambda: writer.restore_checkpoint_weights(training, folder, index, files, facts))
        training.partially_updated = False

    def take_snapshot(self, *, job: str, step: int) -> SnapshotReport:
        """Copy the state of a job, which must be at `step`, into this rank's and a peer's memory."""
        from dtkit.engine.state import peer_snapshots

        state = self._state
        training, snapshots = state.get_job(job, step), state.snapshots.setdefault(job, [])
        spare_bytes = state.memory_trackers[job].compute_spare_bytes()
        with state.get_boundary_timer(job).measure(SNAPSHOTS):
            return state.run_abortable(lambda: peer_snapshots.take_snapshot(training, snapshots, spare_bytes))

    def export_state(self, *, job: str, scope: str) -> Payload:
        """Return the rank's state of a job."""
        from dtkit.engine.state.survivors import export_state

        return self._state.pack([export_state(self._state.get_job(job), scope)])

    def export_snapshot(self, *, job: str, step: int, ranks: Sequence[int]) -> Payload:
        """Return the snapshot of these ranks' parts as of `step`."""
        from dtkit.engine.state import peer_snapshots

        return self._state.pack(peer_snapshots.export_parts(self._state.snapshots[job], step, ranks))
