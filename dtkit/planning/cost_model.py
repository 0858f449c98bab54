"""Cost model: memory, traffic and time of a step, predicted from measurements. Arithmetic only.

:mod:`dtkit.planning.profiler` measures a *profile* (of a model, on one rank) and :mod:`dtkit.planning.planner` a
*benchmark* (of the engines and their links). ``strategy.estimate_cost(profile, benchmark)`` returns a :class:`Cost` for
one rank. A :class:`~dtkit.planning.plan.Plan` compares it with the free memory.

The peak of a rank is persistent memory plus the larger temporary part. Persistent are the model as sent, the copy that
trains, gradients and optimizer state. The temporary parts are that of forward and backward, including the batch, and
that of the update. Not counted are the data set (shared by engines of a host), and workspace inside of operations. The
interpreter and its libraries don't count either: they are loaded before the free memory is read.

Times assume that ranks wait for the slowest one. The benchmark's overlap is the share of an all-reduce that backward
hides.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dtkit._util import views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from dtkit.planning.layer_chain import LayerChain


MAX_WHOLE_SUM_BYTES = 2**16  # of a direct sum in which each rank sends all numbers to each other one


# --- measurements -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LinearFit:
    """Quantity that grows with the rows of a batch: intercept + slope * rows."""

    intercept: float = 0.0
    slope: float = 0.0

    @classmethod
    def from_points(cls, points: Sequence[tuple[float, float]]) -> LinearFit:
        """Return the line through the first and last of these (rows, value), or through zero for a single point."""
        (x, y), (x2, y2) = points[0], points[-1]
        if x == x2:
            return cls(0.0, y2 / x2)
        slope = max(0.0, (y2 - y) / (x2 - x))  # a larger batch is faster only by noise
        return cls(max(0.0, y2 - slope * x2), slope)

    def predict(self, rows: float) -> float:
        """Return the value for so many rows."""
        return self.intercept + self.slope * rows


@dataclasses.dataclass(frozen=True)
class LinkSpeeds:
    """One rank's part of a :class:`Benchmark`."""

    flops: float
    all_reduce_times: list[tuple[int, float]]
    """Bytes and seconds."""
    pairs: dict[int, tuple[float, float]]
    """Latency in seconds and bytes per second, to each higher rank."""
    overlap: float
    direct_sum_times: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Bytes and seconds."""


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Part of a :class:`ModelProfile` that doesn't depend on the batch. Bytes."""

    parameters: int
    gradients: int
    shapes: tuple[tuple[int, ...], ...]
    optimizer_state: int | None
    """None if the optimizer could not be tried on the meta device, for `reason`."""
    update_peak: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ActivationPeak:
    """Peak memory of forward and backward, besides parameters and gradients, and number of operations."""

    rows: int
    nbytes: int
    flops: int = 0
    has_hidden_workspace: bool = False
    """Whether some operation allocates memory that can't be counted."""


@dataclasses.dataclass(frozen=True)
class AvailableMemory:
    """One rank's part of a :class:`MemoryBudget`: the memory that its engine can get."""

    free_bytes: int
    swap_bytes: int
    job_bytes: int
    limit_bytes: int | None


@dataclasses.dataclass(frozen=True)
class StepTimings:
    """Times and memory of some real steps on one rank."""

    points: Sequence[tuple[float, float, float]]
    """Rows, seconds of forward, and seconds of backward."""
    update_s: float = 0.0
    optimizer_bytes: int = 0
    """Size of the optimizer state."""
    rows: int = 1
    process_growth: int | None = None
    """Largest growth of the process in steps of `rows`, in bytes; None if the system can't measure it."""
    activation_peaks: Sequence[ActivationPeak] = ()
    """Memory of forward and backward, if it was asked for."""

    @classmethod
    def from_estimate(cls, row_s: float) -> StepTimings:
        """Return timings without a measurement: `row_s` seconds for each row, a third of them in forward."""
        return cls([(1, row_s / 3, 2 * row_s / 3)])


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """Memory and time of a model on one rank, independent of the strategy. Bytes and seconds."""

    rows: int
    """This rank's samples of a global batch."""
    sent_model: int
    """The model as it was sent, kept for the next run and `verify`; 0 if it is in other memory."""
    parameters: int
    """Parameters and buffers of the copy that trains."""
    gradients: int
    """Gradients of trained parameters, without sparse ones."""
    optimizer_state: int
    """State that the optimizer keeps from step to step."""
    update_temporaries: int
    """Temporary memory of the update."""
    activations: LinearFit = dataclasses.field(default_factory=LinearFit)
    """Peak memory of forward and backward, by rows: inputs, saved tensors, temporaries, and gradients in flight."""
    overhead: LinearFit = dataclasses.field(default_factory=LinearFit)
    """Further growth of the process: freed memory that malloc keeps, and workspace of backends."""
    forward_s: LinearFit = dataclasses.field(default_factory=LinearFit)
    backward_s: LinearFit = dataclasses.field(default_factory=LinearFit)
    update_s: float = 0.0
    gradient_shapes: tuple[tuple[int, ...], ...] = ()
    rank: int = 0
    model: Any = None
    """The nn.Module, if the notebook has it, for strategies that depend on its structure. It is never run."""
    layer_chain: LayerChain | None = None
    """Chain of layers, for strategies that cut the model; None if it is unknown."""

    def estimate_compute_s(self, micro_batches: int = 1) -> float:
        """Return the seconds of computation in one step with so many micro-batches."""
        rows = self.rows / micro_batches
        return micro_batches * (self.forward_s.predict(rows) + self.backward_s.predict(rows)) + self.update_s


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Speed of the engines and of their links. Notebooks show it as a table; :meth:`figure` returns heat maps.

    All ranks are measured at the same time, as in training. Only pairs are measured one after the other.
    """

    dtype: str
    """Dtype of the matrices, such as "float32"."""
    backend: str
    flops: tuple[float, ...]
    """Floating-point operations per second in a large matrix product, by rank."""
    all_reduce_timings: tuple[tuple[int, float], ...]
    """Bytes and seconds of an all-reduce over all ranks, in order of size; empty for one rank."""
    latency_s: tuple[tuple[float, ...], ...]
    """One-way seconds from rank to rank, for a message of 8 bytes; NaN on the diagonal."""
    bandwidth: tuple[tuple[float, ...], ...]
    """Bytes per second from rank to rank, for messages of 1 MiB; NaN on the diagonal."""
    overlap: float
    """Share of an all-reduce that a computation of the same length hides, from 0 to 1."""
    duration_s: float
    direct_sum_timings: tuple[tuple[int, float], ...] = ()
    """Bytes and seconds of a direct sum, by sockets and memory of the ranks' one host. Empty for several hosts."""

    @classmethod
    def memory_only(cls, world_size: int) -> Benchmark:
        """Return a benchmark for estimates of memory only: communication takes no time."""
        return cls("", "", (math.nan,) * world_size, (), (), (), 0.0, 0.0)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.flops)

    def estimate_all_reduce_s(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce, by linear interpolation and extrapolation of the measurements."""
        return _interpolate(self.all_reduce_timings, nbytes)

    @property
    def sums_directly(self) -> bool:
        """Whether ranks sum plain numbers by sockets and memory of their host, without gloo."""
        return bool(self.direct_sum_timings)

    def estimate_sum_s(self, nbytes: float) -> float:
        """Return the seconds of a sum of plain numbers: a direct one, or else an all-reduce."""
        if self.sums_directly:
            return _interpolate(self.direct_sum_timings, nbytes)
        return self.estimate_all_reduce_s(nbytes)

    def compute_sum_bytes(self, nbytes: float) -> float:
        """Return the bytes that a rank sends in a sum of plain numbers."""
        if self.sums_directly and nbytes <= MAX_WHOLE_SUM_BYTES:
            return (self.world_size - 1) * nbytes
        return compute_ring_bytes(nbytes, self.world_size)

    @property
    def all_reduce_bytes_s(self) -> float:
        """Bandwidth of the links in the largest all-reduce, in which each rank sends 2 (N - 1) / N of its bytes."""
        if not self.all_reduce_timings:
            return math.nan
        size, seconds = self.all_reduce_timings[-1]
        return compute_ring_bytes(size, self.world_size) / seconds

    def figure(self) -> Figure:
        """Return a figure of latency and bandwidth between ranks, and of each rank's matrix rate."""
        return views.draw(self)

    def __repr__(self) -> str:
        return views.format_text(self)

    def _repr_html_(self) -> str:
        return views.format_html(self)


def _interpolate(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Return the seconds for so many bytes, by linear interpolation and extrapolation of (bytes, seconds)."""
    if not points or nbytes <= 0:
        return 0.0
    k = max(1, sum(size < nbytes for size, _ in points[:-1]))
    if len(points) == 1 or nbytes <= points[0][0]:
        return points[0][1]
    return max(points[0][1], LinearFit.from_points(points[k - 1 : k + 1]).predict(nbytes))


def compute_ring_bytes(nbytes: float, world_size: int) -> float:
    """Return the bytes that a rank sends in a ring all-reduce: 2 (N - 1) / N of all (Patarasu and Yuan, JPDC 2009)."""
    return 2 * (world_size - 1) / world_size * nbytes


# --- costs --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a strategy on one rank. Bytes and seconds; traffic and times are averages over steps."""

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    """Peak memory of forward and backward."""
    temporaries: int
    """Peak memory of synchronization and update, after activations are freed."""
    overhead: int
    """Memory of the process beyond its tensors."""
    sent_bytes: float
    """NaN if unknown."""
    compute_s: float
    exposed_communication_s: float
    """Communication that is not hidden behind computation."""

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
        """Return the cost of a rank with a full replica, except for the passed fields."""
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
        """Memory that stays from step to step, whatever the batch."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def transient_bytes(self) -> int:
        """Peak of temporary memory."""
        return max(self.activations, self.temporaries)


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """Memory that one rank can get. Ranks of one `pool` (a host, or a GPU) share its free memory."""

    pool: str
    free: int
    """Bytes free in the pool."""
    reusable: int = 0
    """Bytes of an earlier run on this rank, which the next run frees."""
    swap: int = 0
    """Bytes of swap space of the pool."""
    limit: int | None = None
    """Bytes that this process may still allocate; None without a limit of its own."""


def divide_memory(
    needed_bytes: Sequence[float], memory_budgets: Sequence[MemoryBudget], *, include_swap: bool = False
) -> list[int]:
    """Return each rank's available memory: a share of its pool in proportion to needs, up to its own limit.

    Either all ranks of a pool fit or none, because they need the memory at the same time.
    """
    shares = []
    for needed, budget in zip(needed_bytes, memory_budgets, strict=True):
        pool = [(n, b) for n, b in zip(needed_bytes, memory_budgets, strict=True) if b.pool == budget.pool]
        free = max(b.free + include_swap * b.swap for _, b in pool) + sum(b.reusable for _, b in pool)
        total = sum(n for n, _ in pool)
        share = int(free * needed / total) if total else free // len(pool)
        shares.append(share if budget.limit is None else min(share, budget.limit + budget.reusable))
    return shares
