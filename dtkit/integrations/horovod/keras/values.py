"""Operations on arrays and numbers outside of graphs, and loading of models with distributed optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from dtkit.integrations.horovod.reductions import Average
from dtkit.integrations.horovod.tensorflow import operations
from dtkit.integrations.horovod.tensorflow.compression import Compression
from dtkit.integrations.horovod.tensorflow.optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.integrations.horovod.compression import Compressor


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
) -> np.ndarray:
    """Reduce an array or a number over all ranks, and return the result on each."""
    return _to_numpy(
        operations.allreduce(
            value,
            average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> np.ndarray:
    """Return all ranks' arrays, concatenated."""
    return _to_numpy(operations.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> np.ndarray:
    """Return the array of rank `root_rank`."""
    return _to_numpy(operations.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> np.ndarray:
    """Reduce an array over all ranks, and return this rank's part of its rows."""
    return _to_numpy(operations.reducescatter(value, op=op, name=name))


def _to_numpy(tensor: Any) -> np.ndarray:
    return np.asarray(tensor)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] = (),
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a Keras model, and let its optimizer reduce gradients over all ranks. The optimizer's state is kept."""
    del legacy_opts
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is None:
        return model
    old = model.optimizer
    model.optimizer = DistributedOptimizer(old, compression=compression)
    if old.built:
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, old.variables, strict=True):
            variable.assign(value)
    return model
