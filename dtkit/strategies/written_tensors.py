"""Tensors that a user's step writes by itself, kept equal on ranks that run fewer micro-batches than others, or none.

Frozen parameters are such tensors, for example those of a momentum teacher. So are buffers that count, such as the
number of batches that a batch normalization has seen. Buffers of floating-point numbers are often statistics of a
rank's samples: those are averaged when the model is looked at. But a buffer may follow from the number of steps alone,
as a temperature does. Then all ranks have the same before a step, and ranks with as many micro-batches after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dtkit.engine.state.checksum import compute_checksum
from dtkit.engine.state.dtensor_shards import get_local_tensor
from dtkit.strategies.module_numbers import assign_numbers, compute_number_checksum, follow_numbers, list_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.strategies.module_numbers import Number


@contextlib.contextmanager
def share(
    frozen_parameters: Sequence[torch.Tensor],
    model: torch.nn.Module,
    forwards: Sequence[int],
    context: WorkerContext,
    group: Group | None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """Within the context, user code runs. Afterwards all ranks have what a rank with most forward passes wrote.

    `forwards` are their numbers by shard. `process_group` has the ranks with the same part of the model; without, all
    ranks have the same part. A collective at the end.
    """
    if group is None or len(set(forwards)) == 1:
        yield
        return
    before, numbers = _compute_checksums(_list_statistics(model)), list_numbers(model)
    yield
    statistics = _list_statistics(model)
    tensors = [get_local_tensor(t) for t in (*frozen_parameters, *_list_counters(model), *statistics)]
    if len(statistics) != len(before):  # a step may register buffers
        tensors, before = [], []
    num_forwards = sum(forwards[s] for s in context.shards)
    _equalize(_Written(model, tensors, before, numbers, num_forwards), context, group, process_group)


def equalize_counters(
    model: torch.nn.Module, num_forwards: int, numbers: Mapping[str, Number], context: WorkerContext, group: Group
) -> None:
    """Give all ranks the counters of a rank with most forward passes. A collective.

    `numbers` are the plain numbers when all ranks were equal.
    """
    _equalize(_Written(model, _list_counters(model), [], numbers, num_forwards), context, group, None)


def copy_counters(source: torch.nn.Module, model: torch.nn.Module) -> None:
    """Give a model the counters of another one of its kind."""
    for counter, value in zip(_list_counters(model), _list_counters(source), strict=True):
        counter.copy_(value)
    assign_numbers(model, {name: value for name, value in list_numbers(source).items() if type(value) is int})


@dataclasses.dataclass(frozen=True)
class _Written:
    """What this rank may have written."""

    model: torch.nn.Module
    tensors: Sequence[torch.Tensor]
    before: Sequence[int]
    """Earlier checksums of the last tensors, which stay where they follow from more than the passes."""
    numbers: Mapping[str, Number]
    """Earlier plain numbers."""
    num_forwards: int


def _equalize(written: _Written, context: WorkerContext, group: Group, process_group: dist.ProcessGroup | None) -> None:
    """Give all ranks the tensors and numbers of a rank with most forward passes."""
    context.phases.enter("sync")
    rank = group.rank if process_group is None else dist.get_rank(process_group)
    size = group.world_size if process_group is None else process_group.size()
    facts = torch.zeros(size, 3, dtype=torch.int64)
    facts[rank] = torch.tensor(
        [written.num_forwards, len(written.tensors), compute_number_checksum(written.model)], dtype=torch.int64
    )
    forwards, lengths, number_checksums = group.all_reduce(facts.to(context.device), process_group).cpu().unbind(1)
    has_most = forwards == forwards.max()
    index = int(forwards.argmax())
    source = index if process_group is None else dist.get_global_rank(process_group, index)
    if lengths[0] and bool((lengths == lengths[0]).all()):
        differs = _compare(written, rank, has_most, context, group, process_group)
        chosen = [tensor for tensor, is_chosen in zip(written.tensors, differs, strict=True) if is_chosen]
        own = chosen if rank == index else None
        received = group.broadcast_tensors(own, source, context.device, process_group) if chosen else ()
        for tensor, value in zip(chosen, received, strict=True):
            tensor.detach().copy_(value)
    if bool((number_checksums != number_checksums[0]).any()):
        follow_numbers(
            written.model,
            written.numbers,
            source,
            has_most=bool(has_most[rank]),
            group=group,
            process_group=process_group,
        )


def _compare(
    written: _Written,
    rank: int,
    has_most: torch.Tensor,
    context: WorkerContext,
    group: Group,
    process_group: dist.ProcessGroup | None,
) -> list[bool]:
    """Return for each tensor whether ranks have to take that of the first rank with most passes. A collective."""
    num_before = len(written.before)
    table = torch.zeros(len(has_most), num_before + len(written.tensors), dtype=torch.int64)
    table[rank] = torch.tensor([*written.before, *_compute_checksums(written.tensors)])
    table = group.all_reduce(table.to(context.device), process_group).cpu()
    earlier, later = table[:, :num_before], table[:, num_before:]
    first = later[has_most][0]
    differs = (later != first).any(0)
    num_counters = len(written.tensors) - num_before
    follows = (earlier == earlier[0]).all(0) & (later[has_most] == first).all(0)[num_counters:]
    differs[num_counters:] &= follows
    return [bool(d) for d in differs]


def _compute_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [compute_checksum([tensor]) for tensor in tensors]


def _list_counters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return buffers of whole numbers and flags."""
    modules = [module for module in model.modules() if _weighs_by_steps(module)]
    return [b for module in modules for b in module.buffers(recurse=False) if not _is_real(b)]


def _list_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the other buffers."""
    modules = [module for module in model.modules() if _weighs_by_steps(module)]
    return [b for module in modules for b in module.buffers(recurse=False) if _is_real(b)]


def _weighs_by_steps(module: torch.nn.Module) -> bool:
    """Whether this is not a batch normalization with momentum=None, whose count weighs a rank's own batches."""
    return getattr(module, "momentum", 0.0) is not None


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@contextlib.contextmanager
def preserve_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restore batch statistics and other buffers after a forward pass, also those that it replaces by other tensors.

    Writes to `data`, which autograd doesn't track, since later backward passes may hold the buffers.
    """
    owners = [(owner, name, b) for owner in module.modules() for name, b in owner.named_buffers(recurse=False)]
    values = [b.clone() for _, _, b in owners]
    yield
    for (owner, name, buffer), value in zip(owners, values, strict=True):
        buffer.data.copy_(value)
        if getattr(owner, name) is not buffer:
            setattr(owner, name, buffer)
