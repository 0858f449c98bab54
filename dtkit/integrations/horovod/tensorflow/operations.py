"""Operations on TensorFlow's tensors, with gradients, in eager mode and in graphs.

Gradients are Horovod's: those of an all-gather and of a broadcast are averaged over the ranks. `device_dense` and
`device_sparse` are accepted for compatibility without effect, since tensors are sent from host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from dtkit.integrations.horovod import basics
from dtkit.integrations.horovod import torch as torch_interface
from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.reductions import Average, Sum, resolve_op
from dtkit.integrations.horovod.tensorflow.bridge import call, is_session_graph, make_name, read_number, read_size
from dtkit.integrations.horovod.tensorflow.compression import Compression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.horovod.compression import Compressor


def _reduce(tensors: Sequence[Any], name: str | None, **options: Any) -> list[Any]:
    """Reduce tensors together. The gradient is reduced in the same way."""
    name = make_name("allreduce", name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # tensorflow has no types
    def run(*tensors: Any) -> Any:
        results = call(
            lambda *values: torch_interface.grouped_allreduce(list(values), name=name, **options),
            tensors,
            [tensor.dtype for tensor in tensors],
        )
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results, lambda *gradients: _reduce(gradients, None, **options)

    return list(run(*map(tf.convert_to_tensor, tensors)))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor, a variable or IndexedSlices over all ranks, and return the result on each.

    average : old name for op=Average (True) or op=Sum (False).
    compression : `Compression.none` or `Compression.fp16`.
    op : Average (default), Sum, Min, Max or Product; Average or Sum for IndexedSlices.
    prescale_factor, postscale_factor : numbers that multiply the tensor before and after.
    """
    if isinstance(tensor, tf.IndexedSlices):
        op = resolve_op(op, average)
        if op not in (Average, Sum) or prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError("IndexedSlices can be summed or averaged only, without factors")
        return _reduce_slices(tensor, op, process_set)
    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    (result,) = grouped_allreduce(
        [tensor], average, compression=compression, op=op, name=name, process_set=process_set, **factors
    )
    return result


def _reduce_slices(slices: Any, op: int, process_set: ProcessSet) -> Any:
    values = allgather(slices.values, process_set=process_set)
    indices = allgather(slices.indices, process_set=process_set)
    if op == Average:
        values = values / read_size(process_set, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Reduce several tensors together, as :func:`allreduce` does each. IndexedSlices are reduced one by one."""
    op = resolve_op(op, average)
    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    options: dict[str, Any] = {"op": op, "process_set": process_set, **factors}
    results = [allreduce(t, **options) if isinstance(t, tf.IndexedSlices) else None for t in tensors]
    dense = [k for k, result in enumerate(results) if result is None]
    compressed = [compression.compress(tf.convert_to_tensor(tensors[k])) for k in dense]
    reduced = _reduce([tensor for tensor, _ in compressed], name, **options) if dense else []
    for k, mean, (_, ctx) in zip(dense, reduced, compressed, strict=True):
        results[k] = compression.decompress(mean, ctx)
    return results


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return all ranks' tensors, concatenated. Their first dimensions may differ."""
    return grouped_allgather([tensor], name, process_set=process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors together, as :func:`allgather` does each."""
    name = make_name("allgather", name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # as above
    def run(*tensors: Any) -> Any:
        results = call(
            lambda *values: torch_interface.grouped_allgather(list(values), name, process_set),
            tensors,
            [tensor.dtype for tensor in tensors],
        )
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape([None, *tensor.shape[1:]])

        def differentiate(*gradients: Any) -> list[Any]:
            averages = grouped_allreduce(gradients, op=Average, process_set=process_set)
            lengths = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors])
            rows = allgather(tf.expand_dims(lengths, 0), process_set=process_set)
            starts = tf.reduce_sum(rows[: process_set.rank()], axis=0)
            return [average[starts[k] : starts[k] + lengths[k]] for k, average in enumerate(averages)]

        return results, differentiate

    return list(run(*map(tf.convert_to_tensor, tensors)))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of rank `root_rank`, the only rank that gets the gradient."""
    name = make_name("broadcast", name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # as above
    def run(tensor: Any) -> Any:
        (result,) = call(
            lambda value: [torch_interface.broadcast(value, root_rank, name, process_set)], [tensor], [tensor.dtype]
        )
        result.set_shape(tensor.shape)

        def differentiate(gradient: Any) -> Any:
            average = allreduce(gradient, op=Average, process_set=process_set)
            if get_context().rank == root_rank:
                return average
            with tf.control_dependencies([average]):  # a session leaves out what its result doesn't need
                return tf.zeros_like(average)

        return result, differentiate

    return run(tf.convert_to_tensor(tensor))


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite variables with those of rank `root_rank`, and return them. A session must run what is returned."""
    assigned = []
    for k, variable in enumerate(variables):
        own_name = None if name is None else f"{name}.{k}"
        assigned.append(variable.assign(broadcast(variable, root_rank, own_name, process_set=process_set)))
    return assigned if is_session_graph() else list(variables)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first ``splits[0]`` rows to the first rank, and so on; return the rows that this rank receives.

    splits : number of rows for each rank; None for equal parts. With it, the function also returns the numbers of
        received rows.
    """
    rows, received = _exchange(tf.convert_to_tensor(tensor), splits, name, process_set)
    return rows if splits is None else (rows, received)


def _exchange(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet) -> tuple[Any, Any]:
    name = make_name("alltoall", name)
    counts = [] if splits is None else [tf.cast(splits, tf.int32)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # as above
    def run(tensor: Any) -> Any:
        def exchange(value: torch.Tensor, *splits: torch.Tensor) -> list[torch.Tensor]:
            handle = torch_interface.alltoall_async(value, splits[0] if splits else None, name, process_set)
            rows, received = torch_interface.synchronize(handle)
            return [rows, received.to(torch.int32)]

        rows, received = call(exchange, [tensor, *counts], [tensor.dtype, tf.int32])
        rows.set_shape([None, *tensor.shape[1:]])
        received.set_shape([None])  # an elastic script may lose ranks

        def differentiate(gradient: Any, _: Any) -> Any:
            return _exchange(gradient, received, None, process_set)[0]

        return (rows, received), differentiate

    rows, received = run(tensor)
    return rows, received


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks, and return this rank's part of its rows. `op` is Average or Sum."""
    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return grouped_reducescatter(
        [tensor], compression=compression, op=op, name=name, process_set=process_set, **factors
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce several tensors together, as :func:`reducescatter` does each."""
    name = make_name("reducescatter", name)
    options: dict[str, Any] = {
        "op": op,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # as above
    def run(*tensors: Any) -> Any:
        results = call(
            lambda *values: torch_interface.grouped_reducescatter(list(values), name=name, **options),
            tensors,
            [tensor.dtype for tensor in tensors],
        )
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape([None, *tensor.shape[1:]])

        def differentiate(*gradients: Any) -> list[Any]:
            factor = prescale_factor * postscale_factor
            scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
            if op == Sum:
                scaled = [gradient * read_size(process_set, gradient.dtype) for gradient in scaled]
            return grouped_allgather(scaled, process_set=process_set)

        return results, differentiate

    compressed = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    results = run(*(tensor for tensor, _ in compressed))
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed, strict=True)]


def join() -> int:
    """Take part in the other ranks' sums with zeros until all have joined; return the rank that joined last."""
    # waits: until the other ranks join, with operations that have limits of their own
    return torch_interface.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks."""
    torch_interface.barrier(process_set)


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank as a tensor."""
    return tf.cast(read_number(basics.rank), tf.int32)


def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank among those of its host, as a tensor."""
    return tf.cast(read_number(basics.local_rank), tf.int32)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set, as a tensor."""
    return tf.cast(read_number(lambda: len(_get_ranks(process_set_id))), tf.int32)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host, as a tensor."""
    return tf.cast(read_number(basics.local_size), tf.int32)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set, 0 if it isn't, as a tensor."""
    return tf.cast(read_number(lambda: int(basics.rank() in _get_ranks(process_set_id))), tf.int32)


def _get_ranks(process_set_id: int) -> list[int]:
    ranks = get_context().set_ranks
    if process_set_id not in ranks:
        raise ValueError(f"process_set_id is {process_set_id}; the registered ones are {', '.join(map(str, ranks))}")
    return ranks[process_set_id]
