"""Plain frozen data that notebook and engines send each other, and that views read.

Nothing here imports torch, numpy or ipyparallel, so that every layer may use these types.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

from dtkit._util.attributes import suggest_attributes
from dtkit._util.formatting import format_status

R = TypeVar("R")

RESERVED_COLUMNS = ("rank", "index")
"""Columns that the notebook adds to every row of `dtkit.log`."""

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


class State(enum.Enum):
    """State of a run: ``PENDING -> RUNNING <-> PAUSED -> COMPLETED | STOPPED | FAILED``."""

    PENDING = "pending"
    """The job is not yet built on the engines."""
    RUNNING = "running"
    """The notebook sends one dispatch after another."""
    PAUSED = "paused"
    """No dispatch is in flight. All ranks are at the same step, with model and optimizer in memory."""
    COMPLETED = "completed"
    """All steps are done; `extend` adds some."""
    STOPPED = "stopped"
    """The user ended the run for good."""
    FAILED = "failed"
    """An error ended the run; `exception` is that error."""

    @property
    def has_ended(self) -> bool:
        """Return whether no further step follows without `extend`."""
        return self in (State.COMPLETED, State.STOPPED, State.FAILED)


@dataclasses.dataclass(frozen=True)
class NodeInfo:
    """One engine, a row of the cluster's table. Memory is in bytes: the device's on CUDA, else the host's."""

    rank: int
    engine_id: int
    host: str
    pid: int
    device: str
    memory_total: int
    memory_free: int
    threads: int


class EngineDescription(TypedDict):
    """An engine's report for its :class:`NodeInfo`."""

    host: str
    pid: int
    device: str
    memory_total: int
    memory_free: int
    threads: int


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """A layer of a model, with all parameters below it."""

    name: str
    kind: str
    """Name of its class."""
    parameters: int


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """A model's parameters and layers. A shared parameter counts once in `parameters`, and in each of its layers."""

    parameters: int
    trainable: int
    layers: tuple[LayerSummary, ...]


@suggest_attributes("spec")
@dataclasses.dataclass(frozen=True)
class RunSpec:
    """Request of a run as JSON data: the headline of every view."""

    name: str
    """Name of the model's class, or the name that the user gave the run."""
    strategy: str
    """Strategy as the user types it, such as ``DataParallel()``."""
    world_size: int
    samples: int
    """Samples in one epoch."""
    batch_size: int
    """Samples per update, over all ranks."""
    steps: int
    """Updates in the whole run."""
    steps_per_epoch: int
    shuffle: str | None
    seed: int
    loss: str
    optimizer: str
    tags: tuple[str, ...] = ()
    """Words that the user gave the run, to find it by."""
    num_workers: int = 0
    """Processes per engine that load samples."""
    settings: tuple[tuple[str, str], ...] = ()
    """Other arguments of `train` that are not the defaults: (name, text as the user typed it)."""
    model: ModelSummary | None = None

    @property
    def epochs(self) -> float:
        """Number of passes over the data."""
        return self.steps / self.steps_per_epoch


@suggest_attributes("status")
@dataclasses.dataclass(frozen=True)
class Status:
    """State and progress of a run. `epoch` counts from 1, as in views. Times are in seconds; None if unknown."""

    state: State
    step: int
    steps: int
    epoch: int
    elapsed_s: float
    remaining_s: float | None
    message: str = ""

    def __repr__(self) -> str:
        return format_status(**{**vars(self), "state": self.state.value})


Scalars = dict[str, list[tuple[int, float, float]]]
"""Numbers of the user's own: {name: [(step, sum, weight)]}."""


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One rank's part of one step; `step` and `epoch` count from 0. `loss` is its samples' mean; NaN without any."""

    step: int
    epoch: int
    rank: int
    samples: int
    loss: float
    weight: float
    """Weight of `loss` in the global mean: the number of samples, or the weight that the loss returned."""
    lr: float
    data_s: float
    forward_s: float
    backward_s: float
    """Backward pass, including the communication that it hides."""
    update_s: float
    step_s: float
    memory_bytes: int
    """Device memory that this process has allocated on CUDA, else its resident set."""
    comm_s: float = 0.0
    """Exposed communication: time in a collective that all ranks had reached.

    In a pipeline, also the time in a message between stages that the other rank had begun too.
    """
    wait_s: float = 0.0
    """Time in a collective or a message that another rank had not reached yet.

    Among ranks with the same work, the one that waits least is the straggler.
    """
    sent_bytes: int = 0
    """Bytes that this rank sent for synchronization."""
    grad_norm: float = math.nan
    """Norm of the gradient, reduced over ranks and before clipping; NaN if no rank knows it."""


@dataclasses.dataclass(frozen=True)
class ReplicaCheckResult:
    """Last comparison of the parameters' checksums among the ranks that hold the same part."""

    step: int
    """Number of updates before the comparison."""
    differing_ranks: tuple[int, ...]
    """Ranks whose parameters differ from those of most ranks with the same part; empty if none differ."""
    differing_since: int | None
    """Step of the first comparison that showed the difference."""
    num_holders: int | None = None
    """Number of ranks that hold each part of the model; None if every rank holds the whole model.

    With 1, only parameters that are on all ranks were compared.
    """


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss and metrics on held-out data, after `step` updates."""

    step: int
    samples: int
    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]


@dataclasses.dataclass(frozen=True)
class Event:
    """A mark on the time axis: a pause, a new learning rate, a lost node, NaN."""

    step: int
    kind: str
    """The kind of the mark.

    One of "start", "pause", "resume", "stop", "lr", "error", "note", "evaluation", "done", "print", "stuck", "lost",
    "repair", "save" and "diverged".
    """
    text: str
    time: float
    """Seconds since the epoch, as `time.time` returns them."""
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """Reason why a call failed on one rank."""

    rank: int
    host: str
    type: str
    message: str
    traceback: str
    step: int | None = None
    victim: bool = False
    """True if the rank only lost its peer in a collective: another rank has the cause."""
    kind: str = "error"
    """Kind of failure.

    An engine reports "error", "refused", "nonfinite" or "interrupted". Without a report it is "lost" (its process has
    ended) or "stuck" (it does not answer).
    """
    user_frames: tuple[tuple[str, int, str, str], ...] = ()
    """(file, line, function, source) of the user's own frames, outermost first; no source where a file lacks it."""

    @property
    def is_engine_gone(self) -> bool:
        """Return whether the engine can't answer any more."""
        return self.kind in ("lost", "stuck")


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
class DispatchResult:
    """Result of a dispatch on one rank. `rows` has dtype :data:`~dtkit.history.history.ROW_DTYPE`."""

    rows: object
    step: int
    lr: float
    end_reason: str = "done"
    """Why it ended: "done", "time" (all ranks agree that steps are slow), "nonfinite", "exhausted" (a stream's end)."""
    loss: float | None = None
    """With "nonfinite", this rank's loss in the step that was not taken."""
    nonfinite: NonFiniteLocations = ()
    """With "nonfinite" in a pipeline, the values of this rank's stages that are not finite."""
    bad_rows: str = ""
    """With "nonfinite", which rows of the rank's batch are not finite or far too large, in words; "" for none."""
    largest_parameter: float = 0.0
    """With "nonfinite", the largest absolute value of this rank's parameters."""
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
