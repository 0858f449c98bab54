"""Will it fit, and what will it cost: memory, bytes and time predicted from what was measured. Arithmetic only.

What is measured, and where, is :mod:`dtkit.planning.planner`'s matter. It comes here as *facts* (of a model, on one
rank) and a *benchmark* (of the engines and what lies between them). Each strategy answers for itself:
``strategy.cost(facts, benchmark)`` says what one rank then holds, sends and waits for. A :class:`Plan` lays that beside
the memory that is free.

What a rank holds at its worst is the sum of what stays (the model as it was sent, the copy that trains, gradients,
optimiser state) and of the larger of what comes and goes: what forward and backward hold at their peak, batch
included, or what the update does. Not counted: the data set (which engines of a host share), what backends use inside
of one operation (a convolution's workspace, say), and the interpreter with its libraries, which are there already when
the free memory is read.

Times assume that ranks wait for the slowest one, and that of an all-reduce as much hides behind backward as the
benchmark saw to hide behind a product of matrices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from dtkit.planning.layer_chain import LayerChain


# --- what was measured --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LinearFit:
    """A quantity that grows with the rows of a batch: fixed + per_row * rows."""

    intercept: float = 0.0
    slope: float = 0.0

    @classmethod
    def from_points(cls, points: Sequence[tuple[float, float]]) -> LinearFit:
        """The line through the first and the last of some (rows, value); through zero where that is one point."""
        (x, y), (x2, y2) = points[0], points[-1]
        if x == x2:
            return cls(0.0, y2 / x2)
        slope = max(0.0, (y2 - y) / (x2 - x))  # clocks are noisy: no batch is faster for being larger
        return cls(max(0.0, y2 - slope * x2), slope)

    def predict(self, rows: float) -> float:
        """The value for so many rows."""
        return self.intercept + self.slope * rows


@dataclasses.dataclass(frozen=True)
class StepTimings:
    """What some real steps of a model took one rank."""

    points: Sequence[tuple[float, float, float]]
    """(rows, forward in seconds, backward in seconds)."""
    update_s: float = 0.0
    optimizer_bytes: int = 0
    """Bytes that the optimiser keeps."""
    rows: int = 1
    process_growth: int | None = None
    """Bytes by which the process grew at most in steps of so many rows; None where the system does not say."""
    activation_peaks: Sequence[Any] = ()
    """What forward and backward held, where that was asked: :class:`dtkit.engine.dry_run.ActivationPeak`."""

    @classmethod
    def from_estimate(cls, row_s: float) -> StepTimings:
        """Without a step: so many seconds a row, of which forward takes a third."""
        return cls([(1, row_s / 3, 2 * row_s / 3)])


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """What one rank was measured to need for a model, apart from any strategy. Bytes and seconds."""

    rows: int
    """This rank's samples of a global batch."""
    sent_model: int
    """The model as it was sent, which the engine keeps for the next run and for `verify`; 0 where it lies elsewhere."""
    parameters: int
    """Of a copy to train: parameters and buffers."""
    gradients: int
    """Of the parameters that are trained (sparse gradients aside)."""
    optimizer_state: int
    """What the optimiser keeps from step to step."""
    update_temporaries: int
    """What the update holds besides while it runs."""
    activations: LinearFit = dataclasses.field(default_factory=LinearFit)
    """What forward and backward hold besides, at their peak, by rows: inputs, what is saved for backward, temporaries,
    and gradients on their way."""
    overhead: LinearFit = dataclasses.field(default_factory=LinearFit)
    """What the process was seen to grow by beyond all these: freed memory that malloc keeps, workspace of backends."""
    forward_s: LinearFit = dataclasses.field(default_factory=LinearFit)
    backward_s: LinearFit = dataclasses.field(default_factory=LinearFit)
    update_s: float = 0.0
    gradient_shapes: tuple[tuple[int, ...], ...] = ()
    """Of the gradients."""
    rank: int = 0
    model: Any = None
    """The nn.Module where the notebook has it, for what depends on its form. Nobody runs it."""
    layer_chain: LayerChain | None = None
    """Its chain of layers, for a strategy that cuts it there; None where they are not known."""

    def estimate_compute_s(self, micro_batches: int = 1) -> float:
        """Seconds of computing in one step, whose rows come in so many micro-batches."""
        rows = self.rows / micro_batches
        return micro_batches * (self.forward_s.predict(rows) + self.backward_s.predict(rows)) + self.update_s


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What engines can do, and what lies between them. Shows itself as a table; :meth:`figure` is a heat map.

    Measured on all ranks at once, as in training, except for pairs: one pair after the other.
    """

    dtype: str
    """What the matrix rate is of, such as "float32"."""
    backend: str
    flops: tuple[float, ...]
    """Floating-point operations per second of a large product of matrices, by rank."""
    all_reduce_timings: tuple[tuple[int, float], ...]
    """(bytes, seconds) of one all-reduce over all ranks, by growing size; empty for one rank."""
    latency_s: tuple[tuple[float, ...], ...]
    """One way from rank to rank, for a message of 8 bytes; NaN on the diagonal."""
    bandwidth: tuple[tuple[float, ...], ...]
    """Bytes per second from rank to rank, for messages of 1 MiB; NaN on the diagonal."""
    overlap: float
    """How much of an all-reduce hides behind a computation of the same length: 0 none, 1 all of it."""
    duration_s: float

    @classmethod
    def memory_only(cls, world_size: int) -> Benchmark:
        """For questions of memory alone: an all-reduce takes no time here."""
        return cls("", "", (math.nan,) * world_size, (), (), (), 0.0, 0.0)

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.flops)

    def estimate_all_reduce_s(self, nbytes: float) -> float:
        """Seconds of an all-reduce of so many bytes: a straight line between what was measured, and on beyond it."""
        points = self.all_reduce_timings
        if not points or nbytes <= 0:
            return 0.0
        k = max(1, sum(size < nbytes for size, _ in points[:-1]))
        if len(points) == 1 or nbytes <= points[0][0]:
            return points[0][1]
        return max(points[0][1], LinearFit.from_points(points[k - 1 : k + 1]).predict(nbytes))

    @property
    def all_reduce_bytes_s(self) -> float:
        """Bandwidth of the largest all-reduce as the links saw it: 2 (N - 1) / N of its bytes a second, per rank."""
        if not self.all_reduce_timings:
            return math.nan
        size, seconds = self.all_reduce_timings[-1]
        return compute_ring_bytes(size, self.world_size) / seconds

    def figure(self) -> Figure:
        """Latency and bandwidth from rank to rank, and the matrix rate of each."""
        from dtkit.dashboard.figures import plan_figure

        return plan_figure.draw_benchmark(self)

    def __repr__(self) -> str:
        from dtkit.dashboard.figures import plan_figure

        return plan_figure.format_benchmark_text(self)

    def _repr_html_(self) -> str:
        from dtkit.dashboard.figures import plan_figure

        return plan_figure.format_benchmark_html(self)


def compute_ring_bytes(nbytes: float, world_size: int) -> float:
    """What each rank sends in a ring all-reduce of `nbytes`: 2 (N - 1) / N of it (Patarasu and Yuan, JPDC 2009)."""
    return 2 * (world_size - 1) / world_size * nbytes


# --- what it would cost -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a strategy asks of one rank. Bytes and seconds; what is sent and how long, per step on average.

    What is sent is NaN where it can't be told.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    """The most that forward and backward hold besides."""
    temporaries: int
    """The most that synchronising and updating hold besides, when activations are gone."""
    overhead: int
    """What the process takes beyond its tensors."""
    sent_bytes: float
    compute_s: float
    exposed_communication_s: float
    """Communication that nothing hides."""

    @classmethod
    def for_replica(
        cls,
        profile: ModelProfile,
        *,
        sent_bytes: float,
        exposed_s: float,
        micro_batches: int = 1,
        gradients: int | None = None,
        optimizer_state: int | None = None,
        temporaries: int | None = None,
    ) -> Cost:
        """Of a rank with a whole copy of the model, save what is given."""
        rows = profile.rows / micro_batches
        return cls(
            parameters=profile.parameters,
            gradients=profile.gradients if gradients is None else gradients,
            optimizer_state=profile.optimizer_state if optimizer_state is None else optimizer_state,
            activations=round(profile.activations.predict(rows)),
            temporaries=profile.update_temporaries if temporaries is None else temporaries,
            overhead=round(profile.overhead.predict(rows)),
            sent_bytes=sent_bytes,
            compute_s=profile.estimate_compute_s(micro_batches),
            exposed_communication_s=exposed_s,
        )

    @property
    def persistent_bytes(self) -> int:
        """What stays in memory from step to step, whatever the batch."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def transient_bytes(self) -> int:
        """What comes and goes, at its peak."""
        return max(self.activations, self.temporaries)


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """Memory that one rank can get. Ranks of one `pool` (a host, or a GPU) share what is free there."""

    pool: str
    free: int
    """Bytes free in the pool."""
    reusable: int = 0
    """Bytes of the pool that an earlier run of this rank holds, and gives back when the next one starts."""
    swap: int = 0
    """Bytes of swap space that the pool could fall back on."""
    limit: int | None = None
    """Bytes that this rank's process may still allocate, where it has a limit of its own."""


def divide_memory(
    needed_bytes: Sequence[float], memory_budgets: Sequence[MemoryBudget], *, include_swap: bool = False
) -> list[int]:
    """What each rank can have: its part of its pool in proportion to needs, within its own limit.

    All ranks of a pool fit or none does, since they need it at the same time. `swap` counts swap space as free.
    """
    found = []
    for need, room in zip(needed_bytes, memory_budgets, strict=True):
        mates = [(n, r) for n, r in zip(needed_bytes, memory_budgets, strict=True) if r.pool == room.pool]
        free = max(r.free + include_swap * r.swap for _, r in mates) + sum(r.reusable for _, r in mates)
        total = sum(n for n, _ in mates)
        share = int(free * need / total) if total else free // len(mates)
        found.append(share if room.limit is None else min(share, room.limit + room.reusable))
    return found


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One strategy on one rank. Bytes and seconds; `step_s` is NaN where the computing was not measured."""

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
    """The most that a step holds besides: in forward and backward, or in the update if that is more."""
    overhead: int
    """What processes take beyond their tensors."""
    needed: int
    """The sum of these."""
    free: int
    """This rank's part of the memory that is free."""
    sent_bytes: float
    """Per step; NaN where that is not counted."""
    compute_s: float
    communication_s: float
    """Not hidden behind computing."""
    step_s: float
    """Of the slowest rank's computing, and communication."""

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.needed <= self.free


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each strategy would need and cost, one row per strategy and rank; see :meth:`dtkit.Cluster.plan`.

    Shows itself as a table; `figure()` draws it, `to_pandas()` gives the rows as a DataFrame.
    """

    model: str
    batch_size: int
    world_size: int
    rows: tuple[PlanRow, ...]
    benchmark: Benchmark
    notes: tuple[str, ...] = ()
    """How it was measured, and what is not counted."""

    @property
    def fitting(self) -> tuple[str, ...]:
        """The strategies that fit on every rank."""
        return tuple(name for name in self.strategies if all(row.fits for row in self.get_rows(name)))

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies, in order."""
        return tuple(dict.fromkeys(row.strategy for row in self.rows))

    def get_rows(self, strategy: object) -> tuple[PlanRow, ...]:
        """The rows of one strategy (or of its text), by rank."""
        found = tuple(row for row in self.rows if row.strategy == str(strategy))
        if not found:
            raise ValueError(f"{strategy!r} is not in this plan; it has {', '.join(self.strategies)}")
        return found

    def figure(self) -> Figure:
        """Memory against what is free, and time per step, by strategy."""
        from dtkit.dashboard.figures import plan_figure

        return plan_figure.draw_plan(self)

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame([{**dataclasses.asdict(row), "fits": row.fits} for row in self.rows])

    def __repr__(self) -> str:
        from dtkit.dashboard.figures import plan_figure

        return plan_figure.format_plan_text(self)

    def _repr_html_(self) -> str:
        from dtkit.dashboard.figures import plan_figure

        return plan_figure.format_plan_html(self)


def build_rows(
    strategy: str, profile: Sequence[ModelProfile], costs: Sequence[Cost], memory_budgets: Sequence[MemoryBudget]
) -> list[PlanRow]:
    """One strategy's rows: what each rank needs, beside what it can have."""
    needs = [
        f.sent_model + c.persistent_bytes + c.transient_bytes + c.overhead for f, c in zip(profile, costs, strict=True)
    ]
    step_s = max(c.compute_s for c in costs) + max(c.exposed_communication_s for c in costs)
    return [
        PlanRow(
            strategy=strategy,
            rank=rank,
            rows=fact.rows,
            sent_model=fact.sent_model,
            parameters=cost.parameters,
            gradients=cost.gradients,
            optimizer=cost.optimizer_state,
            activations=cost.transient_bytes,
            overhead=cost.overhead,
            needed=need,
            free=free,
            sent_bytes=cost.sent_bytes if math.isnan(cost.sent_bytes) else round(cost.sent_bytes),
            compute_s=cost.compute_s,
            communication_s=cost.exposed_communication_s,
            step_s=step_s,
        )
        for rank, (fact, cost, need, free) in enumerate(
            zip(profile, costs, needs, divide_memory(needs, memory_budgets), strict=True)
        )
    ]


def find_shortage(needed_bytes: Sequence[int], memory_budgets: Sequence[MemoryBudget]) -> tuple[int, int, int] | None:
    """(rank, needed, free) of the rank that lacks most, or None where all fit, swap space included."""
    free = divide_memory(needed_bytes, memory_budgets, include_swap=True)
    rank = max(range(len(needed_bytes)), key=lambda r: needed_bytes[r] - free[r])
    return (rank, needed_bytes[rank], free[rank]) if needed_bytes[rank] > free[rank] else None


def describe_persistent(cost: Cost, sent_model: int) -> str:
    """What a rank's certain need is made of, as text."""
    parts = {
        "the model as sent": sent_model,
        "parameters": cost.parameters,
        "gradients": cost.gradients,
        "optimiser state": cost.optimizer_state,
    }
    return ", ".join(f"{name} {formatting.format_bytes(count)}" for name, count in parts.items() if count)
