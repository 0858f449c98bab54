"""What crosses the wire between notebook and engines, and what views read: plain frozen data.

Nothing here imports torch, numpy or ipyparallel, so that every layer may read these types.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

RESERVED_COLUMNS = ("rank", "index")
"""Columns that the notebook adds to every row of `dtkit.log`."""

END_EARLY_PREFIX = "hurry-"
"""With a job's key, the name of a file in the cluster's folder: somebody waits for the dispatch under way to end."""


ABORT_FLAG = ".off"
"""Behind the name of a group's store, the name of a file: a rank could not join, so nobody need wait for it."""


ALL_STATE, PER_RANK_STATE, OPTIMIZER_STATE = "all", "own", "optimizers"
"""What a survivor is asked for of a job's state: all of it, what is its rank's own, or of that its optimisers only."""


Fingerprint = Mapping[tuple[int, ...], int]
"""Checksums of the parameters that lie on one rank, by the part of the model that they are of, called as in
`Strategy.model_shard_id`; () is what lies on all ranks. Ranks that tell of the same part must have the same number."""


class State(enum.Enum):
    """Where a run stands: ``PENDING -> RUNNING <-> PAUSED -> COMPLETED | STOPPED | FAILED``."""

    PENDING = "pending"
    """Asked for; the job is not yet built on the engines."""
    RUNNING = "running"
    """Dispatches are sent, one after the other."""
    PAUSED = "paused"
    """No dispatch is in flight; all ranks stand at the same step, with model and optimiser in memory."""
    COMPLETED = "completed"
    """Every step that was asked for is done; `extend` trains on."""
    STOPPED = "stopped"
    """The user ended it; it will not go on."""
    FAILED = "failed"
    """An error ended it; `exception` says which."""

    @property
    def has_ended(self) -> bool:
        """Whether no further step will be taken without `extend`."""
        return self in (State.COMPLETED, State.STOPPED, State.FAILED)


@dataclasses.dataclass(frozen=True)
class NodeInfo:
    """One engine, as a row of the cluster's table. Memory is in bytes: the device's on CUDA, else the host's."""

    rank: int
    engine_id: int
    host: str
    pid: int
    device: str
    memory_total: int
    memory_free: int
    threads: int


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What was asked for, as JSON-able data: the head line of every view of a run."""

    name: str
    """The model's class, or what the user called the run."""
    strategy: str
    """The strategy as the user would type it, e.g. ``DataParallel()``."""
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

    @property
    def epochs(self) -> float:
        """Passes over the data that the run makes."""
        return self.steps / self.steps_per_epoch


@dataclasses.dataclass(frozen=True)
class Status:
    """A snapshot of a run. Times are in seconds; `remaining_s` is None until it can be estimated."""

    state: State
    step: int
    steps: int
    epoch: int
    elapsed_s: float
    remaining_s: float | None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one rank did in one step. `loss` is the mean over this rank's samples (NaN without any)."""

    step: int
    epoch: int
    rank: int
    samples: int
    loss: float
    weight: float
    """What `loss` counts for in the global mean: the samples, or the weight that the loss returned."""
    lr: float
    data_s: float
    forward_s: float
    backward_s: float
    """Backward pass, with the communication that it hides."""
    update_s: float
    step_s: float
    memory_bytes: int
    """Device memory allocated by this process on CUDA, else its resident set."""
    comm_s: float = 0.0
    """Exposed communication: blocked in a collective that every rank had reached, or in a message between stages
    whose other rank had begun it as well."""
    wait_s: float = 0.0
    """Blocked in a collective, or in a message, that another rank had not reached yet. Of ranks that do the same work,
    the one that waits least is the straggler."""
    sent_bytes: int = 0
    """What this rank sent for synchronisation."""
    grad_norm: float = math.nan
    """Norm of the step's gradient, reduced over ranks and before clipping; NaN where no rank knows it."""


@dataclasses.dataclass(frozen=True)
class ReplicaCheckResult:
    """The last comparison of the parameters' checksums, over the ranks that hold the same ones."""

    step: int
    """After so many updates they were compared."""
    differing_ranks: tuple[int, ...]
    """The ranks whose parameters are not those of most ranks that hold the same part; empty when all are identical."""
    differing_since: int | None
    """The step of the first comparison that showed the difference."""
    num_holders: int | None = None
    """On how many ranks each part of the model lies, and was compared; 1: only what lies on all ranks could be. None
    where every rank holds the whole model."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss and metrics over held-out data, after `step` updates."""

    step: int
    samples: int
    values: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Event:
    """Something worth a mark on the time axis: a pause, a new learning rate, a lost node, NaN."""

    step: int
    kind: str
    """One of "start", "pause", "resume", "stop", "lr", "error", "note", "done", "print", "stuck", "lost", "repair"."""
    text: str
    time: float
    """Seconds since the epoch, as time.time()."""
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a call failed on one rank."""

    rank: int
    host: str
    type: str
    message: str
    traceback: str
    step: int | None = None
    victim: bool = False
    """True where the rank only lost its peer in a collective; the cause is another rank's."""
    kind: str = "error"
    """"error" | "refused" | "nonfinite" | "interrupted", as the engine tells; of one that tells nothing, "lost" (its
    process has ended) | "stuck" (it answers nothing)."""

    @property
    def is_engine_gone(self) -> bool:
        """Whether the engine can't be asked any more, where it stands least of all."""
        return self.kind in ("lost", "stuck")


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """How one engine joins the process group of one generation."""

    rank: int
    world_size: int
    generation: int
    backend: str
    """"gloo", or "cpu:gloo,cuda:nccl" where every rank has a GPU of its own."""
    device: str
    store_path: str
    """Path of the FileStore that this generation meets at; a new one each time, so that no late message of a
    broken group can join."""
    interface: str
    """Network interface that collectives use; the loopback one unless the user asked to leave it."""
    threads: int | None
    timeout_s: float


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """The arithmetic of a job: who takes how many samples when. The same on every rank."""

    batch_size: int
    steps: int
    shuffle: str | None
    seed: int


@dataclasses.dataclass(frozen=True)
class Request:
    """One call to one engine. `owner` and `generation` must be the engine's own, or it refuses."""

    op: str
    owner_id: int
    generation: int
    args: dict[str, object]


@dataclasses.dataclass(frozen=True)
class EngineInventory:
    """What a notebook finds on an engine that it takes over."""

    rank: int
    generation: int
    job_steps: dict[str, int]
    """Job and the step that it stands at."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """What an engine answers: a value, or why there is none."""

    value: object = None
    failure: Failure | None = None


NonFiniteLocations = tuple[tuple[int, str], ...]
"""(stage, "output" or "gradient"), for each of a rank's that was not finite."""


@dataclasses.dataclass(frozen=True)
class DispatchResult:
    """What a dispatch did on one rank: rows of dtype ``history.ROW`` and where the job stands now."""

    rows: object
    step: int
    lr: float
    end_reason: str = "done"
    """"done", "time" (all ranks agreed that the steps had become slow), "nonfinite" or "exhausted" (a stream of unknown
    length has ended on all ranks)."""
    loss: float | None = None
    """With "nonfinite": this rank's loss in the step that was not taken."""
    nonfinite: NonFiniteLocations = ()
    """With "nonfinite", of a model in stages: what this rank's made that is not finite."""
    blocked_spans: object = None
    """(steps, collectives, 3): when this rank was blocked, from and to, in seconds on its clock, and a number for the
    ranks among which; NaN for none."""
    messages: object = None
    """When this rank was in which message to or from another stage: an array of dtype ``messages.MESSAGE_DTYPE``; None
    without any."""
    fingerprint: Fingerprint | None = None
    """Where asked for, and where ranks must agree: of the parameters after the last step."""
    fingerprint_s: float = 0.0
    """What that took."""
    step_report: object = None
    """Of a step that was explained, what this rank saw of it."""
    spans: object = None
    """What this rank did when in its last steps: an array of dtype ``timeline.SPAN``."""
