"""Callbacks for Keras's `fit` on engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from dtkit.engine.observe.call_output import log

if TYPE_CHECKING:
    from collections.abc import Mapping


class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Callback that passes the logs of every `every`-th batch to `dtkit.log`, so that the notebook shows them."""

    def __init__(self, every: int = 1) -> None:
        """Raises ValueError unless `every` is at least 1."""
        super().__init__()
        if every < 1:
            raise ValueError(f"every={every}; it must be at least 1")
        self._every = every

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Log a batch."""
        if batch % self._every == 0:
            log(**{name: float(value) for name, value in (logs or {}).items()})
