"""The arguments of ``train``, and the plan of a run: how engines build the job, and the actions between steps.

The plan outlives the job, so that recovery, `verify` and a notebook that attaches can rebuild the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.checkpoint.manager import CheckpointPolicy
from dtkit.rpc.job_plan import JobDefinition, LoadingOptions
from dtkit.rpc.protocol import JobOperations, make_call

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dtkit.data.broadcast import ModelHandle
    from dtkit.data.distribute import DataHandle
    from dtkit.data.torch_loader import LoaderSettings
    from dtkit.history.engine_outbox import EvaluationSums
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.job_plan import JobPlan
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.protocol import Call
    from dtkit.rpc.reference import Reference
    from dtkit.schedules.schedule import Schedule
    from dtkit.strategies.base import Strategy
    from dtkit.types import RunSpec

_MAX_PROGRAM_BYTES = 2**20
"""Size up to which functions are a part of each engine's message."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The arguments of ``cluster.train``, without model and data."""

    optimizer: Callable[..., Any] | None = None
    batch_size: int | None = None
    loss: Callable[..., Any] | None = None
    epochs: int | None = None
    steps: int | None = None
    strategy: Strategy | None = None
    shuffle: str | None = "shard"
    training_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] | None = None
    validation: Any = None
    validation_every: int = 1
    lr_scheduler: Callable[..., Any] | None = None
    lr_scheduler_every: str = "step"
    callbacks: Sequence[Any] = ()
    on_engine: Sequence[Any] = ()
    target: Any = None
    columns: Sequence[Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Any = None
    drop_last: bool = False
    activation_checkpointing: bool | Sequence[str] = False
    num_workers: int = 0
    pin_memory: bool | None = None
    prefetch: bool | None = None
    seed: int = 0
    start: bool = True
    checkpoint_every: int | None = None
    checkpoint_dir: str | Path | None = None
    keep_last: int = 3
    checkpoint_trainable_only: bool = False
    resume_from: str | os.PathLike[str] | None = None
    on_failure: str = "repair"
    snapshot_every: int | None = None
    name: str | None = None
    tags: Sequence[str] = ()

    @property
    def optimizer_factory(self) -> Callable[..., Any]:
        """`optimizer`, after it was checked."""
        assert self.optimizer is not None
        return self.optimizer

    @property
    def samples_per_step(self) -> int:
        """`batch_size`, after it was checked."""
        assert self.batch_size is not None
        return int(self.batch_size)

    def __post_init__(self) -> None:
        given: object = self.shuffle
        if given is False:  # as torch's DataLoader has it; True could be "shard" or "global"
            object.__setattr__(self, "shuffle", None)

    def complete_by(self, settings: LoaderSettings) -> TrainConfig:
        """Return the arguments with a DataLoader's settings in place of those that the user left out."""
        return dataclasses.replace(
            self,
            batch_size=settings.batch_size if self.batch_size is None else self.batch_size,
            collate_fn=settings.collate_fn if self.collate_fn is None else self.collate_fn,
            num_workers=self.num_workers or settings.num_workers,
            sampler=settings.sampler if self.sampler is None else self.sampler,
            shuffle=settings.shuffle if self.shuffle == "shard" else self.shuffle,
            drop_last=self.drop_last or settings.drop_last,
        )


@dataclasses.dataclass(frozen=True)
class SnapshotInterval:
    """Interval between snapshots in memory, in steps or seconds. Without either, no snapshots are taken."""

    every_steps: int | None = None
    every_seconds: float | None = None

    @property
    def is_disabled(self) -> bool:
        """Whether no snapshots are taken."""
        return self.every_steps is None and self.every_seconds is None


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """Everything that the engines need to build a job, also a second time, as for `verify`."""

    model_handle: ModelHandle
    data_handle: DataHandle
    plan: JobPlan
    program: bytes
    """Loss, optimizer and strategy, pickled."""
    loading: LoadingOptions | None = None
    owned_keys: tuple[str, ...] = ()
    """Keys of data and models that were sent to the engines only for this run, and are freed with it."""
    in_float64: bool = False
    """Whether the job trains a copy of the model in float64, with its batches in float64."""

    def build(
        self,
        engine_group: EngineGroup,
        job: str,
        *,
        ranks: list[int] | None = None,
        reference: Reference | None = None,
        uninitialized: bool = False,
        timeout: float | None = None,
    ) -> float:
        """Build the job on all ranks, or only on one. Returns the learning rate.

        An `uninitialized` job gets its state later, and can't be read before that.
        """
        with self._send_definition(engine_group) as definition:
            call = make_call(
                JobOperations.build_job,
                job=job,
                definition=definition,
                reference=reference,
                uninitialized=uninitialized,
            )
            return engine_group.call_all(call, ranks=ranks, timeout=timeout)[0]

    def rebuild(self, engine_group: EngineGroup, job: str, payloads: Sequence[Payload]) -> tuple[int, float]:
        """Build the job again with the state in these payloads. Returns (step, learning rate)."""
        with self._send_definition(engine_group) as definition:
            call = make_call(JobOperations.rebuild_job, job=job, definition=definition, payloads=payloads)
            return engine_group.call_all(call)[0]

    @contextlib.contextmanager
    def _send_definition(self, engine_group: EngineGroup) -> Iterator[JobDefinition]:
        """Yield what the engines build the job from, until they have.

        Functions that take along large arrays are put into shared memory, once for all engines of a host.
        """
        uploads, payload = engine_group.uploads, None
        if len(self.program) > _MAX_PROGRAM_BYTES:
            payload = uploads.upload(uploads.pack(np.frombuffer(self.program, np.uint8), name="train"))
        try:
            yield JobDefinition(
                self.model_handle.key,
                self.data_handle.key,
                self.program if payload is None else payload,
                self.plan,
                self.loading or LoadingOptions(),
                self.in_float64,
            )
        finally:
            if payload is not None:
                uploads.discard(payload)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of a run, with facts about its strategy."""

    strategy: Strategy
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    validation: DataHandle | None = None
    validation_every: int = 1
    """Epochs between evaluations."""
    callbacks: Sequence[Any] = ()
    on_engine: tuple[Any, ...] = ()
    """Callbacks on the engines."""
    balanced_shard_sizes: tuple[int, ...] | None = None
    """Rows of each shard, if faster ranks take more of each batch."""
    equivalence_notes: tuple[str, ...] = ()
    """Why the training differs from that of one process."""
    supports_explain: bool = True
    """Whether the strategy can explain a step."""
    is_manual: bool = False
    """Whether the training step takes the optimizers, and updates the model itself."""
    schedule: Schedule | None = None
    """The order of each rank's work in a pipeline."""
    on_failure: str = "repair"
    """What to do when an engine is lost."""
    checkpoint_policy: CheckpointPolicy = dataclasses.field(default_factory=CheckpointPolicy)
    """When to write the checkpoints that the user asked for."""
    disk_snapshot_policy: CheckpointPolicy = dataclasses.field(default_factory=CheckpointPolicy)
    """When to write the run's own checkpoints, used to recover from lost engines."""
    snapshot_interval: SnapshotInterval = dataclasses.field(default_factory=SnapshotInterval)
    """When the engines keep a snapshot in memory."""
    ranks_per_replica: int = 1
    """Ranks that share one replica of the model, and therefore take the same samples."""


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """All decisions for one run. The plan is replaced as a whole, so that no thread sees half of a change."""

    job: str
    """The job's key on the engines."""
    spec: RunSpec
    job_spec: JobSpec
    options: RunOptions

    @property
    def steps(self) -> int:
        """The step at which the run ends."""
        return self.spec.steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch."""
        return self.spec.steps_per_epoch

    @property
    def steps_per_evaluation(self) -> int:
        """Steps from one evaluation on the validation data to the next."""
        return self.steps_per_epoch * self.options.validation_every

    def list_due_evaluations(self, first_step: float, before_step: int) -> range:
        """Return the steps from `first_step` on, and before another one, after which an evaluation is due."""
        every = self.steps_per_evaluation
        if self.options.validation is None:
            return range(0)
        return range(max(1, math.ceil(first_step / every)) * every, before_step, every)

    def end_at(self, steps: int, *, steps_per_epoch: int | None = None) -> RunPlan:
        """Return the plan with another last step."""
        per_epoch = self.steps_per_epoch if steps_per_epoch is None else steps_per_epoch
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, steps=steps, steps_per_epoch=per_epoch))

    def adapt_to(self, world_size: int) -> RunPlan:
        """Return the plan for this many ranks, after some were dropped."""
        if world_size == self.spec.world_size:
            return self
        options = dataclasses.replace(
            self.options,
            balanced_shard_sizes=None if self.options.balanced_shard_sizes is None else (1,) * world_size,
            ranks_per_replica=world_size // self.options.strategy.build_mesh(world_size).num_replicas,
        )
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, world_size=world_size), options=options)

    def make_evaluation_call(
        self, data: DataHandle, pickled_metrics: bytes, step: int | None = None, batch_size: int | None = None
    ) -> Call[EvaluationSums]:
        """Return the call that evaluates the job on all ranks, in batches of `batch_size` rows altogether.

        By default, this is the size that the data have, or else the training's.
        """
        return make_call(
            JobOperations.evaluate,
            job=self.job,
            data=data.key,
            metrics=pickled_metrics,
            batch_size=-(-(batch_size or data.batch_size or self.spec.batch_size) // self.spec.world_size),
            loading=self.job_spec.loading,
            step=step,
        )
