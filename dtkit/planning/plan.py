"""Plans: the memory that each strategy would need on each rank, next to the free memory."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting, views
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit.planning.cost_model import divide_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from dtkit.planning.cost_model import Benchmark, Cost, MemoryBudget, ModelProfile


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One strategy on one rank. Bytes and seconds; `step_s` is NaN if the computation was not measured."""

    strategy: str
    rank: int
    rows: int
    """Samples of a global batch."""
    sent_model: int
    """The model as it was sent, kept on the engine."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Peak of everything temporary: in forward and backward, or in the update if that is more."""
    overhead: int
    """Memory of the process beyond its tensors."""
    needed: int
    """Sum of these."""
    free: int
    """This rank's share of the free memory."""
    sent_bytes: float
    """Bytes for each step; NaN if not counted."""
    compute_s: float
    communication_s: float
    """Time that is not hidden behind computation."""
    step_s: float
    """Time of a step: measured if `is_measured`, else that of computation on the slowest rank and of communication."""
    is_measured: bool = False
    """Whether the engines took steps under this strategy, which they do for short steps that surely fit."""

    @property
    def is_traffic_counted(self) -> bool:
        """Whether bytes and time of communication are known; else `step_s` is a lower bound."""
        return not math.isnan(self.sent_bytes)

    @property
    def other_s(self) -> float:
        """Rest of a measured step: loading rows, Python between operations, waiting for the slowest rank.

        Also all communication, if it is not counted.
        """
        if not self.is_measured:
            return math.nan
        return max(0.0, self.step_s - self.compute_s - (self.communication_s if self.is_traffic_counted else 0.0))

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.needed <= self.free


@explain_arguments
@suggest_attributes("plan")
@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and time of each strategy, one row for each strategy and rank; see :meth:`dtkit.Cluster.plan`.

    Notebooks show it as a table. `figure()` draws it, and `to_pandas()` returns the rows as a DataFrame.
    """

    model: str
    batch_size: int
    world_size: int
    rows: tuple[PlanRow, ...]
    benchmark: Benchmark
    notes: tuple[str, ...] = ()
    """Limits of the measurement, and memory that is not counted."""
    one_process: PlanRow | None = None
    """A training of whole batches by rank 0 alone, for comparison; it is not among `rows`."""
    find_largest_batch: Callable[[str], int] = dataclasses.field(default=lambda _: 0, repr=False, compare=False)
    """Function from a strategy's text to :meth:`largest_batch`."""

    def largest_batch(self, strategy: object = None) -> int:
        """Return the most samples per update that fit on every rank, of one strategy; by default of the first one.

        It follows from the same measurements, under the assumption that activations grow evenly with the samples. It is
        0 if not even one sample for each rank fits.
        """
        name = self.strategies[0] if strategy is None else self.get_rows(strategy)[0].strategy
        return self.find_largest_batch(name)

    @property
    def fitting(self) -> tuple[str, ...]:
        """Strategies that fit on every rank."""
        return tuple(name for name in self.strategies if all(row.fits for row in self.get_rows(name)))

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies in order."""
        return tuple(dict.fromkeys(row.strategy for row in self.rows))

    def get_rows(self, strategy: object) -> tuple[PlanRow, ...]:
        """Return the rows of one strategy (or of its text), by rank."""
        rows = tuple(row for row in self.rows if row.strategy == str(strategy))
        if not rows:
            raise ValueError(f"{strategy!r} is not in this plan; choose one of {', '.join(self.strategies)}")
        return rows

    def figure(self) -> Figure:
        """Return a figure of needed and free memory, and of the step time, by strategy."""
        return views.draw(self)

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame([{**dataclasses.asdict(row), "fits": row.fits} for row in self.rows])

    def __repr__(self) -> str:
        return views.format_text(self)

    def _repr_html_(self) -> str:
        return views.format_html(self)


def build_rows(
    strategy: str,
    profiles: Sequence[ModelProfile],
    costs: Sequence[Cost],
    memory_budgets: Sequence[MemoryBudget],
    measured_s: float | None = None,
) -> list[PlanRow]:
    """Return one strategy's rows: each rank's need and its available memory.

    If a step was measured, estimates of its parts don't exceed it.
    """
    needed_bytes = [
        profile.sent_model + cost.persistent_bytes + cost.transient_bytes + cost.overhead
        for profile, cost in zip(profiles, costs, strict=True)
    ]
    estimated_s = max(cost.compute_s for cost in costs) + max(cost.exposed_communication_s for cost in costs)
    step_s = estimated_s if measured_s is None else measured_s
    scale = min(1.0, step_s / estimated_s) if measured_s is not None and estimated_s else 1.0
    free_bytes = divide_memory(needed_bytes, memory_budgets)
    return [
        PlanRow(
            strategy=strategy,
            rank=rank,
            rows=profile.rows,
            sent_model=profile.sent_model,
            parameters=cost.parameters,
            gradients=cost.gradients,
            optimizer=cost.optimizer_state,
            activations=cost.transient_bytes,
            overhead=cost.overhead,
            needed=needed,
            free=free,
            sent_bytes=cost.sent_bytes if math.isnan(cost.sent_bytes) else round(cost.sent_bytes),
            compute_s=scale * cost.compute_s,
            communication_s=scale * cost.exposed_communication_s,
            step_s=step_s,
            is_measured=measured_s is not None,
        )
        for rank, (profile, cost, needed, free) in enumerate(
            zip(profiles, costs, needed_bytes, free_bytes, strict=True)
        )
    ]


@dataclasses.dataclass(frozen=True)
class Shortage:
    """A rank whose memory does not suffice, with bytes."""

    rank: int
    needed: int
    free: int


def find_shortage(needed_bytes: Sequence[int], memory_budgets: Sequence[MemoryBudget]) -> Shortage | None:
    """Return the largest shortage of a rank; None if all fit, including swap space."""
    free = divide_memory(needed_bytes, memory_budgets, include_swap=True)
    rank = max(range(len(needed_bytes)), key=lambda r: needed_bytes[r] - free[r])
    return Shortage(rank, needed_bytes[rank], free[rank]) if needed_bytes[rank] > free[rank] else None


def describe_persistent(cost: Cost, sent_model: int) -> str:
    """Return the parts of a rank's persistent memory as text."""
    parts = {
        "the model as sent": sent_model,
        "parameters": cost.parameters,
        "gradients": cost.gradients,
        "optimizer state": cost.optimizer_state,
    }
    return ", ".join(f"{name} {formatting.format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
