"""Data parallelism as in a textbook: backward, then an all-reduce of each gradient, then the update.

:class:`~dtkit.strategies.data_parallel.DataParallel` is faster, because it overlaps communication with backward. Both
yield the same parameters up to rounding. Tests use this strategy as the reference, and lessons show it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.arguments import suggest_options
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.strategies.base import StepResult, Strategy, Worker, make_optimizer
from dtkit.strategies.replicated import LossAccumulator, ReplicatedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.loss import Loss


@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class NaiveDataParallel(Strategy):
    """All-reduce of gradients after backward, one tensor at a time. For reading; train with `DataParallel`.

    Parameters that the model did not use get a gradient of zeros.
    """

    shares_router_losses = True

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Return the cost of data parallelism without overlap."""
        return Cost.for_replica(
            profile,
            sent_bytes=compute_ring_bytes(profile.gradients, benchmark.world_size),
            exposed_s=benchmark.estimate_all_reduce_s(profile.gradients),
        )

    def setup(
        self, model: torch.nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> Worker:
        """Return a worker with this rank's replica. The parameters must already be equal on all ranks."""
        model = model.to(context.device)
        return _NaiveWorker(model, loss_fn, make_optimizer(optimizer, model), context)


class _NaiveWorker(ReplicatedWorker):
    """One rank's copy of the model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._share_router_losses()

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group."""
        super().set_process_group(group)
        self._share_router_losses()

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """Take one step, in the four lines of data parallelism."""
        if probe is not None:
            return self._explain_step(batches, counts, probe)
        loss_accumulator = LossAccumulator(sum(counts))

        with self._share_written_tensors(counts), self._answer_router_losses(counts):
            gradients = self._compute_local_gradients(
                batches, loss_accumulator
            )  # 1. this rank's gradients, scaled to its share
        total = self._start_weight_reduce(loss_accumulator)
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = torch.zeros_like(p) if gradient is None else gradient
            if self._group is not None:
                self._phases.enter("sync")
                self._group.all_reduce(p.grad)  # 2. the same sum on every rank
        self._divide_by_weight(total)
        finite, norm = self._clip_and_update()  # 3. the same update, so that 4. all copies stay equal

        return self._make_step_result(loss_accumulator, counts, finite=finite, norm=norm)
