"""A Keras optimizer as a torch optimizer, so that schedules, checkpoints and repairs work on it.

Its state consists of Keras's variables. Those that belong to a parameter (momentum, for example) have its shape. All
others belong to the whole optimizer, and are stored with the first parameter.

A schedule of Keras computes the rate by itself. A new rate that the user sets scales it, as it scales torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import keras
import torch

from dtkit._util.torch_private import get_keras_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.integrations.keras.module import KerasModule

_WHOLE = "whole/"


class KerasOptimizer(torch.optim.Optimizer):
    """Optimizer of Keras for the variables of a module."""

    def __init__(
        self, module: KerasModule, optimizer: keras.optimizers.Optimizer, undecayed: Sequence[int] = ()
    ) -> None:
        """Create an optimizer. `undecayed` are the numbers of the variables that weight decay leaves out."""
        self._module, self.keras_optimizer = module, optimizer
        if undecayed:
            optimizer.exclude_from_weight_decay(var_list=[module.trainable[k] for k in undecayed])
        optimizer.build(module.trainable)
        self._schedule = ScaledSchedule.wrap(optimizer) if has_own_schedule(optimizer) else None
        variables = [*optimizer.variables, *([] if self._schedule is None else self._schedule.variables)]
        self._slots = _OptimizerState(list(module.parameters()), module.trainable, optimizer, variables)
        self._known_lr = lr = _read(optimizer.learning_rate)
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
        if self._schedule is None:
            self.keras_optimizer.learning_rate = float(group["lr"])
        elif group["lr"] != self._known_lr:  # it was set, or the state is another one
            self._schedule.scale_to(float(group["lr"]), self.keras_optimizer)
        self._module.apply_gradients(self.keras_optimizer)
        if self._schedule is not None:
            self._schedule.end_step()
            self._known_lr = group["lr"] = _read(self.keras_optimizer.learning_rate)


class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # keras has no types
    """A schedule of Keras, or a function without arguments, times a factor."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._factor = keras.Variable(1.0, trainable=False, dtype="float64", name="lr_factor")
        self._extra = keras.Variable(0.0, trainable=False, dtype="float64", name="lr_extra")
        """Rate of the next update where the schedule is at 0, which no factor changes."""

    @classmethod
    def wrap(cls, optimizer: keras.optimizers.Optimizer) -> ScaledSchedule:
        """Let an optimizer take its rate from a scaled copy of its schedule."""
        schedule = cls(get_keras_schedule(optimizer))
        optimizer.learning_rate = schedule
        return schedule

    @property
    def variables(self) -> list[Any]:
        """State."""
        return [self._factor, self._extra]

    def __call__(self, step: Any) -> Any:
        """Return the rate of an update."""
        is_schedule = isinstance(self._schedule, keras.optimizers.schedules.LearningRateSchedule)
        rate = keras.ops.convert_to_tensor(self._schedule(step) if is_schedule else self._schedule())
        factor, extra = (keras.ops.cast(variable.value, rate.dtype) for variable in self.variables)
        return rate * factor + extra

    def scale_to(self, lr: float, optimizer: keras.optimizers.Optimizer) -> None:
        """Scale the schedule so that the next update has this rate. No-op if it has."""
        if lr == _read(optimizer.learning_rate):
            return
        before = _read(self._factor)
        self._factor.assign(1.0)
        self._extra.assign(0.0)
        unscaled = _read(optimizer.learning_rate)
        self._factor.assign(lr / unscaled if unscaled else before)
        self._extra.assign(0.0 if unscaled else lr)
        if not unscaled:
            print(f"lr={lr:g} holds for one update: the schedule is at 0 there, which can't be scaled")  # noqa: T201

    def end_step(self) -> None:
        """Follow the schedule again after an update where it was at 0."""
        if _read(self._extra):
            self._extra.assign(0.0)

    def get_config(self) -> dict[str, Any]:
        """Return the schedule."""
        return {"schedule": self._schedule}


class _OptimizerState(MutableMapping[torch.Tensor, Any]):
    """View of an optimizer's variables as {parameter: {name: tensor}}. Assignments copy into the variables."""

    def __init__(
        self, parameters: list[torch.Tensor], trainable: list[Any], optimizer: Any, variables: list[Any]
    ) -> None:
        self._by_parameter: dict[torch.Tensor, dict[str, Any]] = {p: {} for p in parameters}
        prefixes = {f"{variable.path.replace('/', '_')}_": p for variable, p in zip(trainable, parameters, strict=True)}
        learning_rate = optimizer.learning_rate
        for variable in variables:
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
