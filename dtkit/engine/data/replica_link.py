"""Loading of batches by one rank of each replica, which sends them to the others.

Ranks of a replica (stages of a pipeline, slices of each layer) need the same samples. User code may draw from its own
generator, or read a clock. Then two ranks that load the same rows may get different samples.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from dtkit.engine.comm.process_group import PeerFailedError
from dtkit.engine.data.batch_transfer import build_batch, flatten_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch.distributed as dist

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import ShardedBatches
    from dtkit.engine.data.iterable import IterableBatches
    from dtkit.engine.data.prefetch_loader import StepBatches
    from dtkit.mesh import Mesh


_CPU = torch.device("cpu")


class ReplicaLink:
    """Link between the ranks of a replica, the first of which loads batches for all of them."""

    def __init__(
        self, group: Group, mesh: Mesh, device: torch.device, reduce_batch: Callable[[Any], Any] = lambda batch: batch
    ) -> None:
        """Form the link; a collective. `reduce_batch` returns the part of a batch that the other ranks need."""
        (self._axis,) = (axis for axis, size in mesh.axes.items() if axis != "dp" and size > 1)
        self._mesh, self._device, self._reduce_batch = mesh, device, reduce_batch
        self._leader = mesh.get_rank(dp=mesh.get_coordinates(group.rank).get("dp", 0))
        self.is_leader = group.rank == self._leader
        """Whether this rank loads the batches."""
        self.set_process_group(group)

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group. A collective."""
        self._group = group
        self._process_group = group.device_mesh(self._mesh, self._device).get_group(self._axis)

    def share(self, load_batches: Callable[[], StepBatches]) -> StepBatches:
        """Return (samples, batch) pairs on every rank, which the first rank loads. A collective of the replica."""

        def reduce_batches(batches: StepBatches) -> StepBatches:
            return [(count, self._reduce_batch(batch)) for count, batch in batches]

        pairs = share_batch(load_batches, self._group, self._leader, self._process_group, reduce_batches)
        return [(count, batch) for count, batch in pairs]


def share_batch(
    load_batch: Callable[[], Any],
    group: Group,
    src: int,
    process_group: dist.ProcessGroup | None = None,
    reduce_batch: Callable[[Any], Any] = lambda batch: batch,
) -> Any:
    """Return the batch that rank `src` loads, on all ranks or those of a `process_group`. A collective of these.

    The other ranks get what `reduce_batch` returns. If loading fails there, they raise `PeerFailedError`.
    """
    if group.rank != src:
        header = group.broadcast_json(None, src, process_group)
        if "error" in header:
            raise PeerFailedError(f"rank {src}, which loads the batches for this one, raised {header['error']}")
        return build_batch(header["batch"], group.broadcast_tensors(None, src, _CPU, process_group))
    try:
        batch = load_batch()
        structure, tensors = flatten_batch(reduce_batch(batch))
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # if the others have ended too, this error is still raised
            group.broadcast_json({"error": type(error).__name__}, src, process_group)
        raise
    group.broadcast_json({"batch": structure}, src, process_group)
    group.broadcast_tensors(tensors, src, _CPU, process_group)
    return batch


class ReplicaBatches:
    """Batches of a replica: one rank loads those of `source`, and the others receive them."""

    def __init__(self, source: ShardedBatches | IterableBatches, link: ReplicaLink) -> None:
        self._source, self._link = source, link
        self.steps_per_epoch = source.steps_per_epoch
        self.get_epoch, self.set_shares = source.get_epoch, source.set_shares
        self.count_samples, self.find_step_with_count = source.count_samples, source.find_step_with_count

    def get_rows(self, step: int) -> np.ndarray | None:
        """Return the rows that this replica takes in a step; None for a stream."""
        return self._source.get_rows(step)

    def load_batches(self, step: int, num_micro_batches: int = 1) -> list[tuple[int, Any]]:
        """Return (samples, batch) for up to `num_micro_batches` micro-batches. A collective of the replica."""
        return self._link.share(lambda: self._source.load_batches(step, num_micro_batches))

    def load_batches_by_shard(self, step: int) -> list[tuple[int, Any]]:
        """Return (samples, batch) of the replica's shard. A collective of the replica."""
        return self._link.share(lambda: self._source.load_batches_by_shard(step))

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group. A collective."""
        self._source.set_process_group(group)
        self._link.set_process_group(group)

    def close(self) -> None:
        """End threads and processes."""
        self._source.close()
