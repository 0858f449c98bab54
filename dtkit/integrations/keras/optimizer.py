"""A Keras optimizer as a torch optimizer, so that schedules, checkpoints and repairs work on it.

Its state consists of Keras's variables. Those that belong to a parameter (momentum, for example) have its shape. All
others belong to the whole optimizer, and are stored with the first parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import keras
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.integrations.keras.module import KerasModule

_WHOLE = "whole/"


class KerasOptimizer(torch.optim.Optimizer):
    """Optimizer of Keras for the variables of a module."""

    def __init__(self, module: KerasModule, optimizer: keras.optimizers.Optimizer) -> None:
        self._module, self.keras_optimizer = module, optimizer
        optimizer.build(module.trainable)
        self._slots = _OptimizerState(list(module.parameters()), module.trainable, optimizer)
        lr = _read(optimizer.learning_rate)
        self._has_own_schedule = has_own_schedule(optimizer)
        super().__init__([{"params": list(module.parameters())}], {"lr": lr})

    @property  # type: ignore[override]  # a view of Keras's variables
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """State of all parameters."""
        return self._slots

    @state.setter
    def state(self, _value: Any) -> None:
        """Do nothing: Keras holds the state."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        assert closure is None
        (group,) = self.param_groups
        if not self._has_own_schedule:
            self.keras_optimizer.learning_rate = float(group["lr"])
        self._module.apply_gradients(self.keras_optimizer)
        if self._has_own_schedule:
            group["lr"] = _read(self.keras_optimizer.learning_rate)


class _OptimizerState(MutableMapping[torch.Tensor, Any]):
    """View of an optimizer's variables as {parameter: {name: tensor}}. Assignments copy into the variables."""

    def __init__(self, parameters: list[torch.Tensor], variables: list[Any], optimizer: Any) -> None:
        self._by_parameter: dict[torch.Tensor, dict[str, Any]] = {p: {} for p in parameters}
        prefixes = {f"{variable.path.replace('/', '_')}_": p for variable, p in zip(variables, parameters, strict=True)}
        learning_rate = optimizer.learning_rate
        for variable in optimizer.variables:
            if variable is learning_rate:
                continue
            name = variable.path.rpartition("/")[2]
            prefix = max((known for known in prefixes if name.startswith(known)), key=len, default=None)
            if prefix is None:
                self._by_parameter[parameters[0]][_WHOLE + name] = variable
            else:
                self._by_parameter[prefixes[prefix]][name.removeprefix(prefix)] = variable

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        return {
            name: torch.tensor(keras.ops.convert_to_numpy(variable)) for name, variable in self._by_parameter[p].items()
        }

    def __setitem__(self, p: torch.Tensor, values: dict[str, Any]) -> None:
        for name, variable in self._by_parameter[p].items():
            if name in values:
                value = torch.as_tensor(values[name]).detach().cpu().numpy()
                variable.assign(keras.ops.cast(keras.ops.convert_to_tensor(value), variable.dtype))

    def __delitem__(self, p: torch.Tensor) -> None:
        """Do nothing: the variables stay until others are set."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (p for p, variables in self._by_parameter.items() if variables)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def has_own_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether a schedule of Keras, or a function, gives the learning rate."""
    return not hasattr(optimizer.learning_rate, "assign")


def _read(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
