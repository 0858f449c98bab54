"""From what a user asks for to a run: check it, put model and data in place, make the job, hand out the handle.

What can be known to be wrong before anything travels is refused here, with ValueError or TypeError. What only an
engine can know (the optimiser's own complaints, say) comes back from making the job, still before `train` returns.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.checkpoint import checkpoint
from dtkit.checkpoint.manager import CheckpointPolicy
from dtkit.cluster import broadcast
from dtkit.cluster.broadcast import ModelHandle
from dtkit.data import distribute
from dtkit.data.distribute import DataHandle, StreamHandle
from dtkit.data.partition import Partition, find_caller_stacklevel
from dtkit.errors import format_ranks
from dtkit.planning import planner
from dtkit.training import resume as resuming
from dtkit.training.config import JobSpec, RunOptions
from dtkit.training.recovery import FAILURE_MODES
from dtkit.training.run import Run
from dtkit.training.snapshots import DEFAULT_INTERVAL_S, MAX_INTERVAL_S, SnapshotInterval
from dtkit.types import JobPlan, RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.checkpoint.checkpoint import Lineage
    from dtkit.cluster.cluster import Cluster
    from dtkit.strategies.base import Strategy

SHUFFLE_MODES = ("shard", "global", None)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What ``cluster.train`` was asked for, besides model and data: see there."""

    optimizer: Callable[..., Any]
    batch_size: int
    loss: Callable[..., Any] | None = None
    epochs: int | None = None
    steps: int | None = None
    strategy: Strategy | None = None
    shuffle: str | None = "shard"
    training_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] | None = None
    validation: Any = None
    lr_scheduler: Callable[..., Any] | None = None
    lr_scheduler_every: str = "step"
    callbacks: Sequence[Callable[[Run], Any]] = ()
    target: Any = None
    num_workers: int = 0
    pin_memory: bool | None = None
    prefetch: bool | None = None
    seed: int = 0
    start: bool = True
    checkpoint_every: int | None = None
    checkpoint_dir: str | Path | None = None
    keep_last: int = 3
    resume_from: str | Path | None = None
    on_failure: str = "repair"
    snapshot_every: int | None = None


def train(cluster: Cluster, model: Any, data: Any, config: TrainConfig) -> Run:
    """See :meth:`dtkit.Cluster.train`."""
    from dtkit.engine.data.loader import LoadingOptions

    cluster.check_open()
    planner.check_idle(cluster, "and trains one model at a time", "end it (run.stop())")
    strategy = _check_config(config)
    strategy.build_mesh(cluster.world_size)
    strategy.check(cluster.world_size, config.batch_size)
    _check_can_shrink(cluster.world_size, config, strategy)
    _check_model(cluster, model)
    if not isinstance(model, ModelHandle):
        strategy.check_model(model)
        if (shown := strategy.describe_plan(model)) is not None:
            print(shown)  # noqa: T201 - a plan is shown before it is used
    resumption = None if config.resume_from is None else resuming.load_resume_point(config.resume_from, model)
    loading = LoadingOptions(config.num_workers, config.pin_memory, config.prefetch)
    if config.on_failure == "repair":
        _replace_lost_engines(cluster)
    program = _pickle_program(cluster, config, strategy)
    part = _partition_data(cluster, model, data, config, strategy)
    source = part if isinstance(part, StreamHandle) else distribute.get_data_handle(cluster, part)
    copies = (
        model
        if isinstance(model, ModelHandle)
        else broadcast.broadcast(cluster, model, by_shared_file=strategy.shards_model)
    )
    valid = (
        None
        if config.validation is None
        else distribute.distribute_validation_data(cluster, config.validation, training_data=source)
    )
    spec = _make_spec(cluster, copies, part, config, strategy)
    if resumption is not None:
        resumption.check_steps_left(spec)
    previous, cluster.current_run = cluster.current_run, None
    if previous is not None:
        previous.release()
    plan = JobPlan(spec.batch_size, spec.steps, config.shuffle, spec.seed)
    saves = _make_checkpoint_policy(config, () if resumption is None else resumption.lineage)
    extras = _make_run_options(config, strategy, _get_shard_sizes(cluster, part), valid, saves)
    own = _list_owned_keys((model, copies), (data, source), (config.validation, valid))
    run = Run(cluster, spec, JobSpec(copies, source, plan, program, loading, own), extras)
    run.build(resumption)
    _warn_about_batch_norm(cluster, copies, strategy)
    cluster.current_run = run
    if config.start:
        run.resume()
    return run


def _replace_lost_engines(cluster: Cluster) -> None:
    """Who was lost while nothing was under way is replaced as it would be from here on."""
    if lost := cluster.find_lost_ranks():
        print(f"{format_ranks(lost)} gone: replaced before the training starts")  # noqa: T201 - it takes some seconds
        cluster.repair()


def _list_owned_keys(*pairs: tuple[Any, ModelHandle | DataHandle | None]) -> tuple[str, ...]:
    """Keys of what was placed here, of (what the user gave, what lies on the engines)."""
    return tuple(
        placed.key
        for given, placed in pairs
        if placed is not None and not isinstance(given, (ModelHandle, Partition, DataHandle))
    )


def _pickle_program(cluster: Cluster, config: TrainConfig, strategy: Strategy) -> bytes:
    """What the engines are to do with the batches, pickled."""
    from dtkit.strategies.base import TrainingProgram
    from dtkit.strategies.loss import Loss

    what = TrainingProgram(
        Loss(config.loss, config.training_step),
        config.optimizer,
        strategy,
        config.lr_scheduler,
        config.lr_scheduler_every,
        has_validation=config.validation is not None,
    )
    return cluster.dumps(what, name="train")


def _get_shard_sizes(cluster: Cluster, partition: Partition | StreamHandle) -> tuple[int, ...]:
    """Rows of each shard; of a stream, whose ranks take equally many, in that proportion."""
    return (1,) * cluster.world_size if isinstance(partition, StreamHandle) else partition.sizes


def _make_run_options(
    config: TrainConfig,
    strategy: Strategy,
    shard_sizes: tuple[int, ...],
    validation: DataHandle | None,
    checkpoint_policy: CheckpointPolicy,
) -> RunOptions:
    return RunOptions(
        strategy=strategy,
        on_failure=config.on_failure,
        metrics=dict(config.metrics or {}),
        validation=validation,
        callbacks=tuple(config.callbacks),
        balanced_shard_sizes=shard_sizes if strategy.balance and len(shard_sizes) > 1 else None,
        equivalence_notes=strategy.equivalence_notes(),
        supports_explain=strategy.supports_explain,
        schedule=strategy.pipeline_schedule,
        checkpoint_policy=checkpoint_policy,
        disk_snapshot_policy=_make_disk_snapshot_policy(config, strategy, len(shard_sizes)),
        snapshot_interval=_make_snapshot_interval(config, strategy, len(shard_sizes)),
        ranks_per_replica=len(shard_sizes) // strategy.build_mesh(len(shard_sizes)).num_replicas,
    )


def _make_disk_snapshot_policy(config: TrainConfig, strategy: Strategy, world_size: int) -> CheckpointPolicy:
    """On disk. None, where another rank holds what is lost with one."""
    alone = _has_unreplicated_part(strategy, world_size)
    if config.snapshot_every is None and (not alone or config.on_failure == "pause"):
        return CheckpointPolicy(quiet=True)
    seconds = MAX_INTERVAL_S if config.snapshot_every is None else None
    return CheckpointPolicy(
        config.snapshot_every, keep_last=2, every_seconds=seconds, quiet=True, skip_while_writing=alone
    )


def _make_snapshot_interval(config: TrainConfig, strategy: Strategy, world_size: int) -> SnapshotInterval:
    """Of those in memory. A part that another rank holds needs none there."""
    if not _has_unreplicated_part(strategy, world_size):
        return SnapshotInterval()
    return SnapshotInterval(config.snapshot_every, DEFAULT_INTERVAL_S if config.snapshot_every is None else None)


def _has_unreplicated_part(strategy: Strategy, world_size: int) -> bool:
    """Whether a part of the model is lost with the one rank that holds it."""
    parts = [strategy.model_shard_id(world_size, rank) for rank in range(world_size)]
    return any(parts.count(part) == 1 for part in parts) and len(set(parts)) > 1


def _make_checkpoint_policy(config: TrainConfig, previous_lineage: Lineage) -> CheckpointPolicy:
    to = (
        None
        if config.checkpoint_dir is None
        else checkpoint.parse_path("checkpoint_dir", config.checkpoint_dir).absolute()
    )
    return CheckpointPolicy(
        config.checkpoint_every, to, config.keep_last, lineage=(*previous_lineage, os.urandom(8).hex())
    )


def _partition_data(
    cluster: Cluster, model: Any, data: Any, config: TrainConfig, strategy: Strategy
) -> Partition | StreamHandle:
    """The data as a partition that these options can be used with; all is checked before raw data travels."""

    def check(part: Partition) -> None:
        _check_batch_size(config, part)
        _check_ignore_index(config.loss, part)
        if isinstance(data, Partition):
            distribute.get_data_handle(cluster, part)
        planner.check_fits(cluster, model, config.optimizer, strategy)

    def check_flow() -> None:
        _check_stream(cluster, config, strategy)
        planner.check_fits(cluster, model, config.optimizer, strategy)

    if not isinstance(data, Partition):
        return distribute.distribute_training_data(
            cluster, data, seed=config.seed, target=config.target, check=check, check_stream=check_flow
        )
    check(data)
    return data


def _check_config(config: TrainConfig) -> Strategy:
    """The strategy, after everything that needs neither model nor data was checked."""
    _check_loss(config)
    _check_optimizer(config.optimizer)
    for name in ("batch_size", "epochs", "steps", "checkpoint_every", "keep_last", "snapshot_every"):
        _check_count(name, getattr(config, name))
    for name in ("checkpoint_dir", "resume_from"):
        if (path := getattr(config, name)) is not None:
            checkpoint.parse_path(name, path)
    if config.checkpoint_every is not None and config.checkpoint_dir is None:
        raise ValueError(
            f"checkpoint_every={config.checkpoint_every}, but not where to: checkpoint_dir='checkpoints/first', say"
        )
    if (config.epochs is None) == (config.steps is None):
        raise ValueError(
            f"epochs={config.epochs}, steps={config.steps}: say how long to train by one of them, as in epochs=5"
        )
    if config.shuffle not in SHUFFLE_MODES:
        raise ValueError(
            f"shuffle={config.shuffle!r}; it must be 'shard' (each rank its own rows), 'global' (the same rows a step "
            "on any number of ranks) or None"
        )
    if isinstance(config.seed, bool) or not isinstance(config.seed, int | np.integer) or config.seed < 0:
        raise ValueError(f"seed={config.seed!r}; it must be an integer from 0 up. Use seed=0")
    if config.on_failure not in FAILURE_MODES:
        raise ValueError(
            f"on_failure={config.on_failure!r}; it must be 'repair' (a new engine takes the place of a lost one), "
            "'shrink' (go on without it) or 'pause'"
        )
    _check_metrics(config)
    _check_lr_scheduler(config)
    _check_callbacks(config)
    return _check_strategy(config.strategy)


def _check_can_shrink(world_size: int, config: TrainConfig, strategy: Strategy) -> None:
    """Refuse on_failure='shrink' where the strategy could not go on without one of the ranks."""
    if config.on_failure != "shrink" or world_size == 1:
        return
    try:
        strategy.build_mesh(world_size - 1)
        strategy.check(world_size - 1, config.batch_size)
    except ValueError as error:
        raise ValueError(
            f"on_failure='shrink' goes on without a lost rank, and {strategy!r} can't work on {world_size - 1} of "
            f"{world_size}: {error}. Use on_failure='repair', which starts another engine in its place; where engines "
            "were attached and none can be started, checkpoint_dir= and a training anew with resume_from="
        ) from None


def _check_count(name: str, value: Any) -> None:
    if value is None and name not in ("batch_size", "keep"):
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}; it must be an integer")
    if value < 1:
        raise ValueError(f"{name}={value}; it must be at least 1")


def _check_loss(config: TrainConfig) -> None:
    loss, step = config.loss, config.training_step
    if (loss is None) == (step is None):
        raise ValueError(
            "give either loss, a function of (output, target), or step, a function of (model, batch) that returns "
            f"the loss; you gave {'both' if loss is not None else 'neither'}"
        )
    for name, function in (("loss", loss), ("step", step)):
        if isinstance(function, type):
            raise TypeError(f"{name}={function.__name__} is a class; give an instance: {name}={function.__name__}()")
        if function is not None and not callable(function):
            raise TypeError(f"{name}={function!r} can't be called; give a function or a loss module")
    _check_reduction(loss)


_WEIGHTED_LOSS_EXAMPLE = "lambda out, y: (F.cross_entropy(out, y, weight=w, reduction='sum'), w[y].sum())"


def _check_reduction(loss: Any) -> None:
    """A mean over samples is exact on any number of ranks; other reductions are so only as (sum, weight)."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):  # KLDivLoss calls the mean over samples "batchmean"
        raise ValueError(
            f"loss has reduction={reduction!r}; dtkit needs the mean over samples, or a pair (sum, weight). Use "
            "reduction='mean', or write a function that returns (sum, number of samples)"
        )
    if getattr(loss, "weight", None) is not None and type(loss).__name__ in ("CrossEntropyLoss", "NLLLoss"):
        raise ValueError(
            f"{type(loss).__name__} with class weights divides by the weights of the rows at hand, so the mean over "
            f"ranks would not be the mean over rows. Return a pair (sum, weight) instead: loss={_WEIGHTED_LOSS_EXAMPLE}"
        )


def _check_ignore_index(loss: Any, partition: Partition) -> None:
    """ignore_index is refused where the targets are known to use it; else the engine looks (see objective.py)."""
    ignored = getattr(loss, "ignore_index", None)
    if ignored is not None and partition.labels is not None and bool((partition.labels == ignored).any()):
        raise ValueError(
            f"the targets contain ignore_index={ignored}, so {type(loss).__name__} divides by another number of rows "
            "on each "
            "rank, and the mean over ranks would not be the mean over rows. Return a pair (sum, weight) instead: "
            f"loss=lambda out, y: (F.cross_entropy(out, y, ignore_index={ignored}, reduction='sum'), (y != "
            f"{ignored}).sum())"
        )


def _check_optimizer(optimizer: Any) -> None:
    if not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; it must be a function from parameters to an optimiser, "
            "since every rank makes its own: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )


def _check_metrics(config: TrainConfig) -> None:
    if config.metrics is not None and not hasattr(config.metrics, "items"):
        raise TypeError(
            f"metrics is a {type(config.metrics).__name__}; give names and functions of (output, target), as in "
            "metrics={'accuracy': accuracy}"
        )
    if "loss" in (config.metrics or {}):
        raise ValueError("metrics has 'loss', which is the name of the loss itself; give the metric another name")
    for name, metric in (config.metrics or {}).items():
        if not callable(metric):
            raise TypeError(
                f"metrics[{name!r}] is a {type(metric).__name__}; it must be a function of (output, target)"
            )
    if config.metrics and config.training_step is not None:
        raise ValueError(
            "metrics need output and target, which step= keeps to itself; compute them in your step, or use loss="
        )


def _check_lr_scheduler(config: TrainConfig) -> None:
    if config.lr_scheduler is not None and not callable(config.lr_scheduler):
        raise TypeError(
            f"scheduler is a {type(config.lr_scheduler).__name__}; it must be a function from an optimiser to a torch "
            "scheduler, since every rank makes its own: "
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
        )
    if config.lr_scheduler_every not in ("step", "epoch"):
        raise ValueError(
            f"lr_scheduler_every={config.lr_scheduler_every!r}; it must be 'step' (after every update) or 'epoch'"
        )


def _check_callbacks(config: TrainConfig) -> None:
    if callable(config.callbacks):
        raise TypeError("callbacks is a function; give a list of functions of the run: callbacks=[function]")
    for callback in config.callbacks:
        if isinstance(callback, type) or not callable(callback):
            raise TypeError(
                f"callbacks has {callback!r}; each must be a function of the run, called after every epoch, such as "
                "dtkit.EarlyStopping(patience=3)"
            )


def _warn_about_batch_norm(cluster: Cluster, model_handle: ModelHandle, strategy: Strategy) -> None:
    """Batch normalisation makes training depend on how a batch is cut; said once, before it starts."""
    synchronised = cluster.nodes[0].device.startswith("cuda") and getattr(strategy, "sync_batch_norm", False)
    if strategy.pipeline_schedule is not None:
        own = "a stage has those of a micro-batch only, with the copies that fill up one with fewer samples"
    elif strategy.build_mesh(cluster.world_size).num_replicas == 1 or synchronised:
        return
    else:
        own = "each rank has those of its own part only"
    if model_handle.batch_norm_names:
        warnings.warn(
            f"{model_handle.batch_norm_names[0]} normalises with the statistics of a batch, and {own}: training differs a little "
            "from one process. GroupNorm and LayerNorm don't depend on the batch",
            stacklevel=find_caller_stacklevel(),
        )


def _check_strategy(strategy: Any) -> Strategy:
    from dtkit.strategies.base import Strategy
    from dtkit.strategies.data_parallel import DataParallel

    if strategy is None:
        return DataParallel()
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise TypeError(f"strategy={strategy.__name__} is a class; give an instance: strategy={strategy.__name__}()")
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy={strategy!r}; it must be a dtkit strategy such as dtkit.DataParallel()")
    return strategy


def _check_batch_size(config: TrainConfig, partition: Partition) -> None:
    if config.batch_size > partition.n:
        raise ValueError(
            f"batch_size={config.batch_size} is more than the {partition.n} samples there are; it is the number of "
            f"samples per update over all ranks. Use at most {partition.n}"
        )
    _check_samples_per_rank(config, partition.world_size)


def _check_samples_per_rank(config: TrainConfig, world_size: int) -> None:
    if config.batch_size < world_size:
        raise ValueError(
            f"batch_size={config.batch_size} is less than the {world_size} ranks; it is the number of samples "
            f"per update over all ranks, and each needs one. Use at least {world_size}"
        )


def _check_stream(cluster: Cluster, config: TrainConfig, strategy: Strategy) -> None:
    """A stream has no length, so no epochs, and its samples come in an order of their own."""
    if config.epochs is not None:
        raise ValueError(
            f"epochs={config.epochs}: the data is a stream without length, so nobody knows what an epoch is. Say "
            "steps=, which is then the most that are taken: the run ends with the stream"
        )
    if config.shuffle == "global":
        raise ValueError(
            "shuffle='global': the data is a stream, whose samples come in an order of their own. Shuffle where they "
            "are made, and leave shuffle out"
        )
    _check_samples_per_rank(config, cluster.world_size)
    if strategy.build_mesh(cluster.world_size).num_replicas < cluster.world_size:
        raise ValueError(
            f"{strategy!r} has several ranks take the same samples, and of a stream each rank draws its own. Give "
            "samples that can be taken by number: arrays, a Dataset, files"
        )


def _check_model(cluster: Cluster, model: Any) -> None:
    if isinstance(model, ModelHandle):
        name, trainable = model.name, model.num_trainable
        if model.cluster is not cluster:
            raise ValueError(f"{name} was broadcast on another cluster; give the model, or cluster.broadcast(model)")
    else:
        broadcast.check_model(model)
        name, trainable = type(model).__name__, any(p.requires_grad for p in model.parameters())
    if not trainable:
        raise ValueError(
            f"{name} has no parameter that requires a gradient, so an optimiser would have nothing to train. "
            "Give a model with parameters, or set requires_grad on some"
        )


def _make_spec(
    cluster: Cluster,
    model_handle: ModelHandle,
    partition: Partition | StreamHandle,
    config: TrainConfig,
    strategy: Strategy,
) -> RunSpec:
    if isinstance(partition, StreamHandle):  # as many samples as there may be at most; the run ends with the stream
        per_epoch, samples, shuffle = int(config.steps or 0), int(config.steps or 0) * int(config.batch_size), None
    else:
        per_epoch, samples, shuffle = -(-partition.n // config.batch_size), partition.n, config.shuffle
    return RunSpec(
        name=model_handle.name,
        strategy=repr(strategy),
        world_size=cluster.world_size,
        samples=samples,
        batch_size=int(config.batch_size),
        steps=int(config.steps or (config.epochs or 0) * per_epoch),
        steps_per_epoch=per_epoch,
        shuffle=shuffle,
        seed=int(config.seed),
        loss=_get_name(config.loss or config.training_step),
        optimizer=_get_name(config.optimizer),
    )


def _get_name(function: Any) -> str:
    """What a user would call it: a function's name, else the object's class."""
    return str(getattr(function, "__name__", type(function).__name__))
