"""The start of a training: check the arguments, send model and data to the engines, build the job, return the run."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from dtkit._util import timeouts
from dtkit._util.stacklevel import find_caller_stacklevel
from dtkit.checkpoint import folders
from dtkit.checkpoint.manager import CheckpointPolicy
from dtkit.data import broadcast, distribute
from dtkit.data.broadcast import ModelHandle
from dtkit.data.distribute import DataHandle, StreamHandle
from dtkit.data.partition import Partition
from dtkit.data.torch_loader import is_data_loader, read_data_loader
from dtkit.errors import EmptyEnginesError, format_ranks
from dtkit.history.metric_direction import read_directions
from dtkit.planning import planner
from dtkit.rpc.captured import warn_of_large_functions
from dtkit.rpc.job_plan import BY_SAMPLER, IN_ORDER, JobPlan, LoadingOptions, count_steps_per_epoch
from dtkit.training import failure_notice
from dtkit.training.adapters import adapt_model
from dtkit.training.callbacks import check_epochs, start_callbacks
from dtkit.training.config import JobSpec, RunOptions, RunPlan, SnapshotInterval, TrainConfig
from dtkit.training.lightning import read_lightning
from dtkit.training.partitioning import partition_training_data
from dtkit.training.resume import load_start
from dtkit.training.run import Run
from dtkit.training.settings import collect_sources, describe_settings, describe_value
from dtkit.training.validation import (
    check_can_shrink,
    check_config,
    check_model,
    check_not_swapped,
    check_sampler,
)
from dtkit.types import RunSpec

if TYPE_CHECKING:
    from dtkit.checkpoint.folders import Lineage
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import Strategy
    from dtkit.training.earlier_runs import EarlierRuns


_NO_VALIDATION_NOTE = (
    "metrics= are computed on validation=, and there is none: nothing computes them during this training. "
    "run.evaluate(data) does"
)
_MAX_SNAPSHOT_SHARE = 0.01
"""Share of the time for snapshots on disk that only the loss of all engines needs."""


class TrainingHost(Protocol):
    """The cluster that a run belongs to."""

    current_run: Run | None
    """The last run that was started, unless it was released."""
    earlier_runs: EarlierRuns

    def repair(self) -> list[int]:
        """Replace engines that are gone."""
        ...


def train(engine_group: EngineGroup, host: TrainingHost, model: Any, data: Any, config: TrainConfig) -> Run:
    """See :meth:`dtkit.Cluster.train`."""
    engine_group.check_open()
    check_not_swapped(model, data)
    model, data, config = adapt_model(model, data, config)
    data, config = _unwrap_data_loader(*read_lightning(model, data, config))
    planner.check_idle(host.current_run, "and trains one model at a time", "end it (run.stop())")
    strategy = _check_all(engine_group, model, config)
    model, resume_point = load_start(config.resume_from, model)
    if config.on_failure == "repair":
        _replace_lost_engines(engine_group, host)
    plan = _make_plan(engine_group, model, data, config, strategy, () if resume_point is None else resume_point.lineage)
    if resume_point is not None:
        resume_point.check_steps_left(plan.spec)
    check_epochs(plan.options.callbacks, plan.spec)
    failure_notice.print_pending()
    previous, host.current_run = host.current_run, None
    if previous is not None:
        host.earlier_runs.add(previous)
    run = Run(engine_group, plan)
    run.lifecycle.build(resume_point)
    _warn_about_batch_norm(engine_group, plan.job_spec.model_handle, strategy)
    host.current_run = run
    if run.lr == 0 and config.lr_scheduler is None:
        run.note("the learning rate is 0, so no parameter will change; run.set(lr=...) sets another")
    if isinstance(config.optimizer, type) and run.lr is not None:
        name = config.optimizer.__name__
        run.note(
            f"optimizer={name} is the class itself, with its own default, lr={run.lr:g}. For another rate: "
            f"optimizer=lambda params: {name}(params, lr=...)"
        )
    start_callbacks(plan.options.callbacks, run)
    if config.start:
        run.resume()
    return run


def _unwrap_data_loader(data: Any, config: TrainConfig) -> tuple[Any, TrainConfig]:
    """Return a DataLoader's Dataset, and the arguments, completed by its settings."""
    if not is_data_loader(data):
        return data, config
    settings = read_data_loader(data)
    completed = config.complete_by(settings)
    size = completed.batch_size or settings.batch_size
    taken = dataclasses.replace(settings, batch_size=size, num_workers=completed.num_workers)
    own = "" if size == settings.batch_size else f"; batch_size= of the call replaces its {settings.batch_size}"
    print(f"DataLoader: {taken}{own}")  # noqa: T201 - what is taken over is said
    return settings.dataset, completed


def _check_all(engine_group: EngineGroup, model: Any, config: TrainConfig) -> Strategy:
    """Check the arguments that need no data; return the strategy."""
    from dtkit.strategies.activation_checkpointing import find_blocks

    strategy = check_config(config)
    strategy.build_mesh(engine_group.world_size)
    strategy.check(engine_group.world_size, config.samples_per_step)
    check_can_shrink(engine_group.world_size, config, strategy)
    check_model(engine_group, model, config)
    if config.metrics and config.validation is None:
        print(_NO_VALIDATION_NOTE)  # noqa: T201 - else nothing shows that the metrics are not computed
    if not isinstance(model, ModelHandle):
        if config.activation_checkpointing and strategy.pipeline_schedule is None:
            find_blocks(model, config.activation_checkpointing)  # engines would refuse what it refuses
        strategy.check_model(model)
        if (description := strategy.describe_plan(model)) is not None:
            print(description)  # noqa: T201 - a plan is shown before it is used
    return strategy


def _replace_lost_engines(engine_group: EngineGroup, host: TrainingHost) -> None:
    """Replace the engines that were lost before this training, as during a training."""
    if lost_ranks := engine_group.membership.find_lost_ranks():
        message = f"{format_ranks(lost_ranks)} gone: replaced before the training starts"
        print(message)  # noqa: T201 - it takes some seconds
        try:
            host.repair()
        except EmptyEnginesError as error:
            print(f"the earlier run can't go on: {error}")  # noqa: T201 - this training needs nothing of it


def _make_plan(
    engine_group: EngineGroup,
    model: Any,
    data: Any,
    config: TrainConfig,
    strategy: Strategy,
    previous_lineage: Lineage,
) -> RunPlan:
    """Send data and model to the engines, and decide everything else."""
    loading = LoadingOptions(config.num_workers, config.pin_memory, config.prefetch)
    program = _pickle_program(engine_group, config, strategy)
    check_sampler(config, data)
    part = partition_training_data(engine_group, model, data, config, strategy, program)
    data_handle = part if isinstance(part, StreamHandle) else distribute.get_data_handle(engine_group, part)
    model_handle = model
    if not isinstance(model, ModelHandle):
        model_handle = broadcast.broadcast(engine_group, model, by_shared_file=strategy.shards_model)
    validation = None
    if config.validation is not None:
        validation = distribute.distribute_validation_data(
            engine_group, config.validation, training_data=data_handle, name="validation"
        )
    spec = _make_spec(engine_group, model_handle, part, config, strategy, _choose_shuffle(config, data, part))
    job_plan = JobPlan(spec.batch_size, spec.steps, spec.shuffle, spec.seed, config.drop_last)
    owned_keys = _list_owned_keys((model, model_handle), (data, data_handle), (config.validation, validation))
    return RunPlan(
        engine_group.make_key("job"),
        spec,
        JobSpec(model_handle, data_handle, job_plan, program, loading, owned_keys),
        _make_run_options(
            config,
            strategy,
            _get_shard_sizes(engine_group, part),
            validation,
            _make_checkpoint_policy(config, spec.name, previous_lineage),
        ),
    )


def _list_owned_keys(*pairs: tuple[Any, ModelHandle | DataHandle | None]) -> tuple[str, ...]:
    """Return the keys of objects that were sent only for this run, from pairs (user's argument, its handle)."""
    return tuple(
        handle.key
        for argument, handle in pairs
        if handle is not None and not isinstance(argument, (ModelHandle, Partition, DataHandle))
    )


def _pickle_program(engine_group: EngineGroup, config: TrainConfig, strategy: Strategy) -> bytes:
    """Return the pickled program that the engines run on each batch."""
    from dtkit._util.metric_collections import list_metric_modules
    from dtkit.strategies.base import TrainingProgram
    from dtkit.strategies.class_weights import convert_class_weights
    from dtkit.strategies.loss import Loss

    program = TrainingProgram(
        Loss(convert_class_weights(config.loss), config.training_step),
        config.optimizer_factory,
        strategy,
        config.lr_scheduler,
        config.lr_scheduler_every,
        has_validation=config.validation is not None,
        on_engine=tuple(config.on_engine),
        activation_checkpointing=config.activation_checkpointing,
        checkpoint_trainable_only=config.checkpoint_trainable_only,
        sampler=config.sampler,
        metric_modules=list_metric_modules(config.metrics or {}),
    )
    warn_of_large_functions("train", [config.loss, config.training_step, config.optimizer_factory])
    return engine_group.uploads.dumps(program, name="train")


def _get_shard_sizes(engine_group: EngineGroup, partition: Partition | StreamHandle) -> tuple[int, ...]:
    """Return the rows of each shard. For a stream, the numbers are equal, since its ranks take equally many."""
    return (1,) * engine_group.world_size if isinstance(partition, StreamHandle) else partition.sizes


def _make_run_options(
    config: TrainConfig,
    strategy: Strategy,
    shard_sizes: tuple[int, ...],
    validation: DataHandle | None,
    checkpoint_policy: CheckpointPolicy,
) -> RunOptions:
    from dtkit.strategies.loss import takes_optimizers

    return RunOptions(
        strategy=strategy,
        on_failure=config.on_failure,
        metrics=dict(config.metrics or {}),
        validation=validation,
        validation_every=config.validation_every,
        callbacks=tuple(config.callbacks),
        on_engine=tuple(config.on_engine),
        balanced_shard_sizes=shard_sizes if strategy.balance and len(shard_sizes) > 1 else None,
        equivalence_notes=strategy.equivalence_notes(),
        supports_explain=strategy.supports_explain,
        is_manual=takes_optimizers(config.training_step),
        schedule=strategy.pipeline_schedule,
        checkpoint_policy=checkpoint_policy,
        disk_snapshot_policy=_make_disk_snapshot_policy(config, strategy, len(shard_sizes)),
        snapshot_interval=_make_snapshot_interval(config, strategy, len(shard_sizes)),
        ranks_per_replica=len(shard_sizes) // strategy.build_mesh(len(shard_sizes)).num_replicas,
    )


def _make_disk_snapshot_policy(config: TrainConfig, strategy: Strategy, world_size: int) -> CheckpointPolicy:
    """Return the policy for checkpoints to recover from.

    Where other ranks hold each part too, they are for the loss of all engines, and may take a hundredth of the time.
    """
    is_alone, is_timed = _has_unreplicated_part(strategy, world_size), config.snapshot_every is None
    seconds = timeouts.MAX_SNAPSHOT_INTERVAL_S if is_alone else timeouts.DEFAULT_SNAPSHOT_INTERVAL_S
    return CheckpointPolicy(
        config.snapshot_every,
        keep_last=2,
        every_seconds=seconds if is_timed else None,
        quiet=True,
        skip_while_writing=is_alone or is_timed,
        max_time_share=None if is_alone else _MAX_SNAPSHOT_SHARE,
    )


def _make_snapshot_interval(config: TrainConfig, strategy: Strategy, world_size: int) -> SnapshotInterval:
    """Return the interval of snapshots in memory. None are taken if other ranks hold each part too."""
    if not _has_unreplicated_part(strategy, world_size):
        return SnapshotInterval()
    return SnapshotInterval(
        config.snapshot_every, timeouts.DEFAULT_SNAPSHOT_INTERVAL_S if config.snapshot_every is None else None
    )


def _has_unreplicated_part(strategy: Strategy, world_size: int) -> bool:
    """Return whether only one rank holds some part of the model."""
    parts = [strategy.model_shard_id(world_size, rank) for rank in range(world_size)]
    return any(parts.count(part) == 1 for part in parts) and len(set(parts)) > 1


def _make_checkpoint_policy(config: TrainConfig, name: str, previous_lineage: Lineage) -> CheckpointPolicy:
    run_id = os.urandom(8).hex()
    to = (
        None
        if config.checkpoint_dir is None
        else folders.parse_new_folder("checkpoint_dir", config.checkpoint_dir).absolute()
    )
    return CheckpointPolicy(
        config.checkpoint_every,
        to,
        config.keep_last,
        lineage=(*previous_lineage, run_id),
        default_folder=to or folders.make_default_folder(name, run_id),
    )


def _warn_about_batch_norm(engine_group: EngineGroup, model_handle: ModelHandle, strategy: Strategy) -> None:
    """Warn that batch normalization makes training depend on the partition of a batch."""
    is_synchronized = engine_group.nodes[0].device.startswith("cuda") and getattr(strategy, "sync_batch_norm", False)
    if strategy.pipeline_schedule is not None:
        statistics = "a stage has those of a micro-batch only, with the copies that fill up one with fewer samples"
    elif strategy.build_mesh(engine_group.world_size).num_replicas == 1 or is_synchronized:
        return
    else:
        statistics = "each rank has those of its own part only"
    if model_handle.batch_norm_names:
        needs_gpus = ". sync_batch_norm=True shares them, on GPUs only" if hasattr(strategy, "sync_batch_norm") else ""
        warnings.warn(
            f"{model_handle.batch_norm_names[0]} normalizes with the statistics of a batch, and {statistics}: training "
            f"differs from that in one process{needs_gpus}. GroupNorm and LayerNorm don't depend on the batch",
            stacklevel=find_caller_stacklevel(),
        )


def _make_spec(
    engine_group: EngineGroup,
    model_handle: ModelHandle,
    partition: Partition | StreamHandle,
    config: TrainConfig,
    strategy: Strategy,
    shuffle: str | None,
) -> RunSpec:
    if isinstance(partition, StreamHandle):  # the largest number of samples; the run ends with the stream
        per_epoch, samples = int(config.steps or 0), int(config.steps or 0) * config.samples_per_step
    else:
        samples = partition.n if config.sampler is None else len(config.sampler)
        per_epoch = count_steps_per_epoch(samples, config.samples_per_step, drop_last=config.drop_last)
    return RunSpec(
        name=config.name or model_handle.name,
        strategy=repr(strategy),
        world_size=engine_group.world_size,
        samples=samples,
        batch_size=config.samples_per_step,
        steps=int(config.steps or (config.epochs or 0) * per_epoch),
        steps_per_epoch=per_epoch,
        shuffle=shuffle,
        seed=int(config.seed),
        loss=_get_loss_name(config, model_handle),
        optimizer=describe_value(config.optimizer),
        tags=tuple(config.tags),
        num_workers=int(config.num_workers),
        settings=describe_settings(config),
        sources=collect_sources(config),
        model=model_handle.summary,
        directions=tuple(read_directions(config.metrics or {}).items()),
        has_validation=config.validation is not None,
        data=(partition if isinstance(partition, StreamHandle) else partition.source).shapes,
    )


def _choose_shuffle(config: TrainConfig, data: Any, partition: Partition | StreamHandle) -> str | None:
    """Return the order of rows for the job's plan; None for a stream."""
    if isinstance(partition, StreamHandle):
        return None
    if config.sampler is not None:
        return BY_SAMPLER
    return IN_ORDER if config.shuffle is None and not isinstance(data, Partition) else config.shuffle


def _get_loss_name(config: TrainConfig, model_handle: ModelHandle) -> str:
    model_loss = f"{model_handle.name}'s own" if config.loss is None and config.training_step is None else None
    return model_loss or _get_name(config.loss or config.training_step)


def _get_name(function: Any) -> str:
    """Return a function's name, a source of a lambda or partial, else the object's class."""
    is_function = hasattr(function, "__name__") or isinstance(function, functools.partial)
    return describe_value(function) if is_function else type(function).__name__
