"""Operations that wait for their result, and that autograd can differentiate.

Gradients are Horovod's: those of an all-gather and of a broadcast are averaged over the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit.integrations.horovod.collectives import BarrierOperation, Join
from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.reductions import Average, Sum, resolve_op
from dtkit.integrations.horovod.torch.asynchronous import (
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    synchronize,
)
from dtkit.integrations.horovod.torch.compression import Compression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.horovod.compression import Compressor

Options = dict[str, Any]
"""Keyword arguments of an asynchronous operation."""


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _AllReduce(torch.autograd.Function):
    """Reduction of one or several tensors. Its gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, name: str | None, options: Options, *tensors: torch.Tensor) -> Any:
        ctx.options = options
        return synchronize(grouped_allreduce_async(tensors, name=name, **options))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_apply(_AllReduce, None, ctx.options, *gradients)


class _AllGather(torch.autograd.Function):
    """Concatenation of one or several tensors over the ranks."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.lengths, ctx.process_set = [len(tensor) for tensor in tensors], process_set
        return synchronize(grouped_allgather_async(tensors, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        averages = _apply(_AllReduce, None, {"op": Average, "process_set": ctx.process_set}, *gradients)
        rows = allgather(torch.tensor([ctx.lengths]), process_set=ctx.process_set)
        starts = rows[: ctx.process_set.rank()].sum(dim=0).tolist()
        parts = zip(averages, starts, ctx.lengths, strict=True)
        return None, None, *(average.narrow(0, start, length) for average, start, length in parts)


class _Broadcast(torch.autograd.Function):
    """Copy of one rank's tensor; only that rank gets the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        average = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        is_root = get_context().rank == ctx.root_rank
        return average if is_root else torch.zeros_like(average), None, None, None


class _AllToAll(torch.autograd.Function):
    """Exchange of rows. Gradients travel back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.length = received, process_set, len(tensor)
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        returned, _ = _apply(_AllToAll, gradients[0], ctx.received, None, ctx.process_set)
        missing = ctx.length - len(returned)  # rows that no rank received
        padded = torch.cat([returned, returned.new_zeros(missing, *returned.shape[1:])]) if missing else returned
        return padded, None, None, None


class _ReduceScatter(torch.autograd.Function):
    """Reduction of one or several tensors, after which each rank keeps a part."""

    @staticmethod
    def forward(ctx: Any, name: str | None, options: Options, *tensors: torch.Tensor) -> Any:
        ctx.options = options
        return synchronize(grouped_reducescatter_async(tensors, name, **options))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        options = ctx.options
        factor = options["prescale_factor"] * options["postscale_factor"]
        if options["op"] == Sum:
            factor *= options["process_set"].size()
        scaled = [gradient * factor if factor != 1.0 else gradient for gradient in gradients]
        return None, None, *_apply(_AllGather, None, options["process_set"], *scaled)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and return the result on each; the input keeps its values.

    average : old name for op=Average (True) or op=Sum (False).
    compression : `Compression.none` or `Compression.fp16`.
    op : Average (default), Sum, Min, Max or Product.
    prescale_factor, postscale_factor : numbers that multiply the tensor before and after.
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in one operation, as :func:`allreduce` does one."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    options: Options = {
        "op": resolve_op(op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    reduced = _apply(_AllReduce, name, options, *(tensor for tensor, _ in compressed))
    return _decompress(compression, reduced, compressed)


def _decompress(compression: type[Compressor], tensors: Any, compressed: Sequence[tuple[Any, Any]]) -> list[Any]:
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(tensors, compressed, strict=True)]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place, as :func:`allreduce` does, without a gradient."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce several tensors in place, in one operation."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors, concatenated along the first dimension, which may differ between ranks."""
    return _apply(_AllGather, name, process_set, tensor)[0]  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Concatenate several tensors in one operation, as :func:`allgather` does one."""
    return _apply(_AllGather, name, process_set, *tensors)  # type: ignore[no-any-return]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of rank `root_rank`, a number in the whole group, on every rank."""
    return _apply(_Broadcast, tensor, root_rank, name, process_set)  # type: ignore[no-any-return]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite the tensor with that of rank `root_rank`."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first ``splits[0]`` rows to rank 0, the next ``splits[1]`` to rank 1, and so on.

    Return the rows that this rank received, in rank order. With `splits`, return (rows, number of rows from each rank).
    Without, each rank gets an equal part.
    """
    rows, received = _apply(_AllToAll, tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and return this rank's part of the rows.

    If the rows can't be shared equally, the first ranks get one more.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors, as :func:`reducescatter` does one."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    options: Options = {
        "op": resolve_op(op),
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    reduced = _apply(_ReduceScatter, name, options, *(tensor for tensor, _ in compressed))
    return _decompress(compression, reduced, compressed)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this function."""
    context = get_context()
    worker = context.get_worker(process_set.process_set_id)
    # waits: a collective, limited by the process group's timeout
    worker.submit(BarrierOperation(), context.make_name(BarrierOperation.kind, None)).wait()


def join(device: int = -1) -> int:
    """Report that this rank has no more data; return the rank that reported last, once all have.

    Until then, this rank takes part in the others' sums and averages with zeros, and counts as a rank there. Other
    operations of those ranks raise HorovodInternalError. `device` is ignored: zeros are on the same kind of device as
    the others' tensors.
    """
    del device
    context = get_context()
    # waits: until the other ranks join, with operations that have limits of their own
    return int(context.get_worker(0).submit(Join(), context.make_name(Join.kind, None)).wait())
