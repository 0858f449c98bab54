"""Operations that return a handle at once. `poll` returns whether one has ended, and `synchronize` returns its result.

Names identify operations in errors; an operation without a name gets a number. Under ``HOROVOD_CHECK=1``, operations
are matched by name, in any order. Otherwise all ranks must call the same functions in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.formatting import name_type
from dtkit.integrations.horovod.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.reductions import Average, resolve_op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.integrations.horovod.worker import Handle


def _submit(
    collective: Collective,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Any], Any] = lambda results: results[0],
) -> Handle:
    context = get_context()
    worker = context.get_worker(process_set.process_set_id)
    return worker.submit(collective, context.make_name(collective.kind, name), finish)


def _check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"got {name_type(tensor)}; give a torch.Tensor, as in torch.tensor(value)")
        if tensor.is_sparse:
            raise ValueError("got a sparse tensor; use sparse_allreduce_async, or tensor.to_dense()")
    if len({tensor.device.type for tensor in tensors}) > 1:
        raise ValueError("the tensors of one group are on CPUs and GPUs; move them to one type of device")


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a reduction of a tensor over all ranks, into a new tensor. See :func:`allreduce`."""
    _check_tensors([tensor])
    resolved = resolve_op(op, average)
    output = torch.empty_like(tensor, requires_grad=False)
    return _submit(AllReduce([tensor], [output], resolved, prescale_factor, postscale_factor), name, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a reduction in place. Don't use the tensor before `synchronize` returns it."""
    _check_tensors([tensor])
    resolved = resolve_op(op, average)
    return _submit(AllReduce([tensor], [tensor], resolved, prescale_factor, postscale_factor), name, process_set)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start one reduction of several tensors, into new tensors. Its result is a tuple."""
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    return _start_group(tensors, outputs, name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start one reduction of several tensors in place. Its result is a tuple."""
    return _start_group(tensors, tensors, name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)


def _start_group(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle:
    _check_tensors(tensors)
    return _submit(AllReduce(tensors, outputs, op, prescale, postscale), name, process_set, tuple)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start a sum or an average of sparse tensors; return a function that waits and returns the sparse result.

    Indices and values are gathered, so until it is coalesced, the result has an index once for each rank that has it.
    """
    resolved = resolve_op(op)
    coalesced = tensor.detach().coalesce()
    base = get_context().make_name("sparse_allreduce", name)
    indices = allgather_async(coalesced.indices().t().contiguous(), f"{base}.indices", process_set)
    values = allgather_async(coalesced.values(), f"{base}.values", process_set)

    def wait() -> torch.Tensor:
        gathered = synchronize(values)
        if resolved == Average:
            gathered = gathered / len(process_set.ranks or ())
        return torch.sparse_coo_tensor(synchronize(indices).t(), gathered, coalesced.shape, device=coalesced.device)

    return wait


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a concatenation of the ranks' tensors. See :func:`allgather`."""
    _check_tensors([tensor])
    return _submit(AllGather([tensor]), name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start concatenations of several tensors. The result is a tuple."""
    _check_tensors(tensors)
    return _submit(AllGather(tensors), name, process_set, tuple)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a copy of a rank's tensor to all ranks, into a new tensor. See :func:`broadcast`."""
    _check_tensors([tensor])
    return _submit(Broadcast(tensor, torch.empty_like(tensor, requires_grad=False), root_rank), name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a copy of a rank's tensor over the other ranks' tensors."""
    _check_tensors([tensor])
    return _submit(Broadcast(tensor, tensor, root_rank), name, process_set)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an exchange of rows. The result is (rows, number of rows from each rank). See :func:`alltoall`."""
    _check_tensors([tensor])
    counts = _count_rows(tensor, splits, len(process_set.ranks or ()))
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def finish(result: tuple[torch.Tensor, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = result
        return rows, torch.tensor(received, dtype=torch.int32, device=device)

    return _submit(AllToAll(tensor, counts), name, process_set, finish)


def _count_rows(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    """Return the number of rows for each rank."""
    if tensor.dim() == 0:
        raise ValueError("an alltoall of a tensor without dimensions has no rows; use tensor.reshape(1)")
    if splits is None:
        if len(tensor) % size:
            raise ValueError(
                f"the first dimension is {len(tensor)}, which {size} ranks can't share equally; give splits, the "
                "number of rows for each rank"
            )
        return [len(tensor) // size] * size
    if isinstance(splits, torch.Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"splits are {splits.dtype}; use torch.int32")
    counts = [int(count) for count in (splits.tolist() if isinstance(splits, torch.Tensor) else splits)]
    if len(counts) != size or min(counts, default=0) < 0 or sum(counts) > len(tensor):
        raise ValueError(
            f"splits are {counts}; give {size} counts of at least 0, whose sum is at most {len(tensor)}, the first "
            "dimension"
        )
    return counts


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reduction after which each rank has its part of the rows. See :func:`reducescatter`."""
    _check_tensors([tensor])
    collective = ReduceScatter([tensor], resolve_op(op), prescale_factor, postscale_factor)
    return _submit(collective, name, process_set)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start such reductions of several tensors. The result is a tuple."""
    _check_tensors(tensors)
    collective = ReduceScatter(tensors, resolve_op(op), prescale_factor, postscale_factor)
    return _submit(collective, name, process_set, tuple)


def poll(handle: Handle) -> bool:
    """Return whether an operation has ended, so that `synchronize` won't wait."""
    return handle.is_done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result. Raises HorovodInternalError if it failed on a rank."""
    # waits: a collective, limited by the process group's timeout
    return handle.wait()
