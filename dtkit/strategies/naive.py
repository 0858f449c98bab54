"""Data parallelism as it is told on a blackboard: backward, then all-reduce one gradient after the other, then update.

It is slower than :class:`~dtkit.strategies.data_parallel.DataParallel`, which hides most of the communication behind
backward, and gives the same parameters up to rounding: the tests use it as that one's reference, and lessons show it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dtkit.planning.cost_model import Cost, ring_bytes
from dtkit.strategies.base import Outcome, Setting, Strategy, Worker, make_optimizer
from dtkit.strategies.replicated import Replica, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.observe.step_probe import Microscope
    from dtkit.planning.cost_model import Benchmark, Facts
    from dtkit.strategies.loss import Objective


@dataclasses.dataclass(frozen=True, repr=False)
class NaiveDataParallel(Strategy):
    """Gradients are all-reduced after backward, one tensor at a time. For reading; train with `DataParallel`.

    A parameter that the model did not use gets a gradient of zeros.
    """

    def cost(self, facts: Facts, benchmark: Benchmark) -> Cost:
        """As data parallelism, and nothing hides behind backward."""
        return Cost.of_replica(
            facts,
            sent_bytes=ring_bytes(facts.gradients, benchmark.world_size),
            exposed_s=benchmark.all_reduce_s(facts.gradients),
        )

    def setup(
        self, model: torch.nn.Module, objective: Objective, optimizer: Callable[..., Any], setting: Setting
    ) -> Worker:
        """A replica on this rank. The parameters must be equal on all ranks already."""
        model = model.to(setting.device)
        return _Naive(model, objective, make_optimizer(optimizer, model), setting)


class _Naive(Replica):
    """One rank's copy of the model."""

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], microscope: Microscope | None = None
    ) -> Outcome:
        """The four lines that data parallelism is."""
        if microscope is not None:
            return self._explained(batches, counts, microscope)
        tally = Tally(sum(counts))

        gradients = self._local_gradients(batches, tally)  # 1. of this rank's samples, scaled to their share
        total = self._announce(tally)
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = torch.zeros_like(p) if gradient is None else gradient
            if self._group is not None:
                self._phases.enter("sync")
                self._group.all_reduce(p.grad)  # 2. the same sum on every rank
        self._divide(total)
        finite, norm = self._update()  # 3. so every rank makes the same update: 4. all copies stay equal

        return self._outcome(tally, counts, finite=finite, norm=norm)
