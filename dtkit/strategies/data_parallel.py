"""Data parallelism: a copy of the model on each rank, gradients averaged over ranks in every step.

Exactness. DDP averages gradients over N ranks. With n_i of the B samples of a step on rank i, the gradient of the
mean over all B samples is  sum_i (n_i / B) grad_i,  so each rank scales its mean loss by n_i N / B before backward
(Li et al., VLDB 2020, describe DDP; the weights are ours). A loss that returns (sum, weight) is scaled by N / W,
with W the weights' sum over all ranks, known before backward.

A rank without a sample runs no user code in that step: an empty forward gives NaN, and skipping backward there
would break DDP's reducer. Every rank knows all counts beforehand, so in such a step all ranks go past DDP and sum
their gradients explicitly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dtkit.strategies.base import Outcome, Setting, Strategy, Worker, make_optimizer
from dtkit.strategies.objective import MEAN, PAIR, Objective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm import Group


@dataclasses.dataclass(frozen=True, repr=False)
class DataParallel(Strategy):
    """Gradients are all-reduced in every step, weighted by sample counts, overlapping with backward.

    ``find_unused_parameters=True`` is for models that don't use all parameters in every step (it costs a pass over
    the graph a step).
    """

    find_unused_parameters: bool = False

    def setup(
        self, model: torch.nn.Module, objective: Objective, optimizer: Callable[..., Any], setting: Setting
    ) -> Worker:
        """A replica on this rank. The parameters must be equal on all ranks already."""
        model = model.to(setting.device)
        return _Replica(self, model, objective, make_optimizer(optimizer, model), setting)


class _Replica(Worker):
    """One rank's copy of the model."""

    def __init__(
        self,
        strategy: DataParallel,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        setting: Setting,
    ) -> None:
        self._strategy, self._model, self._objective = strategy, model, objective
        self._group, self._setting = setting.group, setting
        self.optimizer = optimizer
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._uniform = len({(p.dtype, p.device) for p in self._parameters}) == 1
        self._form: int | None = None  # MEAN or PAIR: agreed upon in the first step
        self._seen = 0  # samples that this rank's buffers (batch statistics) were made from
        self._module = self._wrap()

    def _wrap(self) -> torch.nn.Module:
        if self._group is None:
            return self._model
        return DistributedDataParallel(
            self._model,
            broadcast_buffers=False,  # batch statistics are each rank's own; broadcasting hung with an empty rank
            init_sync=False,  # equal already
            gradient_as_bucket_view=True,
            find_unused_parameters=self._strategy.find_unused_parameters,
        )

    def regroup(self, group: Group) -> None:
        """Wrap the model anew: DDP's reducer holds the old process group."""
        self._group = group
        self._module = self._wrap()

    def step(self, batch: Any, counts: Sequence[int]) -> Outcome:
        """Forward, backward, all-reduce, update: parameters stay equal on all ranks."""
        mark = self._setting.clock.mark
        some_rank_is_empty = self._group is not None and not all(counts)
        start = mark()
        for p in self._parameters:  # the optimiser need not hold all of them
            p.grad = None
        module = self._model if some_rank_is_empty else self._module
        loss, weight = (None, None) if batch is None else self._objective(module, batch)
        scale, share = self._scale(loss, weight, counts, summed=some_rank_is_empty)
        forward = mark()
        weighted = loss if loss is None or scale is None else loss * scale
        if some_rank_is_empty:
            self._sum_gradients(weighted)
        elif weighted is not None:
            weighted.backward()  # type: ignore[no-untyped-call]
            self._check_used()
        finite = self._finite()
        backward = mark()
        if finite:
            self.optimizer.step()
        self._seen += sum(counts[s] for s in self._setting.shards)
        mean = None if loss is None else loss.detach() if weight is None else loss.detach() / weight
        return Outcome(mean, share, finite, (start, forward, backward, mark()))

    def _scale(
        self, loss: torch.Tensor | None, weight: torch.Tensor | None, counts: Sequence[int], *, summed: bool
    ) -> tuple[torch.Tensor | float | None, torch.Tensor | float]:
        """(factor on the loss before backward, what the loss counts for in the global mean). None: a factor of 1."""
        if self._form is None:
            self._form = self._agree_on_form(loss, weight)
        # DDP divides by the number of ranks; an explicit sum does not.
        ranks = 1 if summed or self._group is None else self._group.world_size
        if self._form == MEAN:
            mine = sum(counts[s] for s in self._setting.shards)
            scale = mine * ranks / sum(counts)
            return None if scale == 1 and not summed else scale, float(mine)
        own = torch.zeros((), dtype=torch.float64) if weight is None else weight.detach()
        total = own.to(self._setting.device, copy=True)
        if self._group is not None:
            self._group.all_reduce(total)
        total.clamp_(min=torch.finfo(total.dtype).tiny)  # no weight at all: a sum of nothing has a gradient of zero
        return (ranks / total).to(torch.float32 if loss is None else loss.dtype).nan_to_num(), own

    def _agree_on_form(self, loss: torch.Tensor | None, weight: torch.Tensor | None) -> int:
        """Whether the loss is a mean or a pair: a rank that has no sample in the first step can't know."""
        votes = torch.zeros(2)
        if loss is not None:
            votes[0 if weight is None else 1] = 1
        if self._group is not None:
            self._group.all_reduce(votes)
        if bool(votes.all()):
            raise TypeError("the loss is a scalar on some ranks and a (sum, weight) pair on others; return one form")
        return MEAN if votes[0] else PAIR

    def _sum_gradients(self, loss: torch.Tensor | None) -> None:
        """Gradients of the sum of all ranks' losses, without DDP; a rank without samples gives zeros.

        `autograd.grad` leaves DDP's hooks alone. (Under `no_sync` they note which parameters were used, and the next
        step fails where those differ from its own.) A parameter that no rank used gets no gradient, as in one process.
        """
        assert self._group is not None
        found: Sequence[torch.Tensor | None] = [None] * len(self._parameters)
        if loss is not None:
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        found = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, found, strict=True)]
        used = parts[0].new_tensor([g is not None for g in found])
        flat = self._group.all_reduce(torch.cat([used, *(part.reshape(-1) for part in parts)]))
        sizes = [p.numel() for p in self._parameters]
        used, *summed = torch.split(flat, [len(parts), *sizes])
        for p, gradient, count in zip(self._parameters, summed, used.tolist(), strict=True):
            p.grad = gradient.view_as(p).to(p.dtype) if count else None

    def _check_used(self) -> None:
        """DDP reduces nothing for want of one gradient, and says so a step later: other ranks would wait for it."""
        if self._group is None or self._strategy.find_unused_parameters:
            return
        if any(p.grad is None for p in self._parameters):
            names = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]
            raise ValueError(
                f"{', '.join(names)} got no gradient: the model did not use it in this step, and ranks wait for every "
                "parameter's gradient. Use strategy=dtkit.DataParallel(find_unused_parameters=True), or freeze what is "
                "never used by requires_grad_(False)"
            )

    def _finite(self) -> bool:
        """Whether all reduced gradients are finite: the same bits, so the same answer, on all ranks.

        Asked in every step, so it must be cheap: one fused norm a tensor, and one number read.
        """
        gradients = [_values(p.grad) for p in self._parameters if p.grad is not None]
        if not gradients:
            return True
        if self._uniform:
            total = float(torch.stack(torch._foreach_norm(gradients)).sum())  # noqa: SLF001 - as clip_grad_norm_ does
        else:
            total = float(torch.nn.utils.get_total_norm(gradients))
        # The norm itself may have overflowed although every gradient is finite.
        return math.isfinite(total) or all(bool(g.isfinite().all()) for g in gradients)

    @contextlib.contextmanager
    def whole(self) -> Iterator[torch.nn.Module]:
        """This rank's copy, its float buffers (batch statistics) averaged over ranks by samples while it lasts."""
        own = {name: b.clone() for name, b in self._float_buffers()} if self._group is not None else {}
        if own:
            self._average_buffers()
        try:
            yield self._model
        finally:
            for name, buffer in self._float_buffers():
                if name in own:
                    buffer.copy_(own[name])

    @torch.no_grad()
    def _average_buffers(self) -> None:
        assert self._group is not None
        total = self._group.all_reduce(torch.tensor([float(self._seen)])).item()
        if total:
            for _, buffer in self._float_buffers():
                self._group.all_reduce(buffer.mul_(self._seen / total))

    def _float_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, b) for name, b in self._model.named_buffers() if b.is_floating_point()]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, which is sparse for an embedding made so."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
