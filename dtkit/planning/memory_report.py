"""Measured memory of each rank, next to a plan's prediction. Arithmetic only.

An engine counts the storages of persistent tensors: parameters, gradients and optimizer state, each storage once.
Temporary memory (activations, buffers of collectives, what malloc keeps) is too short-lived to be counted. It is the
rest of the process's peak growth during steps, relative to the time before the job. The interpreter and its libraries
are therefore not included. On a CPU this is resident memory, including rows of data that the process has read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util import views
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from dtkit.planning.plan import Plan, PlanRow


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """Memory of one job on one rank, as the engine reports it. Bytes."""

    sent_model: int
    """The model as sent, if it is in the same memory as the copy that trains."""
    parameters: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    process_growth: int | None
    """Peak growth of the process during steps; None before the first step, or if it can't be measured."""
    limit: int | None
    """Memory that the job could get when it was created; None without a limit of its own."""
    snapshots: int = 0
    """Snapshots of its own shard and of a peer's; not in `process_growth`."""


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Memory of one rank in bytes. `planned` is the plan's row of the same strategy and rank, if there was a plan."""

    rank: int
    sent_model: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    """Peak of temporary memory: the rest of `peak`. None if unknown."""
    peak: int | None
    """Peak of everything, including the model as sent; None if unknown."""
    limit: int | None
    """Memory that the rank could get; None without a limit of its own."""
    planned: PlanRow | None = None
    snapshots: int = 0
    """Snapshots in memory; included in no other field, and in no plan."""

    @classmethod
    def from_usage(cls, rank: int, usage: MemoryUsage, planned: PlanRow | None) -> MemoryRow:
        """Return the row for an engine's report."""
        persistent = usage.parameters + usage.gradients + usage.optimizer
        growth = usage.process_growth
        return cls(
            rank=rank,
            sent_model=usage.sent_model,
            parameters=usage.parameters,
            gradients=usage.gradients,
            optimizer=usage.optimizer,
            activations=None if growth is None else max(0, growth - persistent),
            peak=None if growth is None else usage.sent_model + max(growth, persistent),
            limit=None if usage.limit is None else usage.limit + usage.sent_model,
            planned=planned,
            snapshots=usage.snapshots,
        )

    @property
    def total(self) -> int:
        """`peak`, or its known part: persistent tensors."""
        return self.sent_model + self.parameters + self.gradients + self.optimizer + (self.activations or 0)


@suggest_attributes("memory")
@explain_arguments
class Memory:
    """Measured and planned memory by rank. Notebooks show it as a table; :meth:`figure` draws it."""

    def __init__(self, name: str, strategy: str, step: int, rows: Sequence[MemoryRow]) -> None:
        self.name, self.strategy, self.step = name, strategy, step
        self.rows = tuple(rows)
        """A :class:`MemoryRow` for each rank."""

    @classmethod
    def from_reports(
        cls, name: str, strategy: str, step: int, reports: Sequence[MemoryUsage], plan: Plan | None = None
    ) -> Memory:
        """Return the report for all engines, by rank. Raise ValueError for a plan of another model or world size."""
        planned: Sequence[PlanRow | None] = [None] * len(reports)
        if plan is not None:
            planned = plan.get_rows(strategy)
            if (plan.model, len(planned)) != (name, len(reports)):
                raise ValueError(
                    f"the plan is for {plan.model} on {len(planned)} ranks, and this run trains {name} on "
                    f"{len(reports)}. Give a plan of the same model on the same cluster, or leave it out"
                )
        return cls(
            name,
            strategy,
            step,
            [MemoryRow.from_usage(r, *pair) for r, pair in enumerate(zip(reports, planned, strict=True))],
        )

    @property
    def peak(self) -> int | None:
        """Largest peak of any rank; None if unknown."""
        return max((row.peak for row in self.rows if row.peak is not None), default=None)

    def figure(self) -> Figure:
        """Return a figure with a bar for each rank: measured in color, planned in outline, the limit as a mark."""
        return views.draw(self)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each rank; the plan's columns begin with ``planned_``."""
        import pandas as pd

        names = ("sent_model", "parameters", "gradients", "optimizer", "activations", "peak")
        lines = []
        for row in self.rows:
            parts = convert_plan_row(row)
            line = {"rank": row.rank, **{name: getattr(row, name) for name in (*names, "limit", "snapshots")}}
            lines.append(line | {f"planned_{name}": parts and parts[name] for name in names})
        return pd.DataFrame(lines)

    def __repr__(self) -> str:
        return views.format_text(self)

    def _repr_html_(self) -> str:
        return views.format_html(self)


def convert_plan_row(row: MemoryRow) -> dict[str, int] | None:
    """Return a rank's plan in the parts that can be measured; temporary memory is one of them."""
    plan = row.planned
    if plan is None:
        return None
    return {
        "sent_model": plan.sent_model,
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations + plan.overhead,
        "peak": plan.needed,
    }
