"""Plain frozen data that notebook and engines send each other. What a user sees of them is in `dtkit.types`.

Nothing here imports torch, numpy or ipyparallel, so that every layer may use these types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

if TYPE_CHECKING:
    from dtkit.types import Failure, Scalars

R = TypeVar("R")

END_EARLY_PREFIX = "end-early-"
"""Prefix of a file in the cluster's folder, before a job's key. The file makes the ranks end their dispatch early."""

ABORT_FLAG = ".off"
"""Suffix of a file next to a group's store. If the file exists, a rank could not join, and no rank waits for it."""

ALL_STATE, PER_RANK_STATE, OPTIMIZER_STATE = "all", "per_rank", "optimizers"
"""Parts of a job's state that a rank exports: all, the part that differs by rank, or that part's optimizers."""

Fingerprint = Mapping[tuple[int, ...], int]
"""Checksums of one rank's parameters, by the part of the model (see `Strategy.model_shard_id`).

The part () is on all ranks. Ranks that hold the same part must have the same checksum.
"""


class EngineDescription(TypedDict):
    """An engine's report for its :class:`NodeInfo`."""

    host: str
    pid: int
    device: str
    memory_total: int
    memory_free: int
    threads: int
    cores: int


@dataclasses.dataclass(frozen=True)
class StoreAddress:
    """Place of the store at which the ranks of several hosts meet."""

    address: str
    port: int
    key: bytes = dataclasses.field(repr=False)
    """Secret that every connection must know."""
    generation: int


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Settings with which one engine joins the process group of one generation."""

    rank: int
    world_size: int
    generation: int
    backend: str
    """"gloo", or "cpu:gloo,cuda:nccl" where every rank has a GPU of its own."""
    device: str
    store_path: str
    """Path of this generation's FileStore. Each has its own, so that no late message of a broken group joins it."""
    interface: str
    """Network interface of collectives; the loopback one unless the user names another."""
    threads: int | None
    timeout_s: float
    store: StoreAddress | None = None
    """Store between hosts that share no folder; `store_path` is then a path on the rank's own host, without a file."""


@dataclasses.dataclass(frozen=True)
class JobPosition:
    """A rank's position in its job."""

    step: int
    is_intact: bool
    """Whether its parameters are of that step."""
    lr: float = 0.0
    snapshots: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    """Snapshots in its memory: {step: ranks whose parts it holds}."""


class SnapshotReport(TypedDict):
    """Result of one rank's part of a snapshot."""

    error: str | None
    seconds: float
    """Time for which the training was interrupted."""


class CheckpointReport(SnapshotReport):
    """Result of the first part of a checkpoint on one rank: the copy of its state."""

    torch: str
    """Version of torch on the engine."""
    is_remote: bool
    """Whether the rank writes into its host's private folder, because it doesn't see the checkpoint's."""


OutputItem = tuple[str, Any]
"""Output of a call: ("text", line), ("row", {name: number}) from `dtkit.log`, or ("progress", a line without end)."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One call to one engine, which refuses it unless owner and generation match its own."""

    op: str
    owner_id: int
    generation: int
    args: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class EngineInventory:
    """State of an engine that a notebook attaches to."""

    rank: int
    generation: int
    job_steps: dict[str, int]
    """Step of each job."""


@dataclasses.dataclass(frozen=True)
class Reply(Generic[R]):
    """An engine's answer: a value, or a failure."""

    value: R | None = None
    failure: Failure | None = None

    def unwrap(self) -> R:
        """Return the value of an operation that succeeded; None if that is its value."""
        assert self.failure is None
        return self.value  # type: ignore[return-value]


NonFiniteLocations = tuple[tuple[int, str], ...]
"""(stage, "output" or "gradient") for each value of a rank that was not finite."""


@dataclasses.dataclass(frozen=True)
class NonFiniteReport:
    """One rank's report of a step that was not finite, and that no rank took."""

    loss: float | None = None
    """The rank's loss in that step."""
    locations: NonFiniteLocations = ()
    """In a pipeline, the values of the rank's stages that are not finite."""
    bad_rows: str = ""
    """Which rows of the rank's batch are not finite or far too large, in words; "" for none."""
    largest_parameter: float = 0.0
    """Largest absolute value of the rank's parameters."""


@dataclasses.dataclass(frozen=True)
class DispatchResult:
    """Result of a dispatch on one rank. `rows` has dtype :data:`~dtkit.history.history.ROW_DTYPE`."""

    rows: object
    step: int
    lr: float
    end_reason: str = "done"
    """Why it ended: "done", "time" (all ranks agree that steps are slow), "nonfinite", "exhausted" (a stream's end)."""
    nonfinite: NonFiniteReport = NonFiniteReport()
    """With "nonfinite", what the rank reports of the step that was not taken."""
    blocked_spans: object = None
    """Blocked spans (steps, collectives, 3): begin, end in s on the rank's clock, group's number; NaN for none."""
    messages: object = None
    """Messages with other stages, of dtype :data:`~dtkit.history.comm_time.MESSAGE_DTYPE`; None if there were none."""
    scalars: Scalars = dataclasses.field(default_factory=dict)
    """Numbers that the steps passed to `dtkit.log`."""
    fingerprint: Fingerprint | None = None
    """Checksums after the last step, if the notebook asked for them."""
    fingerprint_s: float = 0.0
    """Time that the checksums took."""
    step_report: object = None
    """This rank's report of a step that is explained."""
    spans: object = None
    """Timeline of the last steps, of dtype :data:`~dtkit.history.timeline.SPAN_DTYPE`."""
    between: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds since the steps before, by what the rank did: see :mod:`dtkit.history.between_steps`."""
