"""What each rank's memory was really filled with, beside what a plan foretold.

An engine counts the tensors that stay from step to step: parameters, gradients and optimiser state are the bytes of
their storages on that rank, each storage once. What comes and goes (activations, buffers of collectives, what malloc
keeps) is too short-lived to be counted; it is the rest of the most that the process grew to while it took steps, over
what it held just before the job was made. So a model, a batch and a strategy show as they are, and the interpreter
with its libraries does not.

On a CPU that is resident memory, of which rows of the data that the process has read are a part. Arithmetic only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from dtkit.planning.cost_model import Plan, PlanRow


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """What an engine tells of one job. Bytes on this rank."""

    sent_model: int
    """The model as it was sent, where the engine keeps it in the same memory as the copy that trains."""
    parameters: int
    """And buffers."""
    gradients: int
    optimizer: int
    process_growth: int | None
    """The most that the process grew by while it took steps; None before the first, or where nobody counts."""
    limit: int | None
    """What the job could have had when it was made; None without a limit of its own."""
    snapshots: int = 0
    """Of its part and of a peer's, in the process's memory; not in `process_growth`."""


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One rank. Bytes; `planned` is the plan's row of the same strategy and rank, if there was a plan."""

    rank: int
    sent_model: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    """The most that came and went besides: all that is left of `peak`. None where that is not known."""
    peak: int | None
    """The most that the rank held at once, the model as it was sent included."""
    limit: int | None
    """What it could have had; None without a limit of its own."""
    planned: PlanRow | None = None
    snapshots: int = 0
    """What snapshots in memory take besides, where there is room for them; in none of the others, and in no plan."""

    @classmethod
    def from_usage(cls, rank: int, held: MemoryUsage, planned: PlanRow | None) -> MemoryRow:
        """From what an engine told."""
        stays = held.parameters + held.gradients + held.optimizer
        return cls(
            rank=rank,
            sent_model=held.sent_model,
            parameters=held.parameters,
            gradients=held.gradients,
            optimizer=held.optimizer,
            activations=None if held.process_growth is None else max(0, held.process_growth - stays),
            peak=None if held.process_growth is None else held.sent_model + max(held.process_growth, stays),
            limit=None if held.limit is None else held.limit + held.sent_model,
            planned=planned,
            snapshots=held.snapshots,
        )

    @property
    def total(self) -> int:
        """`peak`, or what is known of it: the tensors that stay."""
        return self.sent_model + self.parameters + self.gradients + self.optimizer + (self.activations or 0)


class Memory:
    """Memory by rank, as measured, and as planned behind it. Shows itself as a table; :meth:`figure` draws it."""

    def __init__(self, name: str, strategy: str, step: int, rows: Sequence[MemoryRow]) -> None:
        self.name, self.strategy, self.step = name, strategy, step
        self.rows = tuple(rows)
        """One :class:`MemoryRow` a rank."""

    @classmethod
    def from_reports(
        cls, name: str, strategy: str, step: int, reports: Sequence[MemoryUsage], plan: Plan | None = None
    ) -> Memory:
        """From what every engine told, by rank. Raises ValueError where `plan` is of something else."""
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
        """The most that any rank held at once; None where that is not known."""
        return max((row.peak for row in self.rows if row.peak is not None), default=None)

    def figure(self) -> Figure:
        """A bar a rank: measured in colour, planned as a hollow bar behind it, the limit as a black mark."""
        from dtkit.dashboard.figures import memory_figure

        return memory_figure.draw_figure(self)

    def to_pandas(self) -> Any:
        """A pandas DataFrame, a row a rank; what was planned in columns that begin with ``planned_``."""
        import pandas as pd

        names = ("sent_model", "parameters", "gradients", "optimizer", "activations", "peak")
        found = []
        for row in self.rows:
            parts = convert_plan_row(row)
            line = {"rank": row.rank, **{name: getattr(row, name) for name in (*names, "limit", "snapshots")}}
            found.append(line | {f"planned_{name}": parts and parts[name] for name in names})
        return pd.DataFrame(found)

    def __repr__(self) -> str:
        from dtkit.dashboard.figures import memory_figure

        return memory_figure.format_text(self)

    def _repr_html_(self) -> str:
        from dtkit.dashboard.figures import memory_figure

        return memory_figure.format_html(self)


def convert_plan_row(row: MemoryRow) -> dict[str, int] | None:
    """What was planned for a rank, in the parts that can be measured: what comes and goes is one of them."""
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
