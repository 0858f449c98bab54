"""Horovod's interface for PyTorch: ``import dtkit.integrations.horovod.torch as hvd``.

Under ``cluster.torchrun(script, horovod=True)`` an unchanged script gets it as ``horovod.torch``, and `init` forms a
process group. In functions under ``cluster.run``, `init` uses the engines' group.
"""

from dtkit.integrations.horovod import names
from dtkit.integrations.horovod.names import *  # noqa: F403 - it is the interface
from dtkit.integrations.horovod.torch import elastic
from dtkit.integrations.horovod.torch.asynchronous import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from dtkit.integrations.horovod.torch.compression import Compression
from dtkit.integrations.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from dtkit.integrations.horovod.torch.operations import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    join,
    reducescatter,
)
from dtkit.integrations.horovod.torch.optimizer import DistributedOptimizer
from dtkit.integrations.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += names.__all__
