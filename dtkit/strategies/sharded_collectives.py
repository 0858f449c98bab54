"""The collectives of FSDP2's blocks: marked as phases, checked, and by memory of the ranks' host where that is faster.

gloo's reduce-scatter is an all-reduce, which sends twice the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit.strategies.tensor.collective_marks import rank_span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.phase_timer import PhaseTimer


class _BlockCollective:
    """A collective of a block's shards."""

    def __init__(self, group: Group, phases: PhaseTimer | None) -> None:
        """Run among some or all ranks of `group`; with `phases`, mark the time in them."""
        self._group, self._phases = group, phases

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the collective."""
        return torch.empty(size, dtype=dtype, device=device)

    def _begin(self, process_group: dist.ProcessGroup) -> None:
        if self._phases is not None:
            self._phases.begin_collective(rank_span(process_group))

    def _can_go_directly(self, process_group: dist.ProcessGroup, *tensors: torch.Tensor) -> bool:
        """Return whether the ranks can use memory of their host."""
        has_all_ranks = process_group.size() == self._group.world_size
        return has_all_ranks and all(map(self._group.can_sum_directly, tensors))


class AllGather(_BlockCollective):
    """An all-gather of a block's parameters."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Gather the parameters."""
        self._begin(group)
        work = None
        if not async_op and self._can_go_directly(group, output_tensor, input_tensor):
            self._group.all_gather_directly(output_tensor, input_tensor)
        else:
            work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        if self._phases is not None:
            self._phases.end_collective()
        return work


class CheckedReduceScatter(_BlockCollective):
    """A reduce-scatter of a block's gradients, which first checks that there are as many as parameters."""

    def __init__(self, group: Group, phases: PhaseTimer | None, expected_numel: int, error: str) -> None:
        """Expect so many numbers; for others, raise ValueError with the text `error`."""
        super().__init__(group, phases)
        self._expected_numel, self._error = expected_numel, error

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Reduce, or raise ValueError. The all-reduce hook ends the mark, after the sum over replicas."""
        if input_tensor.numel() != self._expected_numel:
            raise ValueError(self._error)
        self._begin(group)
        is_plain = op == dist.ReduceOp.SUM and not async_op
        if is_plain and self._can_go_directly(group, output_tensor, input_tensor):
            self._group.reduce_scatter_directly(output_tensor, input_tensor)
            return None
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


# torch 2.13 renamed these functions.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
