"""Checks of the arguments of ``cluster.train`` that need no engine.

They raise ValueError or TypeError before anything is sent. Errors that only an engine can find, such as in the
optimizer, are raised while the job is built, before `train` returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util.formatting import name_type
from dtkit._util.function_checks import check_loss_functions, check_metrics, check_takes
from dtkit._util.meant_names import find_loss, find_optimizer, find_strategy
from dtkit.checkpoint import folders
from dtkit.data import broadcast
from dtkit.data.broadcast import ModelHandle
from dtkit.data.partition import Partition
from dtkit.training.callback_check import check_callbacks, check_on_engine
from dtkit.training.recovery import FAILURE_MODES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import Strategy
    from dtkit.training.config import TrainConfig

_COUNTS = ("batch_size", "epochs", "steps", "checkpoint_every", "keep_last", "snapshot_every", "validation_every")
SHUFFLE_MODES = ("shard", "global", None)


def check_config(config: TrainConfig) -> Strategy:
    """Check the arguments that need neither model nor data; return the strategy."""
    check_loss(config.loss, config.training_step)
    _check_optimizer(config.optimizer)
    if config.batch_size is None:
        raise TypeError("batch_size= is missing; it is the number of samples per update over all ranks: batch_size=32")
    for name in _COUNTS:
        check_count(name, getattr(config, name))
    for name in ("checkpoint_dir", "resume_from"):
        if (path := getattr(config, name)) is not None:
            (folders.parse_path if name == "resume_from" else folders.parse_new_folder)(name, path)
    if config.checkpoint_every is not None and config.checkpoint_dir is None:
        raise ValueError(
            f"checkpoint_every={config.checkpoint_every}, but not where to: checkpoint_dir='checkpoints/first', say"
        )
    if config.validation_every > 1 and config.validation is None:
        raise ValueError(
            f"validation_every={config.validation_every}, but no data to evaluate: give validation=(X[n:], y[n:]), say"
        )
    if (config.epochs is None) == (config.steps is None):
        raise ValueError(
            f"epochs={config.epochs}, steps={config.steps}: say how long to train by one of them, as in epochs=5"
        )
    _check_shuffle(config.shuffle)
    if isinstance(config.seed, bool) or not isinstance(config.seed, int | np.integer) or config.seed < 0:
        raise ValueError(f"seed={config.seed!r}; it must be an integer from 0 up. Use seed=0")
    if config.on_failure not in FAILURE_MODES:
        raise ValueError(
            f"on_failure={config.on_failure!r}; it must be 'repair' (a new engine takes the place of a lost one), "
            "'shrink' (go on without it) or 'pause'"
        )
    _check_drop_last(config.drop_last)
    _check_validation(config.validation)
    _check_name_and_tags(config)
    _check_metrics(config)
    _check_lr_scheduler(config)
    check_callbacks(config)
    check_on_engine(config.on_engine)
    check_activation_checkpointing(config.activation_checkpointing)
    strategy = _check_strategy(config.strategy)
    _check_manual(config, strategy)
    return strategy


def check_can_shrink(world_size: int, config: TrainConfig, strategy: Strategy) -> None:
    """Refuse on_failure='shrink' if the strategy can't continue without one of the ranks."""
    if config.on_failure != "shrink" or world_size == 1:
        return
    try:
        strategy.build_mesh(world_size - 1)
        strategy.check(world_size - 1, config.samples_per_step)
    except ValueError as error:
        raise ValueError(
            f"on_failure='shrink' goes on without a lost rank, and {strategy!r} can't work on {world_size - 1} of "
            f"{world_size}: {error}. Use on_failure='repair', which starts another engine in its place; where engines "
            "were attached and none can be started, use checkpoint_dir= and train again with resume_from="
        ) from None


def _check_shuffle(shuffle: Any) -> None:
    if shuffle is True:  # either of two orders, so it is not guessed
        raise ValueError(
            "shuffle=True: rows are shuffled by default, so leave shuffle= out. 'shard', the default, shuffles the "
            "rows of each rank; 'global' shuffles all rows over all ranks; False keeps their order"
        )
    if shuffle not in SHUFFLE_MODES:
        raise ValueError(
            f"shuffle={shuffle!r}; it must be 'shard' (each rank its own rows), 'global' (the same rows a step "
            "on any number of ranks), or None or False (rows in their order)"
        )


def _check_drop_last(value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"drop_last={value!r}; it must be True or False")


def _check_validation(value: Any) -> None:
    """Refuse a share of the rows, which other libraries take."""
    if isinstance(value, float) and 0 < value < 1:
        raise TypeError(
            f"validation={value!r}; it must be held-out data, in the form of the training's. Split the rows yourself: "
            f"n = int({1 - value:.4g} * len(X)), then train on (X[:n], y[:n]) with validation=(X[n:], y[n:])"
        )


def check_count(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless an argument is a positive integer, or None where it may be left out."""
    if value is None and name not in ("batch_size", "keep_last", "validation_every"):
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}; it must be an integer, as in {name}={64 if name == 'batch_size' else 10}")
    if value < 1:
        raise ValueError(f"{name}={value}; it must be at least 1")


_CALLABLE_EXAMPLES = {"loss": "loss=nn.CrossEntropyLoss()", "training_step": "training_step=lambda model, batch: ..."}


def check_loss(loss: Any, step: Any) -> None:
    """Check the arguments `loss` and `training_step`."""
    if loss is not None and step is not None:
        raise ValueError(
            "give either loss, a function of (output, target), or training_step, a function of (model, batch) that "
            "returns the loss; you gave both"
        )
    for name, function in (("loss", loss), ("training_step", step)):
        if isinstance(function, type):
            raise TypeError(f"{name}={function.__name__} is a class; give an instance: {name}={function.__name__}()")
        if function is not None and not callable(function):
            meant = find_loss(function) if name == "loss" else None
            example = _CALLABLE_EXAMPLES[name] if meant is None else f"loss={meant}"
            raise TypeError(f"{name}={function!r} can't be called; give a function or a module, as in {example}")
    check_loss_functions(loss, step)
    _check_reduction(loss)


def _check_reduction(loss: Any) -> None:
    """Refuse reductions that are not exact over ranks. Only a mean, or a pair (sum, weight), is exact."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):  # KLDivLoss calls the mean over samples "batchmean"
        raise ValueError(
            f"loss has reduction={reduction!r}; dtkit needs the mean over samples, or a pair (sum, weight). Use "
            "reduction='mean', or write a function that returns (sum, number of samples)"
        )


def _check_optimizer(optimizer: Any) -> None:
    if not callable(optimizer):
        given = f"={optimizer!r}" if isinstance(optimizer, str) else f" is {name_type(optimizer)}"
        example = find_optimizer(optimizer) or "torch.optim.SGD(params, lr=0.1)"
        raise TypeError(
            f"optimizer{'= is missing' if optimizer is None else given}; it must be a function from parameters to an "
            f"optimizer, since every rank builds its own: optimizer=lambda params: {example}"
        )
    check_takes("optimizer", optimizer, ("params",))


def _check_name_and_tags(config: TrainConfig) -> None:
    if config.name is not None and not (isinstance(config.name, str) and config.name.strip()):
        raise TypeError(f"name={config.name!r}; it must be a text, as in name='baseline'")
    if (
        isinstance(config.tags, str)
        or not isinstance(config.tags, Iterable)
        or not all(isinstance(tag, str) for tag in config.tags)
    ):
        raise TypeError(f"tags={config.tags!r}; it must be a list of texts, as in tags=['baseline']")


def _check_metrics(config: TrainConfig) -> None:
    if config.metrics and config.training_step is not None:
        raise ValueError(
            "metrics= need output and target, which training_step= keeps to itself. Let the step return them next to "
            "the loss: return loss, {'accuracy': accuracy}. validation= then has their means over its rows, too"
        )
    check_metrics(config.metrics)


def _check_lr_scheduler(config: TrainConfig) -> None:
    if config.lr_scheduler is not None and not callable(config.lr_scheduler):
        raise TypeError(
            f"lr_scheduler is {name_type(config.lr_scheduler)}; it must be a function from an optimizer to a "
            "torch scheduler, since every rank builds its own: "
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
        )
    if config.lr_scheduler is not None and (missing := _list_further_parameters(config.lr_scheduler)):
        name = getattr(config.lr_scheduler, "__name__", "it")
        raise TypeError(
            f"lr_scheduler={name} also needs {', '.join(missing)}, but every rank calls it with the optimizer alone: "
            f"lr_scheduler=lambda optimizer: {name}(optimizer, {missing[0]}=...)"
        )
    if config.lr_scheduler is not None:
        check_takes("lr_scheduler", config.lr_scheduler, ("optimizer",))
    if config.lr_scheduler_every not in ("step", "epoch"):
        raise ValueError(
            f"lr_scheduler_every={config.lr_scheduler_every!r}; it must be 'step' (after every update) or 'epoch'"
        )


def _list_further_parameters(factory: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters without a default, behind the first one."""
    try:
        parameters = [*inspect.signature(factory).parameters.values()][1:]
    except ValueError:  # written in C
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def check_activation_checkpointing(blocks: Any) -> None:
    """Check the argument: a flag, or names of modules."""
    names = blocks if isinstance(blocks, (list, tuple)) else ()
    if not isinstance(blocks, (bool, list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"activation_checkpointing={blocks!r}; it must be True (the model's blocks), False, or names of "
            "modules in a list"
        )


def _check_strategy(strategy: Any) -> Strategy:
    from dtkit.strategies.base import Strategy
    from dtkit.strategies.data_parallel import DataParallel

    if strategy is None:
        return DataParallel()
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise TypeError(f"strategy={strategy.__name__} is a class; give an instance: strategy={strategy.__name__}()")
    if not isinstance(strategy, Strategy):
        if (meant := find_strategy(strategy)) is not None:
            raise TypeError(f"strategy={strategy!r}; it must be a dtkit strategy, not a name: strategy={meant}")
        raise TypeError(f"strategy={strategy!r}; it must be a dtkit strategy such as dtkit.DataParallel()")
    return strategy


def _check_manual(config: TrainConfig, strategy: Strategy) -> None:
    """Check a training step that takes the optimizers. Refuse options that would act within its updates."""
    from dtkit.strategies.data_parallel import DataParallel
    from dtkit.strategies.loss import takes_optimizers

    if not takes_optimizers(config.training_step):
        return
    if type(strategy) is not DataParallel:
        raise ValueError(
            f"strategy={strategy!r}: a training_step that takes the optimizers needs whole gradients on each rank. Use "
            "dtkit.DataParallel()"
        )
    for name, remedy in (
        ("accumulate", "call backward() several times before step()"),
        ("precision", "use torch.autocast in the step"),
        ("compress", "leave it out"),
    ):
        if (value := getattr(strategy, name)) != getattr(DataParallel(), name):
            raise ValueError(f"{name}={value!r}: training_step takes the optimizers and updates itself; {remedy}")
    if config.validation is not None:
        raise ValueError(
            "validation=: a training_step that takes the optimizers would update the model on validation data. Leave "
            "it out, and evaluate run.model"
        )


def check_batch_size(config: TrainConfig, partition: Partition) -> None:
    """Check the batch size against the numbers of samples and ranks."""
    count = partition.n if config.sampler is None else len(config.sampler)
    if config.samples_per_step > count:
        raise ValueError(
            f"batch_size={config.batch_size} is more than the {count} samples there are; it is the number of "
            f"samples per update over all ranks. Use at most {count}"
        )
    _check_samples_per_rank(config, partition.world_size)


def _check_samples_per_rank(config: TrainConfig, world_size: int) -> None:
    if config.samples_per_step < world_size:
        raise ValueError(
            f"batch_size={config.batch_size} is less than the {world_size} ranks; it is the number of samples "
            f"per update over all ranks, and each needs one. Use at least {world_size}"
        )


def check_sampler(config: TrainConfig, data: Any) -> None:
    """Check the sampler, which is only for data that were not partitioned."""
    sampler = config.sampler
    if sampler is None:
        return
    if isinstance(data, Partition):
        raise ValueError(  # noqa: TRY004 - both arguments are right, but not together
            "sampler= orders the rows of the whole data, and this is a Partition, whose ranks have rows of their own. "
            "Give the data itself"
        )
    if config.shuffle != "shard":
        raise ValueError(
            f"shuffle={config.shuffle!r} and sampler= both order the rows; leave shuffle out, and the sampler decides"
        )
    if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
        raise TypeError(
            f"sampler is {name_type(sampler)}; it must be an iterable of row numbers with a length, such as "
            "torch's WeightedRandomSampler"
        )
    if int(getattr(sampler, "num_replicas", None) or 1) > 1:
        raise ValueError(
            f"{type(sampler).__name__} has the rows of one of {sampler.num_replicas} ranks, and dtkit would divide "
            "them once more: most rows would be left out. Give a sampler of all rows, or none"
        )


def check_stream(engine_group: EngineGroup, config: TrainConfig) -> None:
    """Check the arguments for a stream, which has no length, no epochs, and an order of its own."""
    if config.epochs is not None:
        raise ValueError(
            f"epochs={config.epochs}: the data is a stream without length, so it has no epochs. Give "
            "steps=, the largest number of steps; the run ends with the stream"
        )
    if config.sampler is not None:
        raise ValueError("sampler= yields row numbers, and the data is a stream, which has none. Leave it out")
    if config.shuffle == "global":
        raise ValueError(
            "shuffle='global': the data is a stream, whose samples come in an order of their own. Shuffle where they "
            "are made, and leave shuffle out"
        )
    _check_samples_per_rank(config, engine_group.world_size)


def check_not_swapped(model: Any, data: Any) -> None:
    """Raise TypeError if the data was given first, and the model second."""
    if hasattr(data, "named_parameters") and not hasattr(model, "named_parameters") and not isinstance(model, type):
        raise TypeError(
            f"train(model, data) got {name_type(model)} as the model, and the model {type(data).__name__} as the data; "
            "exchange them, as in cluster.train(model, (X, y), ...)"
        )


def check_model(engine_group: EngineGroup, model: Any, config: TrainConfig) -> None:
    """Check that the model belongs to this cluster, has something to train, and a loss."""
    if isinstance(model, ModelHandle):
        name, trainable, count = model.name, model.num_trainable, model.num_parameters
        if model.engine_group is not engine_group:
            raise ValueError(f"{name} was broadcast on another cluster; give the model, or cluster.broadcast(model)")
    else:
        broadcast.check_model(model)
        name, trainable = type(model).__name__, any(p.requires_grad for p in model.parameters())
        count = sum(p.numel() for p in model.parameters())
    if not trainable:
        reason = f"all {count:,} of them are frozen" if count else "it has no parameters"
        remedy = "Call requires_grad_(True) on the layers to train" if count else "Give a model with parameters"
        raise ValueError(
            f"{name} has no parameter that requires a gradient: {reason}, so an optimizer would have nothing to train. "
            f"{remedy}"
        )
    broadcast.check_has_loss(model, config.loss, config.training_step)
