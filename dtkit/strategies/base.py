"""What a parallelism is: how a model is placed on the ranks, and what one synchronised step does.

A `Strategy` is what the user passes: a small frozen description, without state. On each engine, `setup` turns it
into a `Worker`: that rank's part of one job, with its module and optimiser.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence

    import torch

    from dtkit.engine.comm import Group
    from dtkit.engine.probe import Clock
    from dtkit.strategies.objective import Objective


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a worker works. `group` is None where one process plays all shards alone."""

    group: Group | None
    device: torch.device
    clock: Clock
    shards: Sequence[int]
    """The data shards that this worker takes."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One step of one rank. Loss and weight stay on the device; marks are the clock's."""

    loss: torch.Tensor | None
    """Mean over this rank's samples; None without any."""
    weight: torch.Tensor | float
    finite: bool
    """Whether the gradients, reduced over all ranks, are finite: equal on all ranks. If not, nothing was updated."""
    marks: tuple[object, object, object, object]
    """Start of forward, its end, end of backward with communication, end of the update."""


class Strategy(abc.ABC):
    """How to parallelise. Subclasses are frozen dataclasses (with ``repr=False``: see `__repr__`)."""

    def __repr__(self) -> str:
        """What the user typed: options at their defaults are left out."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"

    def check(self, world_size: int) -> None:  # noqa: B027 - most strategies work on any size
        """Raise ValueError where the cluster's size can't work."""

    @abc.abstractmethod
    def setup(
        self,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: Callable[..., Any],
        setting: Setting,
    ) -> Worker:
        """Place `model`, the same on every rank, and make its optimiser."""


class Worker(abc.ABC):
    """One rank's part of one job."""

    optimizer: torch.optim.Optimizer

    @abc.abstractmethod
    def step(self, batch: Any, counts: Sequence[int]) -> Outcome:
        """One synchronised step. `batch` is None where this rank has no sample; `counts` is by shard, all ranks."""

    @abc.abstractmethod
    def whole(self) -> contextlib.AbstractContextManager[torch.nn.Module]:
        """The whole model as it stands, to evaluate or to fetch. A collective: all ranks enter it together."""

    @abc.abstractmethod
    def regroup(self, group: Group) -> None:
        """Go on in a new generation of the process group."""


def make_optimizer(factory: Callable[..., Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """The user's optimiser, with a clear word where it isn't one."""
    import torch

    optimizer = factory([p for p in model.parameters() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer(params) returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer, as in "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss as often as it likes in each step, and ranks take one "
            "gradient a step together. Use an optimiser whose step() needs no closure, such as SGD or AdamW"
        )
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not held or any(id(p) not in own for p in held):
        raise ValueError(
            f"the optimiser holds {len(held)} parameters, not all of them the model's; build it from the `params` that "
            "the function is given: the engine's copy of the model has parameters of its own"
        )
    return optimizer
