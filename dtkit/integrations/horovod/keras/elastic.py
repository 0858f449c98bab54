"""State of a Keras model for `elastic.run`, and callbacks that keep it up to date in `fit`."""

from __future__ import annotations

from typing import Any

import keras

from dtkit.integrations.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(TensorFlowKerasState):
    """A Keras model, its optimizer and other objects. See :class:`TensorFlowKerasState`."""


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Commits the state after every `batches_per_commit` batches, and after each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit is {batches_per_commit}; it must be at least 1")
        self._state, self._every, self._remaining = state, batches_per_commit, batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start to count, so that all ranks commit after the same batches."""
        self._remaining = self._every

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit if it is due."""
        self._remaining -= 1
        if not self._remaining:
            self._remaining = self._every
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """Keeps `state.batch` at the number of the epoch's last batch; 0 between epochs.

    Keras 3 can't shorten an epoch that a restore has interrupted: pass ``steps_per_epoch`` to `fit` for that.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the batch."""
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin a new epoch."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """Keeps `state.epoch` at the number of completed epochs, over all calls of `fit`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._first_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Remember where this call of `fit` begins."""
        self._first_epoch = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch."""
        self._state.epoch = self._first_epoch + epoch + 1
