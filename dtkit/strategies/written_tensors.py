"""Tensors that a user's step writes by itself, kept equal on ranks that run fewer micro-batches than others, or none.

Frozen parameters are such tensors, for example those of a momentum teacher. So are buffers that count, such as the
number of batches that a batch normalization has seen. Buffers of floating-point numbers are often statistics of a
rank's samples: those are averaged when the model is looked at. But a buffer may follow from the number of steps alone,
as a temperature does. Then all ranks have the same before a step, and ranks with as many micro-batches after it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dtkit.engine.state.checksum import compute_checksum
from dtkit.engine.state.dtensor_shards import get_local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext


@contextlib.contextmanager
def share(
    frozen_parameters: Sequence[torch.Tensor],
    model: torch.nn.Module,
    forwards: Sequence[int],
    context: WorkerContext,
    group: Group | None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """Within the context, user code runs. Afterwards all ranks have what the rank with most forward passes wrote.

    `forwards` are their numbers by shard. `process_group` has the ranks with the same part of the model; without, all
    ranks have the same part. A collective at the end.
    """
    if group is None or len(set(forwards)) == 1:
        yield
        return
    before = _compute_checksums(_list_statistics(model))
    yield
    statistics = _list_statistics(model)
    tensors = [get_local_tensor(t) for t in (*frozen_parameters, *_list_counters(model), *statistics)]
    if len(statistics) != len(before) or not tensors:  # a step may register buffers
        return
    num_forwards = sum(forwards[s] for s in context.shards)
    _equalize(tensors, before, num_forwards, context, group, process_group)


def equalize_counters(model: torch.nn.Module, num_forwards: int, context: WorkerContext, group: Group) -> None:
    """Give all ranks the counters of the rank with most forward passes. A collective."""
    if counters := _list_counters(model):
        _equalize(counters, [], num_forwards, context, group, None)


def copy_counters(source: torch.nn.Module, model: torch.nn.Module) -> None:
    """Give a model the counters of another one of its kind."""
    for counter, value in zip(_list_counters(model), _list_counters(source), strict=True):
        counter.copy_(value)


def _equalize(
    tensors: Sequence[torch.Tensor],
    before: Sequence[int],
    num_forwards: int,
    context: WorkerContext,
    group: Group,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Give all ranks the tensors of the rank with most forward passes.

    `before` are earlier checksums of the last tensors, which stay where they follow from more than the passes.
    """
    context.phases.enter("sync")
    rank = group.rank if process_group is None else dist.get_rank(process_group)
    size = group.world_size if process_group is None else process_group.size()
    facts = torch.zeros(size, 1 + len(before) + len(tensors), dtype=torch.int64)
    facts[rank] = torch.tensor([num_forwards, *before, *_compute_checksums(tensors)])
    facts = group.all_reduce(facts.to(context.device), process_group).cpu()
    forwards, earlier, later = facts[:, 0], facts[:, 1 : 1 + len(before)], facts[:, 1 + len(before) :]
    source = int(forwards.argmax())
    differs = (later != later[source]).any(0)
    num_counters = len(tensors) - len(before)
    has_most = forwards == forwards[source]
    follows = (earlier == earlier[0]).all(0) & (later[has_most] == later[source]).all(0)[num_counters:]
    differs[num_counters:] &= follows
    chosen = [tensor for tensor, is_chosen in zip(tensors, differs.tolist(), strict=True) if is_chosen]
    if not chosen:
        return
    own = chosen if rank == source else None
    src = source if process_group is None else dist.get_global_rank(process_group, source)
    for tensor, value in zip(chosen, group.broadcast_tensors(own, src, context.device, process_group), strict=True):
        tensor.detach().copy_(value)


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
