"""Loss, optimizer and metrics of a Keras model, which travel with the classes of a notebook.

Keras's own pickling of these objects requires that each class is registered in the process that loads them. Here, an
object is pickled as its configuration, with its class by value.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import cloudpickle
import keras

from dtkit._util.torch_private import get_keras_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_UNSUPPORTED = {
    "loss_weights": "Scale the loss in a function of your own",
    "weighted_metrics": "Rows have no weights; give them as metrics",
}
"""Arguments of `compile` that change a training, by the remedy."""


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Loss, optimizer and metrics of a model, in any form that Keras accepts."""

    loss: Any = None
    optimizer: Any = None
    metrics: Any = None

    @classmethod
    def of(cls, model: keras.Model) -> CompileOptions:
        """Return copies of the options that a model was compiled with; all None if it was not.

        Raises ValueError for options that dtkit doesn't support.
        """
        if not model.compiled:
            return cls()
        from dtkit._util.torch_private import get_compile_config

        config = get_compile_config(model).config
        for name, remedy in _UNSUPPORTED.items():
            if config.get(name) is not None:
                raise ValueError(
                    f"{model.name} was compiled with {name}={config[name]!r}, which dtkit doesn't support. {remedy}"
                )
        return cls(config["loss"], config["optimizer"], config["metrics"]).copy()

    def or_else(self, other: CompileOptions) -> CompileOptions:
        """Return these options, with those of another where they are None."""
        pairs = zip(self._list_values(), other._list_values(), strict=True)
        return CompileOptions(*(theirs if ours is None else ours for ours, theirs in pairs))

    def for_only_output(self, model: keras.Model) -> CompileOptions:
        """Return the options with the loss and metrics of the only output, instead of lists or dicts by output.

        Raises ValueError for several losses, and for the names of other outputs.
        """
        names = getattr(model, "output_names", None)
        loss = _take_only("loss", self.loss, (list, tuple, dict), names)
        return CompileOptions(loss, self.optimizer, _take_only("metrics", self.metrics, (dict,), names))

    def copy(self) -> CompileOptions:
        """Return options with new objects. Raises ValueError if Keras can't make one from its configuration."""
        return _load_options(*self._pack())

    def _list_values(self) -> tuple[Any, Any, Any]:
        return self.loss, self.optimizer, self.metrics

    def _pack(self) -> tuple[Any, ...]:
        return tuple(_convert(value, _is_keras_object, SavedObject.save) for value in self._list_values())

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_options, self._pack()


@dataclasses.dataclass(frozen=True)
class SavedObject:
    """Configuration of an optimizer, loss or metric, with its class if that is not Keras's own."""

    config: Mapping[str, Any]
    custom_objects: bytes
    """Pickle of classes by name, by value: engines pickle it again, and can't import a class of a notebook."""

    @classmethod
    def save(cls, value: Any) -> SavedObject:
        """Save an object."""
        parts = [value, get_keras_schedule(value)] if isinstance(value, keras.optimizers.Optimizer) else [value]
        custom = {type(part).__name__: type(part) for part in parts if is_custom(type(part))}
        # unpickles: nothing, it returns names and numbers
        return cls(keras.saving.serialize_keras_object(value), cloudpickle.dumps(custom))

    def load(self) -> Any:
        """Return a new object. Raises ValueError if its class can't be made from the configuration."""
        # unpickles: what `save` has pickled
        with keras.saving.custom_object_scope(cloudpickle.loads(self.custom_objects)):
            try:
                # unpickles: Keras's own configuration, in its safe mode
                return keras.saving.deserialize_keras_object(dict(self.config))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"Keras can't rebuild {self.config['class_name']} from its configuration: "
                    f"{str(error).strip().splitlines()[-1]}. Give the class get_config(), which returns the arguments "
                    "of __init__, and let __init__ take **kwargs"
                ) from None


def _take_only(name: str, value: Any, kinds: tuple[Any, ...], outputs: Sequence[str] | None) -> Any:
    """Return the only part of a container of these kinds; anything else as it is."""
    if not isinstance(value, kinds):
        return value
    if len(value) != 1:
        raise ValueError(f"{name} has {len(value)} parts; dtkit trains Keras models with one output, so give one")
    if isinstance(value, dict) and outputs and next(iter(value)) not in outputs:
        raise ValueError(f"{name} names the output {next(iter(value))!r}; the model has {', '.join(outputs)}")
    return next(iter(value.values())) if isinstance(value, dict) else value[0]


def _load_options(*packed: Any) -> CompileOptions:
    return CompileOptions(
        *(_convert(value, lambda part: isinstance(part, SavedObject), SavedObject.load) for value in packed)
    )


def _is_keras_object(value: Any) -> bool:
    kinds = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)
    return isinstance(value, kinds)


def _convert(value: Any, is_chosen: Callable[[Any], bool], convert: Callable[[Any], Any]) -> Any:
    """Return `value` with the chosen parts of its lists and dicts converted."""
    if isinstance(value, (list, tuple)):
        return [_convert(part, is_chosen, convert) for part in value]
    if isinstance(value, dict):
        return {name: _convert(part, is_chosen, convert) for name, part in value.items()}
    return convert(value) if is_chosen(value) else value


def is_custom(kind: Any) -> bool:
    """Return whether a class or function is not Keras's own."""
    module = inspect.getmodule(kind)
    name = getattr(kind, "__module__", "") if module is None else module.__name__
    return not (name == "keras" or name.startswith("keras."))
