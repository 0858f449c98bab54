"""Callbacks for Keras's `fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import torch

from dtkit.integrations.horovod import basics
from dtkit.integrations.horovod.tensorflow.functions import broadcast_variables
from dtkit.integrations.horovod.tensorflow.gradients import get_key
from dtkit.integrations.horovod.torch import allreduce

if TYPE_CHECKING:
    from collections.abc import Callable

    Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Overwrites the model's and the optimizer's variables with those of rank `root_rank`, after the first batch."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """`local_variables`: a variable or several that stay as they are."""
        super().__init__()
        self._root_rank, self._is_done = root_rank, False
        local = [] if local_variables is None else local_variables
        self._local = {get_key(variable) for variable in (local if isinstance(local, (list, tuple)) else [local])}

    def register_local_var(self, var: Any) -> None:
        """Let a variable stay as it is."""
        self._local.add(get_key(var))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast after the first batch."""
        if self._is_done:
            return
        self._is_done = True
        variables = [variable for variable in self.model.variables if get_key(variable) not in self._local]
        broadcast_variables([*variables, *self.model.optimizer.variables], self._root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """Averages the metrics of an epoch over the ranks, each rank with the same weight.

    Put it before callbacks that use metrics, such as ReduceLROnPlateau. With unequal shards use
    :func:`dtkit.integrations.tensorflow.merge_metrics` instead, which is exact.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average in place."""
        if logs:
            names = sorted(logs)
            means = allreduce(torch.tensor([float(logs[name]) for name in names], dtype=torch.float64))
            logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """Sets the learning rate to `initial_lr` times `multiplier` from `start_epoch` to `end_epoch`, without the latter.

    multiplier : a function of the epoch, or a number that is raised to the epochs since `start_epoch`.
    staircase : whether the rate changes only with the epoch. Otherwise it changes with each batch, and epochs are
        fractions.
    momentum_correction : whether the batch after a change uses momentum times new rate over old rate. Keras 3 compiles
        momentum into its graph, so this has an effect only with ``compile(run_eagerly=True)``.
    steps_per_epoch : number of batches; by default the one that `fit` knows.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is None; give the optimizer's learning rate")
        self._initial_lr, self._start, self._end = initial_lr, start_epoch, end_epoch
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._staircase, self._corrects_momentum = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find the number of batches."""
        if not self._staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError("fit doesn't know the number of batches; give the callback steps_per_epoch=")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate."""
        if self._epoch < self._start or (self._end is not None and self._epoch >= self._end):
            return
        if self._staircase and batch == 0:
            self._set_rate(self._epoch)
        elif not self._staircase:
            self._set_rate(self._epoch + batch / (self.steps_per_epoch or 1))

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self._initial_lr * self._multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if momentum and self._corrects_momentum and old:
            self._momentum = momentum
            optimizer.momentum = momentum * new / old

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Restore the momentum."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to `initial_lr` in the first epochs (Goyal et al. 2017)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiply(epoch: float) -> float:
            progress = (epoch + 1 / (self.steps_per_epoch or 1)) / warmup_epochs
            return (1 + (basics.size() - 1) * progress) / basics.size()

        super().__init__(initial_lr, multiply, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._num_epochs, self._verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the rate, and report the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self._num_epochs - 1 and self._verbose and basics.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the learning rate has reached {rate:g}")  # noqa: T201 - as Keras does
