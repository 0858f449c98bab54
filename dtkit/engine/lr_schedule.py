"""A learning-rate schedule: torch's own scheduler, stepped alike on all ranks, and what a new base rate does to it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.strategies.base import StepResult, TrainingProgram

_BASE_RATE_KEYS = ("initial_lr", "max_lr", "min_lr")  # what schedulers keep in an optimiser's groups


class LearningRates:
    """The learning rates of a job's optimiser: set by hand, followed by a schedule if there is one."""

    def __init__(self, program: TrainingProgram, optimizer: torch.optim.Optimizer) -> None:
        self._param_groups = optimizer.param_groups
        self._ratios = [1.0] * len(self._param_groups)
        self._uses_train_loss = not program.has_validation
        self._epoch_losses: list[
            tuple[torch.Tensor, torch.Tensor | float]
        ] = []  # (sum, weight) of each step of the epoch
        self._num_updates = 0  # that the schedule knows of
        self._before_evaluation: dict[str, Any] | None = None  # how all was before held-out data were last evaluated
        self.lr_schedule: LRSchedule | None = None
        if program.lr_scheduler is not None:
            self.lr_schedule = LRSchedule(program.lr_scheduler, optimizer, program.lr_scheduler_interval)
            for group in self._param_groups:  # as most schedulers do, by which one sees that "lr" is theirs
                group.setdefault("initial_lr", group["lr"])

    def set_lr(self, lr: float) -> None:
        """Give the first group this rate, and the others in proportion."""
        first = self._param_groups[0]["lr"]
        if first:  # at 0 nothing can be read from it: the proportions stay as they were
            self._ratios = [group["lr"] / first for group in self._param_groups]
        if self.lr_schedule is not None and first:
            self.lr_schedule.scale_base_lrs(lr / first)
        for group, ratio in zip(self._param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio

    def step_after_update(
        self, step_result: StepResult, num_updates: int, steps_per_epoch: int, group: Group | None
    ) -> None:
        """An update was made, the `updates`-th."""
        if self.lr_schedule is None:
            return
        epoch_ended = num_updates % steps_per_epoch == 0
        self._num_updates = num_updates
        self.lr_schedule.step(epoch_ended=epoch_ended)
        if self.lr_schedule.needs_metric and self._uses_train_loss:
            if step_result.loss is not None:
                self._epoch_losses.append((step_result.loss * step_result.loss_weight, step_result.loss_weight))
            if epoch_ended:
                sums = [sum(float(part[k]) for part in self._epoch_losses) for k in (0, 1)]
                self._epoch_losses.clear()
                self.step_after_epoch(sums[0], sums[1], group)

    def visit_state(self, visitor: StateVisitor) -> None:
        """Show how rates stand to each other, the schedule, and the losses of the epoch so far."""
        self._ratios = visitor.visit_value("lr ratios", self._ratios)
        self._num_updates = visitor.visit_value("lr updates", self._num_updates)
        if self.lr_schedule is None:
            return
        self.lr_schedule.visit_state(visitor)
        if self.lr_schedule.needs_metric:
            self._before_evaluation = visitor.visit_value("lr before", self._before_evaluation)
        losses = [(float(total), float(weight)) for total, weight in self._epoch_losses]
        first = visitor.rank == 0
        self._epoch_losses = visitor.per_rank(
            "epoch losses", losses, lambda each: [pair for one in each for pair in one] if first else []
        )

    def step_without_loss(self, num_updates: int, steps_per_epoch: int) -> None:
        """As `after`, of a step that failed once its update was made: its loss is not known. Unless that was done."""
        if self.lr_schedule is not None and num_updates != self._num_updates:
            self._num_updates = num_updates
            self.lr_schedule.step(epoch_ended=num_updates % steps_per_epoch == 0)

    def step_after_evaluation(self, num_updates: int, loss_sum: float, weight: float, group: Group | None) -> None:
        """Step with the metric of held-out data, after so many updates. A repeated call replaces the first one.

        When an evaluation is broken off, some ranks may have taken their losses' mean and others not. How all was
        before is put down before ranks tell each other theirs: where one has taken the mean, all can go back, whoever's
        state they go on with.
        """
        if self.lr_schedule is None or not self.lr_schedule.needs_metric:
            return
        if self._before_evaluation is not None and self._before_evaluation["updates"] == num_updates:
            self._restore_before_evaluation(self.lr_schedule, self._before_evaluation)
        else:
            rates = [float(group["lr"]) for group in self._param_groups]
            self._before_evaluation = {
                "updates": num_updates,
                "rates": rates,
                "schedule": self.lr_schedule.state_dict(),
            }
        self.step_after_epoch(loss_sum, weight, group)

    def _restore_before_evaluation(self, lr_schedule: LRSchedule, before: dict[str, Any]) -> None:
        lr_schedule.load_state_dict(before["schedule"])
        for group, rate in zip(self._param_groups, before["rates"], strict=True):
            group["lr"] = rate

    def step_after_epoch(self, loss_sum: float, weight: float, group: Group | None) -> None:
        """An epoch has ended with this rank's loss of total / weight. A collective, where the schedule wants it."""
        if self.lr_schedule is None or not self.lr_schedule.needs_metric:
            return
        sums = torch.tensor([loss_sum, weight], dtype=torch.float64)
        loss_sum, weight = (sums if group is None else group.all_reduce(sums)).tolist()
        if weight:
            self.lr_schedule.step_with_metric(loss_sum / weight)


class LRSchedule:
    """A scheduler over an optimiser, stepped after every "step" or "epoch"."""

    def __init__(self, factory: Callable[..., Any], optimizer: torch.optim.Optimizer, interval: str) -> None:
        """Raise TypeError where `factory(optimizer)` gives no torch scheduler of this optimiser."""
        made = factory(optimizer)
        if not isinstance(made, lr_scheduler.LRScheduler):
            raise TypeError(
                f"scheduler(optimizer) returned {type(made).__name__}; it must return a torch scheduler, as in "
                "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)"
            )
        if getattr(made, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                "the scheduler holds another optimiser than the one that the function was given; every rank makes its "
                "own: lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
            )
        self._scheduler, self._optimizer, self._interval = made, optimizer, interval
        self.needs_metric = isinstance(made, lr_scheduler.ReduceLROnPlateau)
        """Whether it is stepped with a loss, at the end of every epoch."""

    def visit_state(self, visitor: StateVisitor) -> None:
        """Show the scheduler's state."""
        visitor.visit_stateful("scheduler", self._scheduler, "the scheduler")

    def state_dict(self) -> dict[str, Any]:
        """A copy of the scheduler's state."""
        return copy.deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make that the scheduler's state, of which it holds a copy."""
        self._scheduler.load_state_dict(copy.deepcopy(state))

    def step(self, *, epoch_ended: bool) -> None:
        """An update was made."""
        if not self.needs_metric and (self._interval == "step" or epoch_ended):
            self._scheduler.step()

    def step_with_metric(self, metric: float) -> None:
        """An epoch has ended with this loss."""
        self._scheduler.step(metric)  # type: ignore[arg-type]

    def scale_base_lrs(self, ratio: float) -> None:
        """Multiply all base rates, so that the schedule keeps its form."""
        for group in self._optimizer.param_groups:
            for name in _BASE_RATE_KEYS:
                if name in group:
                    group[name] *= ratio
        for scheduler in _iterate_schedulers(self._scheduler):
            for name in ("base_lrs", "max_lrs", "_last_lr"):
                if isinstance(found := getattr(scheduler, name, None), list):
                    setattr(scheduler, name, [rate * ratio for rate in found])


def _iterate_schedulers(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _iterate_schedulers(part)
