"""Horovod's interface for TensorFlow 2: ``import dtkit.integrations.horovod.tensorflow as hvd``.

See :mod:`dtkit.integrations.horovod.torch`, whose operations it uses.
"""

from dtkit.integrations.horovod import names
from dtkit.integrations.horovod.names import *  # noqa: F403 - it is the interface
from dtkit.integrations.horovod.tensorflow import elastic
from dtkit.integrations.horovod.tensorflow.compression import Compression
from dtkit.integrations.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from dtkit.integrations.horovod.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from dtkit.integrations.horovod.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from dtkit.integrations.horovod.tensorflow.optimizer import DistributedOptimizer
from dtkit.integrations.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += names.__all__
