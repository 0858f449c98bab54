"""Horovod's interface for Keras 3 with the tensorflow backend: ``import dtkit.integrations.horovod.keras as hvd``.

It stands for both ``horovod.keras`` and ``horovod.tensorflow.keras``. Its operations take and return numpy arrays.
"""

from dtkit.integrations.horovod import names
from dtkit.integrations.horovod.keras import callbacks, elastic
from dtkit.integrations.horovod.keras.values import allgather, allreduce, broadcast, load_model, reducescatter
from dtkit.integrations.horovod.names import *  # noqa: F403 - it is the interface
from dtkit.integrations.horovod.tensorflow.compression import Compression
from dtkit.integrations.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from dtkit.integrations.horovod.tensorflow.operations import barrier, join
from dtkit.integrations.horovod.tensorflow.optimizer import DistributedOptimizer, PartialDistributedOptimizer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
]
__all__ += names.__all__
