"""A Keras model without weights, as plain values: its configuration, and its custom classes.

Keras's own pickling requires that every class is registered, and renames variables. Here, classes of a notebook are
pickled by value, and variables keep their order.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from dtkit.integrations.keras.compile_options import is_custom

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """Configuration of a Keras model, which can be pickled."""

    config: Mapping[str, Any]
    custom_objects: Mapping[str, Any]
    backend: str
    floatx: str
    """Keras's default dtype, in which it computes losses."""
    trainable: Sequence[bool]
    """Whether each layer is trained, in the order of :func:`iterate_layers`. Classes of a notebook don't save it."""

    @classmethod
    def save(cls, model: keras.Model) -> SavedModel:
        """Save a model. Raises ValueError if its variables don't exist yet."""
        if not model.built:
            raise ValueError(
                f"{model.name} has no variables yet, as it doesn't know the shape of its inputs. Call it once on a "
                "batch, or give keras.Input(shape) as its first layer"
            )
        try:
            # unpickles: nothing, it returns names and numbers
            config = keras.saving.serialize_keras_object(model)
            config.pop("compile_config", None)  # `CompileOptions` has it, with the classes of a notebook
        except NotImplementedError as error:
            raise ValueError(
                f"Keras can't save the configuration of {type(model).__name__}, from which engines build it. Give the "
                "class get_config(), which returns the arguments of __init__, and let __init__ take **kwargs"
            ) from error
        trainable = [layer.trainable for layer in iterate_layers(model)]
        return cls(config, dict(find_custom_objects(model)), keras.backend.backend(), keras.config.floatx(), trainable)

    def load(self) -> keras.Model:
        """Return a new model with new weights. Raises RuntimeError if Keras runs with another backend here."""
        if keras.backend.backend() != self.backend:
            raise RuntimeError(
                f"the model was made with Keras's {self.backend} backend, and Keras runs with "
                f"{keras.backend.backend()} in this process, which can't change it any more. Start a new cluster, and "
                f"let nothing on its engines import Keras with KERAS_BACKEND={keras.backend.backend()}"
            )
        keras.config.set_floatx(self.floatx)
        with keras.saving.custom_object_scope(dict(self.custom_objects)):
            try:
                # unpickles: Keras's own configuration, without lambda layers (its safe mode)
                model: keras.Model = keras.saving.deserialize_keras_object(copy.deepcopy(dict(self.config)))
            except (TypeError, ValueError) as error:
                cause = next((line for line in reversed(str(error).splitlines()) if line.strip()), str(error))
                if "`Lambda` layer" in cause:
                    raise ValueError(
                        f"{self.config['config'].get('name', 'the model')} has a Lambda layer of Python code, which "
                        "Keras rebuilds in no other process. Write a subclass of keras.Layer instead"
                    ) from None
                raise ValueError(
                    f"Keras can't rebuild {self.config['class_name']} from its configuration: {cause}. Let __init__ "
                    "take **kwargs and pass them to super().__init__, and give the class get_config()"
                ) from None
        self._set_trainable(model)
        return model

    def _set_trainable(self, model: keras.Model) -> None:
        """Freeze the layers that are frozen in the saved model. Other layers are found by `copy_weights`."""
        layers = list(iterate_layers(model))
        for layer, trainable in zip(layers, self.trainable, strict=False):
            if layer.trainable != trainable:
                layer.trainable = trainable  # also that of its own layers, which follow


def copy_weights(source: keras.Model, target: keras.Model) -> None:
    """Copy all variables. Raises ValueError if the models' variables differ."""
    variables, copies = list_variables(source), list_variables(target)
    if [(v.shape, v.trainable) for v in variables] != [(v.shape, v.trainable) for v in copies]:
        raise ValueError(
            f"{source.name} has {len(variables)} variables, and its configuration makes {len(copies)} or others. Give "
            "its class get_config() and build(), as keras.saving asks for"
        )
    for variable, copied in zip(variables, copies, strict=True):
        copied.assign(variable.value)
    finalize(target)


def finalize(model: keras.Model) -> bool:
    """Let layers such as Normalization copy the values of their variables again. Return whether there are any."""
    keeping_copies = [layer for layer in iterate_layers(model) if hasattr(layer, "finalize_state")]
    for layer in keeping_copies:
        layer.finalize_state()
    return bool(keeping_copies)


def list_variables(model: keras.Model) -> list[Any]:
    """Return a model's variables, trainable ones first."""
    return [*model.trainable_variables, *model.non_trainable_variables]


def find_custom_objects(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yield (name, class) of the layers with a custom class."""
    for layer in iterate_layers(model):
        if is_custom(type(layer)):
            yield type(layer).__name__, type(layer)


def iterate_layers(model: keras.Model) -> Iterator[keras.Layer]:
    """Yield a model and all of its layers, at any depth, once each."""
    pending, seen = [model], set()
    while pending:
        layer = pending.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer
            pending += [value for value in _iterate_attributes(layer) if isinstance(value, keras.Layer)]


def _iterate_attributes(layer: keras.Layer) -> Iterator[Any]:
    yield from getattr(layer, "layers", ())
    for value in vars(layer).values():
        if isinstance(value, keras.Layer):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
