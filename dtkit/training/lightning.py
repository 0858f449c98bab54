"""Lightning modules and datamodules: ``cluster.train(module, datamodule)``.

Their methods replace arguments: ``training_step`` the loss, ``configure_optimizers`` the optimizer and the schedule,
``train_dataloader`` and ``val_dataloader`` the data. Lightning itself isn't imported: any module with these methods
counts as a Lightning module.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

from dtkit.engine.observe.call_output import log
from dtkit.engine.observe.training_position import POSITION
from dtkit.history.history import ROW_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.training.config import TrainConfig

_SCHEDULER_ATTRIBUTE = "dtkit_scheduler"
_TRAINER_ATTRIBUTE = "_trainer"  # of Lightning's modules
_UPDATING_HOOKS = (
    *("backward", "on_before_backward", "on_after_backward", "on_before_zero_grad", "optimizer_zero_grad"),
    *("on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"),
)
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_OTHER_HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end", "on_save_checkpoint", "on_load_checkpoint"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end", "on_validation_model_eval", "on_validation_model_train"),
    "configure_callbacks",
)


def is_lightning_module(model: Any) -> bool:
    """Return whether this is a Lightning module."""
    return not isinstance(model, type) and all(
        hasattr(model, name) for name in ("training_step", "configure_optimizers", "automatic_optimization")
    )


def read_lightning(model: Any, data: Any, config: TrainConfig) -> tuple[Any, TrainConfig]:
    """Return data and arguments, completed from a Lightning module and its datamodule. The user's arguments take
    precedence.
    """
    if not is_lightning_module(model):
        return data, config
    changes: dict[str, Any] = {}
    _check_hooks(model, data)
    for method, arguments in (("prepare_data", ()), ("setup", ("fit",)), ("configure_model", ())):
        if _has_own(model, method):
            getattr(model, method)(*arguments)
    if config.loss is None and config.training_step is None:
        changes["training_step"] = _choose_step(model)
    if config.optimizer is None and not model.automatic_optimization:
        configure_optimizers(model)  # engines call it again
        changes["optimizer"] = configure_optimizers
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        validation = config.validation
        if validation is None and _has_own(data, "val_dataloader"):
            validation = _take_one(data.val_dataloader(), "val_dataloader")
        changes["validation"] = validation
        data = _take_one(data.train_dataloader(), "train_dataloader")
    if config.optimizer is None and model.automatic_optimization:
        changes |= _read_optimizers(
            model, config, has_validation=changes.get("validation", config.validation) is not None
        )
    return data, dataclasses.replace(config, **changes)


def _choose_step(model: Any) -> Callable[..., Any]:
    """Return the function that runs a module's training step on the engines, and its validation step if it has one."""
    if not model.automatic_optimization:
        return call_manual_step
    return ValidatedStep() if _has_own(model, "validation_step") else call_training_step


def _has_own(data: Any, method: str) -> bool:
    """Return whether a datamodule overrides a method, which raises or returns nothing in the base class."""
    return type(data).__dict__.get(method) is not None or any(
        method in vars(kind) and not kind.__module__.startswith(("lightning", "pytorch_lightning"))
        for kind in type(data).__mro__
    )


def _check_hooks(model: Any, data: Any) -> None:
    """Raise ValueError for hooks of a Lightning module that would change the training. Warn of the others."""
    refused = [name for name in (*_UPDATING_HOOKS, *_TRANSFER_HOOKS) if _has_own(model, name)]
    refused += [name for name in _TRANSFER_HOOKS if hasattr(data, name) and _has_own(data, name)]
    if refused:
        raise ValueError(
            f"{type(model).__name__} has {', '.join(refused)}, which only Lightning's Trainer calls: without, it would "
            "train differently. Do the same in training_step or the Dataset, or run a script with the Trainer by "
            "cluster.torchrun"
        )
    ignored = [name for name in _OTHER_HOOKS if _has_own(model, name)]
    if ignored:
        warnings.warn(
            f"dtkit doesn't call {', '.join(ignored)} of {type(model).__name__}: only Lightning's Trainer does. If the "
            "training depends on them, use callbacks= or on_engine=",
            UserWarning,
            stacklevel=4,
        )


def _take_one(loaders: Any, method: str) -> Any:
    loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
    if len(loaders) != 1:
        raise ValueError(f"{method} returns {len(loaders)} loaders; dtkit trains on one. Return one")
    return loaders[0]


def _read_optimizers(model: Any, config: TrainConfig, *, has_validation: bool) -> dict[str, Any]:
    """Return the arguments that correspond to the result of ``configure_optimizers``. Engines call it again."""
    returned = model.configure_optimizers()
    _, scheduler, interval = _parse_optimizers(returned)
    if config.lr_scheduler is None:
        _check_scheduler(returned, has_validation=has_validation)
    changes: dict[str, Any] = {"optimizer": configure_optimizer}
    if scheduler is not None and config.lr_scheduler is None:
        changes |= {"lr_scheduler": get_scheduler, "lr_scheduler_every": interval}
    return changes


def _check_scheduler(returned: Any, *, has_validation: bool) -> None:
    """Raise ValueError for options of a schedule that dtkit would not follow."""
    options = next(iter(_split_optimizers(returned)[1]), None)
    if not isinstance(options, dict):
        return
    frequency, monitor = options.get("frequency", 1), options.get("monitor") or "val_loss"
    if frequency != 1:
        raise ValueError(
            f"configure_optimizers returns a schedule with frequency={frequency}; it must be 1. Let the schedule "
            "itself wait, as StepLR(optimizer, step_size) does"
        )
    if type(options["scheduler"]).__name__ != "ReduceLROnPlateau":
        return
    if "loss" not in monitor or ("val" in monitor) != has_validation:
        given = "validation" if has_validation else "training"
        raise ValueError(
            f"configure_optimizers returns a schedule with monitor={monitor!r}; here it would get each epoch's {given} "
            f"loss. Say so: monitor={'val_loss' if has_validation else 'train_loss'!r}"
        )


def _parse_optimizers(returned: Any) -> tuple[Any, Any, str]:
    """Return (optimizer, scheduler or None, "step" or "epoch")."""
    optimizers, schedulers = _split_optimizers(returned)
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise ValueError(
            f"configure_optimizers returns {len(optimizers)} optimizers and {len(schedulers)} schedulers; dtkit takes "
            "one of each. Put the parameters into groups of one optimizer"
        )
    scheduler = schedulers[0] if schedulers else None
    if isinstance(scheduler, dict):
        return optimizers[0], scheduler["scheduler"], scheduler.get("interval", "epoch")
    return optimizers[0], scheduler, "epoch"


def _split_optimizers(returned: Any) -> tuple[list[Any], list[Any]]:
    """Return (optimizers, schedulers)."""
    optimizers, schedulers = returned, []
    if isinstance(returned, dict):
        optimizers, schedulers = returned["optimizer"], [returned["lr_scheduler"]] if "lr_scheduler" in returned else []
    elif isinstance(returned, (list, tuple)) and len(returned) == 2 and isinstance(returned[0], (list, tuple)):
        optimizers, schedulers = returned
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers], list(schedulers)


# -- on the engines --------------------------------------------------------------------------------------------


def configure_optimizer(model: Any) -> Any:
    """Return the optimizer of a module, and keep its scheduler for :func:`get_scheduler`."""
    optimizer, scheduler, _ = _parse_optimizers(model.configure_optimizers())
    setattr(optimizer, _SCHEDULER_ATTRIBUTE, scheduler)
    return optimizer


def get_scheduler(optimizer: Any) -> Any:
    """Return the scheduler that was configured with an optimizer."""
    return getattr(optimizer, _SCHEDULER_ATTRIBUTE)


def call_training_step(model: Any, batch: Any) -> Any:
    """Return the loss of a module's own training step. Values that it logs become columns of the history."""
    _replace_log(model)
    _attach_position(model)
    result = model.training_step(batch, POSITION.batch_index)
    return result["loss"] if isinstance(result, dict) else result


class ValidatedStep:
    """The training step of a module, whose evaluations run its validation step."""

    __name__ = "training_step"

    def __call__(self, model: Any, batch: Any) -> Any:
        """See :func:`call_training_step`."""
        return call_training_step(model, batch)

    def evaluate(self, model: Any, batch: Any, logged: Mapping[str, Any]) -> Any:
        """Return the loss of the module's own validation step, or the loss that it has `logged`."""
        _replace_log(model)
        _attach_position(model)
        result = model.validation_step(batch, POSITION.evaluation_index)
        if isinstance(result, dict):
            result = result.get("loss", result.get("val_loss"))
        names = [name for name in logged if "loss" in name]
        if result is None and (len(names) == 1 or "val_loss" in names):
            result = logged["val_loss" if "val_loss" in names else names[0]]
        if result is None:
            raise ValueError(
                f"{type(model).__name__}.validation_step returns no loss, and logs {', '.join(logged) or 'nothing'}. "
                "Return the loss, or log it as val_loss"
            )
        return result


def _replace_log(model: Any) -> None:
    """Let a module log to the history."""
    if "log" not in vars(model):
        vars(model)["log"], vars(model)["log_dict"] = _log_one, _log_many


class _Position:
    """What a module reads of its trainer in `current_epoch` and `global_step`."""

    def __init__(self, *, counts_updates: bool) -> None:
        self._counts_updates = counts_updates

    @property
    def current_epoch(self) -> int:
        return POSITION.epoch

    def __getattr__(self, name: str) -> Any:
        if name == "global_step" and vars(self).get("_counts_updates"):
            return POSITION.step
        if name.startswith("_"):
            raise AttributeError(name)
        raise RuntimeError(
            f"the module asks its trainer for {name}, and dtkit trains without Lightning's Trainer. Run a script with "
            "the Trainer by cluster.torchrun"
        )


def _attach_position(model: Any) -> None:
    """Let a module and those within it know epoch and step: without a trainer, Lightning says 0."""
    if vars(model).get(_TRAINER_ATTRIBUTE, model) is None:
        position = _Position(counts_updates=model.automatic_optimization)  # otherwise each optimizer counts
        for module in model.modules():
            if _TRAINER_ATTRIBUTE in vars(module):
                vars(module)[_TRAINER_ATTRIBUTE] = position


# -- manual optimization, on the engines -----------------------------------------------------------------------


def configure_optimizers(model: Any) -> list[Any]:
    """Return the optimizers of a module that steps them itself."""
    optimizers, schedulers = _split_optimizers(model.configure_optimizers())
    if schedulers:
        raise ValueError(
            f"configure_optimizers returns {len(schedulers)} schedulers, and the module updates by itself, with no "
            "trainer to step them. Give one to cluster.train(lr_scheduler=...)"
        )
    return optimizers


def call_manual_step(model: Any, batch: Any, optimizers: Sequence[Any]) -> Any:
    """Run the training step of a module with manual optimization. Its loss is the last one that it differentiated."""
    _replace_log(model)
    _attach_position(model)
    losses: list[Any] = []

    def manual_backward(loss: Any, *args: Any, **options: Any) -> None:
        losses.append(loss.detach())
        loss.backward(*args, **options)

    vars(model)["optimizers"] = lambda *_, **__: optimizers[0] if len(optimizers) == 1 else list(optimizers)
    vars(model)["manual_backward"] = manual_backward
    vars(model)["toggle_optimizer"], vars(model)["untoggle_optimizer"] = _make_toggles(optimizers)
    try:
        model.training_step(batch, POSITION.batch_index)
    finally:
        for name in ("optimizers", "manual_backward", "toggle_optimizer", "untoggle_optimizer"):
            del vars(model)[name]
    if not losses:
        raise ValueError(f"{type(model).__name__}.training_step has not called self.manual_backward(loss)")
    return losses[-1]


def _make_toggles(optimizers: Sequence[Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two functions: one lets only one optimizer's parameters require gradients, the other restores all."""
    others: list[Any] = []

    def toggle(optimizer: Any) -> None:
        own_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        others[:] = [p for p in parameters if id(p) not in own_ids and p.requires_grad]
        for p in others:
            p.requires_grad_(False)

    def untoggle(_optimizer: Any) -> None:
        for p in others:
            p.requires_grad_(True)
        others.clear()

    return toggle, untoggle


def _log_one(name: str, value: Any, **_options: Any) -> None:
    _log_many({name: value})


def _log_many(values: Mapping[str, Any], **_options: Any) -> None:
    """Log numbers by name, except those that the history already has, such as the loss."""
    log(**{name: value for name, value in values.items() if name not in (ROW_DTYPE.names or ())})
