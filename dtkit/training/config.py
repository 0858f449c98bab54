"""What a run was asked to be: what its job on the engines is made of, and what it does besides taking steps.

It outlives the job: a lost engine's part is made anew from it, `verify` makes the training again, and a notebook that
takes the cluster over makes the run again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit.checkpoint.manager import CheckpointPolicy
from dtkit.training.snapshots import SnapshotInterval

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.cluster.broadcast import ModelHandle
    from dtkit.cluster.cluster import Cluster
    from dtkit.data.distribute import DataHandle
    from dtkit.engine.data.loader import LoadingOptions
    from dtkit.rpc.payload import Payload
    from dtkit.schedules.schedule import Schedule
    from dtkit.strategies.base import Strategy
    from dtkit.training.run import Run
    from dtkit.types import JobPlan


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """What the engines were told to make: enough to make it again, as `verify` does."""

    model_handle: ModelHandle
    data_handle: DataHandle
    plan: JobPlan
    program: bytes
    """Objective, optimiser and strategy, pickled."""
    loading: LoadingOptions | None = None
    owned_keys: tuple[str, ...] = ()
    """Keys of what was brought to the engines for this run alone: not needed after it."""

    def build(
        self,
        cluster: Cluster,
        job: str,
        *,
        ranks: list[int] | None = None,
        single_process: bool = False,
        uninitialized: bool = False,
    ) -> float:
        """Make a job of it on all ranks, or alone on one. Returns the learning rate.

        `copy_to_meta`: its state is still to be restored, and whoever looks at it before that finds none.
        """
        how = {"alone": single_process, "hollow": uninitialized}
        return float(cluster.call_all("build_job", ranks=ranks, job=job, **how, **self._make_build_args())[0])

    def rebuild(self, cluster: Cluster, job: str, payloads: Sequence[Payload]) -> tuple[int, float]:
        """Make a job of it again, with the state that is in these shipments: (step, learning rate)."""
        step, lr = cluster.call_all("rebuild_job", job=job, shipments=payloads, **self._make_build_args())[0]
        return int(step), float(lr)

    def _make_build_args(self) -> dict[str, Any]:
        return {
            "model": self.model_handle.key,
            "data": self.data_handle.key,
            "program": self.program,
            "plan": self.plan,
            "loading": self.loading,
        }


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run does besides taking steps, and what it can't."""

    strategy: Strategy
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    validation: DataHandle | None = None
    callbacks: Sequence[Callable[[Run], Any]] = ()
    balanced_shard_sizes: tuple[int, ...] | None = None
    """Rows of each shard, where faster ranks are to take more of each batch."""
    equivalence_notes: tuple[str, ...] = ()
    """Why the training is not that of one process."""
    supports_explain: bool = True
    """Whether the strategy can take a step apart."""
    schedule: Schedule | None = None
    """In a pipeline, what each rank is to do in which order."""
    on_failure: str = "repair"
    """What to do when an engine is lost."""
    checkpoint_policy: CheckpointPolicy = dataclasses.field(default_factory=CheckpointPolicy)
    """The checkpoints that it makes by itself."""
    disk_snapshot_policy: CheckpointPolicy = dataclasses.field(default_factory=CheckpointPolicy)
    """And those that it may have to go back to when an engine is lost."""
    snapshot_interval: SnapshotInterval = dataclasses.field(default_factory=SnapshotInterval)
    """When the engines are to keep such snapshots in memory."""
    ranks_per_replica: int = 1
    """Ranks that share one replica of the model, and so take the same samples."""
