"""Learning rates of a job, set by the user, or by torch's scheduler, which takes the same steps on all ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from dtkit._util import formatting
from dtkit._util.torch_private import CHILD_SCHEDULERS, LAST_LR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.strategies.base import StepResult, TrainingProgram

_BASE_RATE_KEYS = ("initial_lr", "max_lr", "min_lr")  # in parameter groups, set by schedulers


class LearningRates:
    """Learning rates of a job's optimizer, with its schedule if there is one."""

    def __init__(self, program: TrainingProgram, optimizer: torch.optim.Optimizer) -> None:
        self._param_groups = optimizer.param_groups
        self._ratios = [1.0] * len(self._param_groups)
        self._held: list[float] | None = None  # the groups' own rates while the user's rate is 0
        self._uses_train_loss = not program.has_validation
        self._epoch_losses: list[
            tuple[torch.Tensor | float, torch.Tensor | float]
        ] = []  # (sum, weight) of this epoch's steps
        self._num_updates = 0  # updates that the schedule has counted
        self._before_evaluation: dict[str, Any] | None = None  # state before the last evaluation
        self.lr_schedule: LRSchedule | None = None
        if program.lr_scheduler is not None:
            self.lr_schedule = LRSchedule(program.lr_scheduler, optimizer, program.lr_scheduler_interval)
            for group in self._param_groups:  # as most schedulers do, to mark "lr" as scheduled
                group.setdefault("initial_lr", group["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the first group's rate, and scale the others and the schedule in proportion.

        Nothing could be scaled back from 0. So 0 only suspends the groups' own rates, which the schedule still changes.
        """
        if self._held is not None:
            self._assign(self._held)
            self._held = None
        first = self._param_groups[0]["lr"]
        if first and not lr:
            self._suspend()
            return
        if first:  # from 0, the ratios stay the same
            self._ratios = [group["lr"] / first for group in self._param_groups]
        if self.lr_schedule is not None and first:
            self.lr_schedule.scale_base_lrs(lr / first)
        for group, ratio in zip(self._param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio

    def _suspend(self) -> None:
        self._held = [float(group["lr"]) for group in self._param_groups]
        self._assign([0.0] * len(self._held))

    def _assign(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self._param_groups, rates, strict=True):
            group["lr"] = rate

    @contextlib.contextmanager
    def _with_own_rates(self) -> Iterator[None]:
        """Let the schedule read and change the groups' own rates, also while the user's rate is 0."""
        if self._held is None:
            yield
            return
        self._assign(self._held)
        try:
            yield
        finally:
            self._suspend()

    def step_after_update(
        self, step_result: StepResult, num_updates: int, steps_per_epoch: int, group: Group | None
    ) -> None:
        """Step after the update number `num_updates`."""
        if self.lr_schedule is None:
            return
        epoch_ended = num_updates % steps_per_epoch == 0
        self._num_updates = num_updates
        with self._with_own_rates():
            self.lr_schedule.step(epoch_ended=epoch_ended)
        if self.lr_schedule.needs_metric and self._uses_train_loss:
            if step_result.loss is not None:
                self._epoch_losses.append((step_result.loss * step_result.loss_weight, step_result.loss_weight))
            if epoch_ended:
                sums = [sum(float(part[k]) for part in self._epoch_losses) for k in (0, 1)]
                self._epoch_losses.clear()
                self.step_after_epoch(sums[0], sums[1], group)

    def visit_state(self, visitor: StateVisitor) -> None:
        """Visit the ratios of rates, the suspended rates, the schedule, and the losses of the epoch so far."""
        self._ratios = visitor.visit_value("lr ratios", self._ratios)
        self._held = visitor.visit_value("lr held", self._held)
        self._num_updates = visitor.visit_value("lr updates", self._num_updates)
        if self.lr_schedule is None:
            return
        self.lr_schedule.visit_state(visitor)
        if self.lr_schedule.needs_metric:
            self._before_evaluation = visitor.visit_value("lr before", self._before_evaluation)
        losses = [(float(total), float(weight)) for total, weight in self._epoch_losses]
        is_first = visitor.rank == 0
        self._epoch_losses = visitor.per_rank(
            "epoch losses", losses, lambda lists: [pair for pairs in lists for pair in pairs] if is_first else []
        )

    def step_without_loss(self, num_updates: int, steps_per_epoch: int) -> None:
        """Step after an update whose step failed later, so that its loss is unknown. No-op if that has been done."""
        if self.lr_schedule is not None and num_updates != self._num_updates:
            self._num_updates = num_updates
            with self._with_own_rates():
                self.lr_schedule.step(epoch_ended=num_updates % steps_per_epoch == 0)

    def step_after_evaluation(self, num_updates: int, loss_sum: float, weight: float, group: Group | None) -> None:
        """Step with the loss of held-out data, after `num_updates` updates. A repeated call replaces the first one.

        After an aborted evaluation only some ranks may have stepped. Every rank stores its state before the ranks
        exchange losses. So all can return to it, even if they get their state from another rank.
        """
        if self.lr_schedule is None or not self.lr_schedule.needs_metric:
            return
        with self._with_own_rates():
            if self._before_evaluation is not None and self._before_evaluation["updates"] == num_updates:
                self._restore_before_evaluation(self.lr_schedule, self._before_evaluation)
            else:
                self._before_evaluation = {
                    "updates": num_updates,
                    "rates": [float(group["lr"]) for group in self._param_groups],
                    "schedule": self.lr_schedule.state_dict(),
                }
        self.step_after_epoch(loss_sum, weight, group)

    def _restore_before_evaluation(self, lr_schedule: LRSchedule, before: dict[str, Any]) -> None:
        lr_schedule.load_state_dict(before["schedule"])
        self._assign(before["rates"])

    def step_after_epoch(self, loss_sum: float, weight: float, group: Group | None) -> None:
        """Step with the mean loss of all ranks, if the schedule needs it. A collective then."""
        if self.lr_schedule is None or not self.lr_schedule.needs_metric:
            return
        sums = torch.tensor([loss_sum, weight], dtype=torch.float64)
        loss_sum, weight = (sums if group is None else group.all_reduce(sums)).tolist()
        if weight:
            with self._with_own_rates():
                self.lr_schedule.step_with_metric(loss_sum / weight)


class LRSchedule:
    """Scheduler of an optimizer, which steps after every "step" or "epoch"."""

    def __init__(self, factory: Callable[..., Any], optimizer: torch.optim.Optimizer, interval: str) -> None:
        """Raises TypeError or ValueError if `factory(optimizer)` isn't a torch scheduler of this optimizer."""
        scheduler = factory(optimizer)
        if not isinstance(scheduler, lr_scheduler.LRScheduler):
            raise TypeError(
                f"lr_scheduler(optimizer) returned {type(scheduler).__name__}; it must return a torch scheduler, as in "
                "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)"
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                "the scheduler has another optimizer than the one that the function was given. Every rank makes its "
                "own: lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
            )
        self._scheduler, self._optimizer, self._interval = scheduler, optimizer, interval
        self.needs_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        """Whether it steps with a loss, at the end of every epoch."""

    def visit_state(self, visitor: StateVisitor) -> None:
        """Visit the scheduler's state."""
        visitor.visit_stateful("scheduler", self._scheduler, "the scheduler")

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the scheduler's state."""
        return copy.deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a copy of the state."""
        self._scheduler.load_state_dict(copy.deepcopy(state))

    def step(self, *, epoch_ended: bool) -> None:
        """Step after an update."""
        if not self.needs_metric and (self._interval == "step" or epoch_ended):
            self._scheduler.step()

    def step_with_metric(self, metric: float) -> None:
        """Step after an epoch with this loss."""
        self._scheduler.step(metric)  # type: ignore[arg-type]

    def scale_base_lrs(self, ratio: float) -> None:
        """Multiply all base rates, so that the schedule keeps its shape."""
        for group in self._optimizer.param_groups:
            for name in _BASE_RATE_KEYS:
                if name in group:
                    group[name] *= ratio
        for scheduler in _iterate_schedulers(self._scheduler):
            for name in ("base_lrs", "max_lrs", LAST_LR):
                if isinstance(rates := getattr(scheduler, name, None), list):
                    setattr(scheduler, name, [rate * ratio for rate in rates])


def check_length(factory: Callable[..., Any], num_steps: int, unit: str) -> Callable[..., Any]:
    """Return the factory of a scheduler. It raises ValueError if the schedule ends before `num_steps` steps of it.

    `unit` is what the run counts, in errors: "step" or "epoch".
    """

    def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = factory(optimizer)
        too_short = [part.total_steps for part in _list_one_cycles(scheduler) if part.total_steps < num_steps]
        if too_short:
            count = formatting.format_count(num_steps, unit)
            raise ValueError(
                f"lr_scheduler= makes a OneCycleLR with total_steps={too_short[0]}, and this run takes {count}, after "
                f"each of which the schedule takes a step. Give the length of the run: total_steps={num_steps}"
            )
        return scheduler

    return make_scheduler


def _list_one_cycles(scheduler: Any) -> list[lr_scheduler.OneCycleLR]:
    """Return the schedules that step as often as the whole one does, and raise an error once they have ended."""
    parts = getattr(scheduler, CHILD_SCHEDULERS, ()) if isinstance(scheduler, lr_scheduler.ChainedScheduler) else ()
    return [part for part in (scheduler, *parts) if isinstance(part, lr_scheduler.OneCycleLR)]


def _iterate_schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those that it consists of."""
    yield scheduler
    for part in getattr(scheduler, CHILD_SCHEDULERS, ()):
        yield from _iterate_schedulers(part)
