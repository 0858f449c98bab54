"""Training steps that update by themselves, with several losses and optimizers, as GANs and actor-critics do.

A user's step computes losses, calls ``backward``, and calls ``step`` of its optimizers, in any order. Each such call
sums the gradients of that optimizer's parameters over the ranks before it updates them. So the step equals that of one
process, if each loss is a mean over samples.

Ranks must call the same optimizers in the same order. Every call checks this by one small all-reduce. A rank without
samples runs no user code. The all-reduce gives it the next optimizer, and it takes part with zero gradients.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch

from dtkit.strategies import gradients
from dtkit.strategies.base import StepResult, make_optimizer
from dtkit.strategies.combined_optimizer import CombinedOptimizer
from dtkit.strategies.replicated import LossAccumulator, ReplicatedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.strategies.loss import Loss


class ManualOptimizer:
    """One of the optimizers that a training step gets. Except for `step`, it behaves like the torch optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, take_step: Callable[[], None]) -> None:
        self._optimizer, self._take_step = optimizer, take_step

    def step(self) -> None:
        """Sum the gradients of this optimizer's parameters over the ranks, and update them. A collective.

        Afterwards each gradient is this rank's part again: more calls of ``backward`` add to it.
        """
        self._take_step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)


class ManualWorker(ReplicatedWorker):
    """One rank's copy of a model whose training step updates it."""

    takes_whole_batch = True

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
        *,
        clip_grad_norm: float | None = None,
    ) -> None:
        made = make_optimizer(optimizer, model)
        optimizers: Sequence[torch.optim.Optimizer] = getattr(made, "optimizers", (made,))
        super().__init__(model, loss_fn, _SteppedOptimizers(optimizers), context, clip_grad_norm=clip_grad_norm)
        self._optimizers = optimizers
        self._parameters_of = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
        self._share = 0.0
        self._counts: Sequence[int] = ()
        self._sums_of_squares: list[float] = []
        self._last_gradients: dict[torch.Tensor, torch.Tensor | None] = {}

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """Run the user's training step, which updates."""
        assert probe is None
        self._zero_grad()
        self._counts, self._share = counts, 0.0
        self._sums_of_squares.clear()
        self._last_gradients.clear()
        losses = LossAccumulator(sum(counts))
        try:
            with self._share_written_tensors(counts):
                for count, batch in batches:  # at most one
                    self._run_user_step(losses, count, batch)
                if not batches:
                    self._follow_other_ranks()
        except _NonFiniteError:
            return self._make_step_result(losses, counts, finite=False, norm=math.nan)
        self.optimizer.step()
        for p, gradient in self._last_gradients.items():
            p.grad = gradient
        return self._make_step_result(losses, counts, finite=True, norm=math.sqrt(math.fsum(self._sums_of_squares)))

    def _run_user_step(self, losses: LossAccumulator, count: int, batch: Any) -> None:
        self._share = count / sum(self._counts)
        self._phases.enter("forward")
        with self._mark_backward():
            loss = self._loss_fn.update_model(self._model, batch, self._make_handles())
        losses.add(loss.detach(), None, count)
        self._agree_on_next(len(self._optimizers))

    def _make_handles(self) -> tuple[ManualOptimizer, ...]:
        def bind(index: int) -> Callable[[], None]:
            return lambda: self._step_optimizer(self._agree_on_next(index))

        return tuple(ManualOptimizer(each, bind(index)) for index, each in enumerate(self._optimizers))

    def _follow_other_ranks(self) -> None:
        """Take part in the updates of ranks that have samples."""
        while (index := self._agree_on_next(None)) < len(self._optimizers):
            self._step_optimizer(index)

    def _agree_on_next(self, index: int | None) -> int:
        """Return the number of the optimizer that all ranks with samples step now, or of optimizers at the end.

        `index` is this rank's; None without samples. A collective. Raises ValueError on all ranks if theirs differ.
        """
        if self._group is None:
            assert index is not None
            return index
        votes = torch.zeros(len(self._optimizers) + 1)
        if index is not None:
            votes[index] = 1
        self._phases.enter("sync")
        self._group.all_reduce(votes)
        chosen = votes.nonzero().flatten().tolist()
        if len(chosen) > 1:
            names = [f"optimizers[{k}].step()" for k in chosen if k < len(self._optimizers)]
            ended = " and the end of the step" if len(self._optimizers) in chosen else ""
            raise ValueError(
                f"the training steps of different ranks are at {' and '.join(names)}{ended} at the same time, so their "
                "updates would differ. Decide what to update by numbers that are equal on all ranks, such as a count "
                "of steps, not by a rank's losses"
            )
        return int(chosen[0])

    def _step_optimizer(self, index: int) -> None:
        """Sum the gradients of one optimizer's parameters over ranks, and update them."""
        optimizer, parameters = self._optimizers[index], self._parameters_of[index]
        local = [p.grad for p in parameters]
        self._check_gradients_arrived(local, index)
        reduced = self._reduce(parameters, local)
        self._phases.enter("update")
        norm = _compute_norm(reduced)
        self._check_finite(reduced, norm, index)
        if (factor := gradients.compute_clip_factor(norm, self._clip_grad_norm)) < 1:
            gradients.scale_([g for g in reduced if g is not None], factor)
        self._sums_of_squares.append(norm**2)
        try:
            self._set_gradients(parameters, reduced)
            optimizer.step()
        finally:
            self._set_gradients(parameters, local)
        self._last_gradients |= zip(parameters, reduced, strict=True)
        self._phases.enter("forward")

    def _reduce(
        self, parameters: Sequence[torch.Tensor], local: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the mean over the samples of all ranks."""
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in local]
        if self._group is None:
            return [None if g is None else g.clone() for g in dense]
        shares = [None if g is None else g * self._share for g in dense]
        return gradients.all_reduce_flat(parameters, shares, self._all_reduce_flat)

    def _check_gradients_arrived(self, local: Sequence[torch.Tensor | None], index: int) -> None:
        """Raise ValueError if no gradient has reached an optimizer's parameters on a rank with samples."""
        if self._share and all(g is None for g in local):
            raise ValueError(
                f"optimizers[{index}].step() found no gradient at any of its parameters. Either the training step "
                "called no backward() before it, or it uses networks of the notebook by their own names: those are "
                "other copies, which don't train. Use the networks of the model that the step gets: "
                "def training_step(model, batch, optimizers): ... model.generator(...)"
            )

    def _check_finite(self, reduced: Sequence[torch.Tensor | None], norm: float, index: int) -> None:
        """Raise if a gradient is not finite. Before the first update of a step, the step then ends without any."""
        if math.isfinite(norm) or all(g is None or bool(g.isfinite().all()) for g in reduced):
            return
        if not self._sums_of_squares:
            raise _NonFiniteError
        raise FloatingPointError(
            f"the gradients of optimizers[{index}] are not finite, after another update of the same step was made. "
            "Lower the learning rate, or clip gradients: dtkit.DataParallel(clip_grad_norm=1.0)"
        )

    @staticmethod
    def _set_gradients(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> None:
        for p, gradient in zip(parameters, values, strict=True):
            p.grad = gradient

    @contextlib.contextmanager
    def _mark_backward(self) -> Iterator[None]:
        """Count the time in ``Tensor.backward`` as backward."""
        original, phases = torch.Tensor.backward, self._phases

        def backward(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            phases.enter("backward")
            original(tensor, *args, **options)  # type: ignore[no-untyped-call]
            phases.enter("forward")

        torch.Tensor.backward = backward  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.Tensor.backward = original  # type: ignore[method-assign]


class _SteppedOptimizers(CombinedOptimizer):
    """Several optimizers that the user's code has stepped."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing but call the hooks of a step: all updates are made."""
        assert closure is None


class _NonFiniteError(BaseException):
    """Gradients that are not finite, before any update. Not an Exception, so that user code doesn't catch it."""


def _compute_norm(tensors: Sequence[torch.Tensor | None]) -> float:
    values = [t for t in tensors if t is not None]
    return float(torch.nn.utils.get_total_norm(values)) if values else 0.0
