"""A Keras model as a torch module: its trainable variables are parameters, the others are buffers.

So everything that trains torch modules works on it: sums of gradients, checkpoints (with the variables' Keras names),
replacing a lost engine. The module computes the loss itself, as models of Hugging Face do.

Random layers of Keras have seeds of their own. Each step sets these from torch's generator, which differs by rank and
is part of checkpoints.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import TYPE_CHECKING, Any, Self

import cloudpickle
import keras
import torch

from dtkit.integrations.keras.masked_loss import TargetCounter
from dtkit.integrations.keras.rebuild import rebuild
from dtkit.integrations.keras.saved_model import SavedModel, copy_weights, iterate_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.keras.compile_options import CompileOptions

_SEED_SUFFIX = "seed_generator_state"
_MAX_SEED = 2**31 - 1
_NUMBER = re.compile(r"_\d+$")


@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """Output of a model with its loss."""

    loss: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
    """Mean over samples; or (sum, number of targets) for a mean that leaves out some."""
    logits: torch.Tensor


class KerasModule(torch.nn.Module):
    """A copy of a Keras model, as a torch module. Subclasses compute with one backend."""

    weighs_labels = True  # `ModelOutput.loss` has a weight where it is needed
    loss_dtype: str | None = None
    """Type that the backend computes losses in; None for that of the parameters."""

    def __init__(self, saved: SavedModel, options: CompileOptions) -> None:
        super().__init__()
        self.saved, self.options = saved, options
        model = saved.load()
        self.counter = TargetCounter()
        loss = None if options.loss is None else self.counter.watch(options.loss)  # None: the model computes its own
        model.compile(loss=loss, metrics=None, optimizer=None)
        object.__setattr__(self, "keras_model", model)  # not a submodule: its parameters would be listed twice
        self.keras_model: keras.Model
        self.trainable = list(model.trainable_variables)
        self._seeds = [v for v in model.non_trainable_variables if v.path.endswith(_SEED_SUFFIX)]
        self.others = [v for v in model.non_trainable_variables if not v.path.endswith(_SEED_SUFFIX)]
        self._names = _make_names([variable.path for variable in [*self.trainable, *self.others]])
        for name, variable in zip(self._names, self.trainable, strict=False):
            self.register_parameter(name, self._make_parameter(variable))
        for name, variable in zip(self._names[len(self.trainable) :], self.others, strict=True):
            self.register_buffer(name, self._make_buffer(variable))

    @classmethod
    def of(cls, model: keras.Model, options: CompileOptions) -> Self:
        """Return a module with a copy of a Keras model."""
        module = cls(SavedModel.save(model), options)
        copy_weights(model, module.keras_model)
        module.load_values()
        return module

    def load_values(self) -> None:
        """Copy the Keras model's values into parameters and buffers."""

    def _make_parameter(self, variable: Any) -> torch.nn.Parameter:
        """Return the parameter for a trainable variable."""
        raise NotImplementedError

    def _make_buffer(self, variable: Any) -> torch.Tensor:
        """Return the buffer for another variable."""
        raise NotImplementedError

    def compute(self, inputs: Sequence[torch.Tensor], labels: torch.Tensor | None) -> ModelOutput:
        """Return output and loss; without labels no loss."""
        raise NotImplementedError

    def count_targets(self, output: Any) -> Any:
        """Return the number of targets in the last loss; None for all of a batch. Raises ValueError for `add_loss`."""
        count = self.counter.count(output)
        if count is None:
            return None
        num_regularized = sum(variable.regularizer is not None for variable in self.trainable)
        if len(self.keras_model.losses) > num_regularized:
            raise ValueError(
                f"{self.model_name} adds losses (add_loss, activity_regularizer), and masked or ignored targets don't "
                "count in its loss: over ranks, the two means have different weights. Compute both in one loss function"
            )
        return count

    def apply_gradients(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Update the parameters from their gradients, with a Keras optimizer."""
        raise NotImplementedError

    def push(self) -> None:
        """Copy the values of parameters and buffers into the Keras model."""

    @property
    def batch_norm_names(self) -> list[str]:
        """Names of the layers that normalize with the statistics of a batch."""
        kind = keras.layers.BatchNormalization
        return [layer.name for layer in iterate_layers(self.keras_model) if isinstance(layer, kind) and layer.trainable]

    @property
    def model_name(self) -> str:
        """Name of the Keras model."""
        return str(self.keras_model.name)

    def forward(self, *inputs: torch.Tensor, labels: torch.Tensor | None = None) -> ModelOutput:
        """Return output and loss of a batch."""
        if self.training:
            self._draw_seeds()
        return self.compute(inputs, labels)

    def _draw_seeds(self) -> None:
        for variable in self._seeds:
            seed = int(torch.randint(_MAX_SEED, ()))
            variable.assign(keras.ops.cast(keras.ops.convert_to_tensor([seed, 0]), variable.dtype))

    def to_user_model(self) -> keras.Model:
        """Return the Keras model with the current parameters, compiled as the user's model was."""
        self.push()
        options = self.options
        self.keras_model.compile(loss=options.loss, optimizer=options.optimizer or "rmsprop", metrics=options.metrics)
        return self.keras_model

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model and the values of all parameters and buffers."""
        state = {name: value.detach().cpu().clone() for name, value in self.state_dict().items()}
        definition = cloudpickle.dumps((type(self), self.saved, self.options))
        return rebuild, (self.saved.backend, definition, state, self.training)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        function, arguments = self.__reduce__()
        copied: Self = function(*arguments)
        return copied


def weigh(loss: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the loss as in :class:`ModelOutput`; `count` is the number of targets in its mean, None for all."""
    return loss if count is None else (loss * count.to(loss.dtype), count.double())


def _make_names(paths: Sequence[str]) -> list[str]:
    """Return names for variables that are the same for each model of one kind.

    Keras numbers the layers of a process, so a second model would have dense_2 and dense_3. Here each model begins at
    dense.
    """
    renamed: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for layer in dict.fromkeys(part for path in paths for part in path.split("/")[:-1]):
        base = _NUMBER.sub("", layer)
        renamed[layer] = f"{base}_{counts[base]}" if counts[base] else base
        counts[base] += 1
    names = ["/".join([*(renamed[part] for part in path.split("/")[:-1]), path.split("/")[-1]]) for path in paths]
    repeated = collections.Counter(names)
    unique = [f"{name}_{k}" if repeated[name] > 1 else name for k, name in enumerate(names)]
    return [name.replace(".", "_") for name in unique]
