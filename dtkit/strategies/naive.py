"""Data parallelism as it is told on a blackboard: backward, then all-reduce one gradient after the other, then update.

It is slower than :class:`~dtkit.strategies.data_parallel.DataParallel`, which hides most of the communication behind
backward, and gives the same parameters up to rounding: the tests use it as that one's reference, and lessons show it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.strategies.base import StepResult, Strategy, Worker, WorkerContext, make_optimizer
from dtkit.strategies.replicated import LossAccumulator, ReplicatedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.loss import Loss


@dataclasses.dataclass(frozen=True, repr=False)
class NaiveDataParallel(Strategy):
    """Gradients are all-reduced after backward, one tensor at a time. For reading; train with `DataParallel`.

    A parameter that the model did not use gets a gradient of zeros.
    """

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """As data parallelism, and nothing hides behind backward."""
        return Cost.for_replica(
            profile,
            sent_bytes=compute_ring_bytes(profile.gradients, benchmark.world_size),
            exposed_s=benchmark.estimate_all_reduce_s(profile.gradients),
        )

    def setup(
        self, model: torch.nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> Worker:
        """A replica on this rank. The parameters must be equal on all ranks already."""
        model = model.to(context.device)
        return _NaiveWorker(model, loss_fn, make_optimizer(optimizer, model), context)


class _NaiveWorker(ReplicatedWorker):
    """One rank's copy of the model."""

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """The four lines that data parallelism is."""
        if probe is not None:
            return self._explain_step(batches, counts, probe)
        tally = LossAccumulator(sum(counts))

        gradients = self._compute_local_gradients(batches, tally)  # 1. of this rank's samples, scaled to their share
        total = self._start_weight_reduce(tally)
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = torch.zeros_like(p) if gradient is None else gradient
            if self._group is not None:
                self._phases.enter("sync")
                self._group.all_reduce(p.grad)  # 2. the same sum on every rank
        self._divide_by_weight(total)
        finite, norm = self._clip_and_update()  # 3. so every rank makes the same update: 4. all copies stay equal

        return self._make_step_result(tally, counts, finite=finite, norm=norm)
