"""Horovod's interface for Keras 3 with the tensorflow backend: ``import dtkit.integrations.horovod.keras as hvd``.

It stands for both ``horovod.keras`` and ``horovod.tensorflow.keras``. Its operations take and return numpy arrays.
"""

from dtkit.integrations.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from dtkit.integrations.horovod.exceptions import HorovodInternalError
from dtkit.integrations.horovod.keras import callbacks, elastic
from dtkit.integrations.horovod.keras.values import allgather, allreduce, broadcast, load_model, reducescatter
from dtkit.integrations.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from dtkit.integrations.horovod.reductions import Adasum, Average, Max, Min, Product, Sum
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
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
