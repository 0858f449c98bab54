"""A learning-rate schedule: torch's own scheduler, stepped alike on all ranks, and what a new base rate does to it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.capture import Archive
    from dtkit.strategies.base import StepResult, TrainingProgram

_RATES = ("initial_lr", "max_lr", "min_lr")  # what schedulers keep in an optimiser's groups


class Rates:
    """The learning rates of a job's optimiser: set by hand, followed by a schedule if there is one."""

    def __init__(self, program: TrainingProgram, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._ratios = [1.0] * len(self._groups)
        self._on_train = not program.has_validation
        self._losses: list[tuple[torch.Tensor, torch.Tensor | float]] = []  # (sum, weight) of each step of the epoch
        self._updates = 0  # that the schedule knows of
        self._before: dict[str, Any] | None = None  # how all was before held-out data were last evaluated
        self.schedule: Schedule | None = None
        if program.lr_scheduler is not None:
            self.schedule = Schedule(program.lr_scheduler, optimizer, program.lr_scheduler_interval)
            for group in self._groups:  # as most schedulers do, by which one sees that "lr" is theirs
                group.setdefault("initial_lr", group["lr"])

    def set(self, lr: float) -> None:
        """Give the first group this rate, and the others in proportion."""
        first = self._groups[0]["lr"]
        if first:  # at 0 nothing can be read from it: the proportions stay as they were
            self._ratios = [group["lr"] / first for group in self._groups]
        if self.schedule is not None and first:
            self.schedule.rescale(lr / first)
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            group["lr"] = lr * ratio

    def after(self, outcome: StepResult, updates: int, steps_per_epoch: int, group: Group | None) -> None:
        """An update was made, the `updates`-th."""
        if self.schedule is None:
            return
        epoch_ended = updates % steps_per_epoch == 0
        self._updates = updates
        self.schedule.step(epoch_ended=epoch_ended)
        if self.schedule.wants_metric and self._on_train:
            if outcome.loss is not None:
                self._losses.append((outcome.loss * outcome.loss_weight, outcome.loss_weight))
            if epoch_ended:
                sums = [sum(float(part[k]) for part in self._losses) for k in (0, 1)]
                self._losses.clear()
                self.evaluated(sums[0], sums[1], group)

    def exchange(self, archive: Archive) -> None:
        """Show how rates stand to each other, the schedule, and the losses of the epoch so far."""
        self._ratios = archive.value("lr ratios", self._ratios)
        self._updates = archive.value("lr updates", self._updates)
        if self.schedule is None:
            return
        self.schedule.exchange(archive)
        if self.schedule.wants_metric:
            self._before = archive.value("lr before", self._before)
        losses = [(float(total), float(weight)) for total, weight in self._losses]
        first = archive.rank == 0
        self._losses = archive.own(
            "epoch losses", losses, lambda each: [pair for one in each for pair in one] if first else []
        )

    def keep_up(self, updates: int, steps_per_epoch: int) -> None:
        """As `after`, of a step that failed once its update was made: its loss is not known. Unless that was done."""
        if self.schedule is not None and updates != self._updates:
            self._updates = updates
            self.schedule.step(epoch_ended=updates % steps_per_epoch == 0)

    def held_out(self, updates: int, total: float, weight: float, group: Group | None) -> None:
        """As `evaluated`, of held-out data, after so many updates. If that was done it is done over, and not twice.

        When an evaluation is broken off, some ranks may have taken their losses' mean and others not. How all was
        before is put down before ranks tell each other theirs: where one has taken the mean, all can go back, whoever's
        state they go on with.
        """
        if self.schedule is None or not self.schedule.wants_metric:
            return
        if self._before is not None and self._before["updates"] == updates:
            self._put_back(self.schedule, self._before)
        else:
            rates = [float(group["lr"]) for group in self._groups]
            self._before = {"updates": updates, "rates": rates, "schedule": self.schedule.state()}
        self.evaluated(total, weight, group)

    def _put_back(self, schedule: Schedule, before: dict[str, Any]) -> None:
        schedule.set_state(before["schedule"])
        for group, rate in zip(self._groups, before["rates"], strict=True):
            group["lr"] = rate

    def evaluated(self, total: float, weight: float, group: Group | None) -> None:
        """An epoch has ended with this rank's loss of total / weight. A collective, where the schedule wants it."""
        if self.schedule is None or not self.schedule.wants_metric:
            return
        sums = torch.tensor([total, weight], dtype=torch.float64)
        total, weight = (sums if group is None else group.all_reduce(sums)).tolist()
        if weight:
            self.schedule.step_with(total / weight)


class Schedule:
    """A scheduler over an optimiser, stepped after every "step" or "epoch"."""

    def __init__(self, factory: Callable[..., Any], optimizer: torch.optim.Optimizer, every: str) -> None:
        """Raise TypeError where `factory(optimizer)` gives no torch scheduler of this optimiser."""
        made = factory(optimizer)
        if not isinstance(made, lr_scheduler.LRScheduler):
            raise TypeError(
                f"scheduler(optimizer) returned {type(made).__name__}; it must return a torch scheduler, as in "
                "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)"
            )
        if getattr(made, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                "the scheduler holds another optimiser than the one that the function was given; every rank makes its "
                "own: scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
            )
        self._scheduler, self._optimizer, self._every = made, optimizer, every
        self.wants_metric = isinstance(made, lr_scheduler.ReduceLROnPlateau)
        """Whether it is stepped with a loss, at the end of every epoch."""

    def exchange(self, archive: Archive) -> None:
        """Show the scheduler's state."""
        archive.states("scheduler", self._scheduler, "the scheduler")

    def state(self) -> dict[str, Any]:
        """A copy of the scheduler's state."""
        return copy.deepcopy(self._scheduler.state_dict())

    def set_state(self, state: dict[str, Any]) -> None:
        """Make that the scheduler's state, of which it holds a copy."""
        self._scheduler.load_state_dict(copy.deepcopy(state))

    def step(self, *, epoch_ended: bool) -> None:
        """An update was made."""
        if not self.wants_metric and (self._every == "step" or epoch_ended):
            self._scheduler.step()

    def step_with(self, metric: float) -> None:
        """An epoch has ended with this loss."""
        self._scheduler.step(metric)  # type: ignore[arg-type]

    def rescale(self, ratio: float) -> None:
        """Multiply all base rates, so that the schedule keeps its form."""
        for group in self._optimizer.param_groups:
            for name in _RATES:
                if name in group:
                    group[name] *= ratio
        for scheduler in _all(self._scheduler):
            for name in ("base_lrs", "max_lrs", "_last_lr"):
                if isinstance(found := getattr(scheduler, name, None), list):
                    setattr(scheduler, name, [rate * ratio for rate in found])


def _all(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _all(part)
