"""Tensors that a user's step writes by itself, kept equal on ranks without samples, which run no user code.

Frozen parameters are such tensors, for example those of a momentum teacher. So are buffers that count, such as the
number of batches that a batch normalization has seen. Buffers of floating-point numbers are statistics of a rank's
samples: those are averaged when the model is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dtkit.engine.state.checksum import compute_checksum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext


def share(
    frozen_parameters: Sequence[torch.Tensor],
    model: torch.nn.Module,
    counts: Sequence[int],
    context: WorkerContext,
    group: Group | None,
) -> None:
    """Give all ranks the tensors of the rank with most samples, if some rank has none and they differ. A collective."""
    if group is None or all(counts):
        return
    tensors = [*frozen_parameters, *_list_counters(model)]
    if not tensors:
        return
    context.phases.enter("sync")
    checksums = torch.zeros(2, group.world_size, dtype=torch.int64)
    checksums[:, group.rank] = torch.tensor([sum(counts[s] for s in context.shards), compute_checksum(tensors)])
    group.all_reduce(checksums)
    source = int(checksums[0].argmax())
    if (checksums[1] == checksums[1, source]).all():
        return
    own = tensors if group.rank == source else None
    for tensor, value in zip(tensors, group.broadcast_tensors(own, source, context.device), strict=True):
        tensor.detach().copy_(value)


def _list_counters(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield buffers of whole numbers and flags."""
    for module in model.modules():
        # With momentum=None, this count weighs the statistics of a rank's own batches.
        if getattr(module, "momentum", 0.0) is not None:
            yield from (b for b in module.buffers(recurse=False) if not b.is_floating_point() and not b.is_complex())
