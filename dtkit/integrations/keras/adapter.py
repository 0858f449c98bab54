"""Conversion of a Keras model, and of Keras's losses, optimizers and metrics, for `cluster.train`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from dtkit._util.torch_private import uses_weight_decay
from dtkit.integrations.keras.compile_checks import (
    check_compile_options,
    check_optimizer,
    check_training_step,
    is_overridden,
)
from dtkit.integrations.keras.compile_options import CompileOptions, SavedObject
from dtkit.integrations.keras.layer_checks import check_layers
from dtkit.integrations.keras.metrics import KerasMetrics
from dtkit.integrations.keras.optimizer import KerasOptimizer, has_own_schedule
from dtkit.integrations.keras.tf_data import is_tf_dataset, read_tf_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.integrations.keras.module import KerasModule
    from dtkit.training.config import TrainConfig

_CALLBACKS = {
    "EarlyStopping": "use dtkit.EarlyStopping(patience=3, monitor=...)",
    "ModelCheckpoint": "use checkpoint_dir= and checkpoint_every=",
    "BackupAndRestore": "use checkpoint_dir= and checkpoint_every=, and later resume_from=",
    "ReduceLROnPlateau": "use lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau and lr_scheduler_every='epoch'",
    "LearningRateScheduler": "use lr_scheduler=, a function from the optimizer to a torch scheduler, or run.set(lr=)",
    "TensorBoard": "use dtkit.integrations.trackers.TensorBoard(folder)",
    "CSVLogger": "use run.history.to_pandas().to_csv(path)",
    "TerminateOnNaN": "leave it out: a run pauses before an update that is not finite",
    "ProgbarLogger": "leave it out: a run shows its progress",
}
"""What dtkit has instead of a callback of Keras."""
_STRATEGIES = ("DataParallel", "NaiveDataParallel", "ParameterAveraging")


def adapt(model: Any, data: Any, config: TrainConfig) -> tuple[Any, Any, TrainConfig]:
    """Return a torch module, data and arguments in torch's terms for a Keras model, which is copied."""
    _check(config)
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model is a Keras {type(model).__name__}, which is not a keras.Model; wrap it, as in "
            "keras.Sequential([keras.Input(shape), layer])"
        )
    check_training_step(model)
    check_layers(model)
    outputs = getattr(model, "outputs", None) or [None]
    if len(outputs) > 1:
        raise ValueError(
            f"{model.name} has {len(outputs)} outputs; dtkit trains Keras models with one. Concatenate them, and let a "
            "loss of your own take them apart"
        )
    arguments = CompileOptions(config.loss, config.optimizer, config.metrics)
    options = arguments.or_else(CompileOptions.of(model)).for_only_output(model)
    for name, value in (("loss", options.loss), ("optimizer", options.optimizer)):
        if value is None and not (name == "loss" and is_overridden(model, "compute_loss")):
            raise ValueError(f"{model.name} was not compiled, and {name}= was not given. Give {name}=, or compile it")
    check_compile_options(options)
    make_optimizer = make_optimizer_factory(options.optimizer, model.trainable_variables)
    if config.lr_scheduler is not None and has_own_schedule(keras.optimizers.get(options.optimizer)):
        raise ValueError(
            "lr_scheduler= was given, and the optimizer has a schedule of Keras, which would win; leave one of them out"
        )
    module = _find_module_class().of(model, options)
    metrics = (
        None if not options.metrics else {"keras": KerasMetrics(CompileOptions(options.loss, None, options.metrics))}
    )
    data, config = _read_tf_data(data, config, _find_batch_rank(model))
    for name, rows in (("data", data), ("validation", config.validation)):
        _check_number_of_inputs(model, rows, name)
    return (
        module,
        data,
        dataclasses.replace(config, loss=None, optimizer=make_optimizer, metrics=metrics),
    )


def _check_data(data: Any, name: str) -> None:
    """Refuse data without a target, and Keras's own datasets of batches."""
    if isinstance(data, keras.utils.PyDataset):
        raise TypeError(
            f"{name} is a Keras {type(data).__name__}, whose items are batches; give arrays, a dataset of single "
            "rows, or a function that yields each engine's batches, with steps="
        )
    parts = data if isinstance(data, (tuple, list)) else [data]
    if len(parts) == 1 and isinstance(parts[0], np.ndarray):
        raise ValueError(f"{name} is one array; a Keras model needs (inputs..., target). An autoencoder's are (X, X)")


def _check_number_of_inputs(model: keras.Model, data: Any, name: str) -> None:
    """Refuse arrays that the model has no input for: Keras's fit would take the last one as sample weights."""
    inputs = getattr(model, "inputs", None)
    if not inputs or not isinstance(data, (tuple, list)) or not all(hasattr(part, "shape") for part in data):
        return
    if len(data) != len(inputs) + 1:
        raise ValueError(
            f"{name} has {len(data)} arrays, and {model.name} takes {len(inputs)} inputs and a target, that is "
            f"{len(inputs) + 1}. Sample weights are not supported"
        )


def _find_batch_rank(model: keras.Model) -> int | None:
    """Return the number of dimensions of a batch of the first input; None for a model without a fixed one."""
    inputs = getattr(model, "inputs", None)
    return len(inputs[0].shape) if inputs else None


def _read_tf_data(data: Any, config: TrainConfig, batch_rank: int | None) -> tuple[Any, TrainConfig]:
    """Return arrays for datasets of tf.data, with their batch size unless the user gave one."""
    if is_tf_dataset(config.validation):
        config = dataclasses.replace(config, validation=read_tf_dataset(config.validation, batch_rank).arrays)
    _check_data(config.validation, "validation")
    if not is_tf_dataset(data):
        _check_data(data, "data")
        return data, config
    rows = read_tf_dataset(data, batch_rank)
    _check_data(rows.arrays, "data")
    batch_size = config.batch_size or rows.batch_size
    print(f"tf.data: {len(rows.arrays[0]):,} rows, batch_size={batch_size} over all ranks")  # noqa: T201 - what is taken over is said
    return rows.arrays, dataclasses.replace(config, batch_size=batch_size)


def _check(config: TrainConfig) -> None:
    strategy = type(config.strategy).__name__
    if config.strategy is not None and strategy not in _STRATEGIES:
        raise ValueError(
            f"strategy={config.strategy!r}: a Keras model can't be cut or sharded, since its layers aren't torch "
            f"modules. Use {', '.join(f'dtkit.{name}' for name in _STRATEGIES)}"
        )
    if config.training_step is not None:
        raise ValueError("training_step= runs a torch model; for a Keras model give loss=, a Keras name or object")
    for callback in config.callbacks if isinstance(config.callbacks, (list, tuple)) else ():
        if isinstance(callback, keras.callbacks.Callback):
            kind = type(callback).__name__
            remedy = _CALLBACKS.get(kind, "use a function of the run, which is called after each epoch")
            raise TypeError(f"callbacks has {kind} of Keras, which follows fit; {remedy}")
    if isinstance(config.lr_scheduler, keras.optimizers.schedules.LearningRateSchedule):
        raise TypeError(
            f"lr_scheduler={config.lr_scheduler!r} is a schedule of Keras; give it to the optimizer, as in "
            "optimizer=keras.optimizers.SGD(schedule)"
        )


def _find_module_class() -> type[KerasModule]:
    backend = keras.backend.backend()
    if backend == "torch":
        from dtkit.integrations.keras.torch_backend import TorchKerasModule

        return TorchKerasModule
    if backend == "tensorflow":
        from dtkit.integrations.keras.tensorflow_backend import TensorFlowKerasModule

        return TensorFlowKerasModule
    raise ValueError(
        f"Keras runs with its {backend} backend; dtkit trains with torch and tensorflow. Set KERAS_BACKEND=torch "
        "before Keras is imported"
    )


def make_optimizer_factory(optimizer: Any, variables: Sequence[Any] = ()) -> Callable[..., KerasOptimizer]:
    """Return a function from a module to its optimizer. Raises TypeError or ValueError for one that can't be used.

    variables : those of the user's model that it trains.
    """
    try:
        known = keras.optimizers.get(optimizer)
        saved = SavedObject.save(known)
    except ValueError as error:
        raise ValueError(
            f"optimizer is {optimizer!r}, which Keras doesn't know as one; give a name such as 'adam', or an "
            "object, as in keras.optimizers.SGD(0.1)"
        ) from error
    check_optimizer(known)
    undecayed = [k for k, variable in enumerate(variables) if not uses_weight_decay(known, variable)]

    def make_keras_optimizer(model: KerasModule) -> KerasOptimizer:
        return KerasOptimizer(model, saved.load(), undecayed)

    make_keras_optimizer.__name__ = str(saved.config["class_name"])
    return make_keras_optimizer
