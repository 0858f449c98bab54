"""Plain frozen data that a user sees: the nodes of a cluster, and the state, records and events of a run.

Nothing here imports torch, numpy or ipyparallel, so that every layer may use these types.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time

from dtkit._util.attributes import suggest_attributes
from dtkit._util.formatting import UNKNOWN, format_bytes, format_count, format_loss, format_status
from dtkit._util.table import Table

_MAX_TEXT_CHARS = 120  # of a line of a table of texts
RESERVED_COLUMNS = ("rank", "index")
"""Columns that the notebook adds to every row of `dtkit.log`."""


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
    cores: int = 0  # of the host that the engine may use; 0 if unknown

    def __repr__(self) -> str:
        threads = format_count(self.threads, "thread")
        return f"node {self.rank}: {self.host}, {self.device}, {self.memory_text} free, {threads}, pid {self.pid}"

    @property
    def memory_text(self) -> str:
        """Free and total memory, such as "5 GB of 8 GB"."""
        return f"{format_bytes(self.memory_free)} of {format_bytes(self.memory_total)}"


class NodeList(list[NodeInfo]):
    """Nodes by rank, which show themselves as a table."""

    def make_table(self) -> Table:
        """Return the table, with a row for each node."""
        header = ["node", "engine id", "host", "pid", "device", "memory free", "threads"]
        rows = [
            [str(n.rank), str(n.engine_id), n.host, str(n.pid), n.device, n.memory_text, str(n.threads)] for n in self
        ]
        return Table(header, rows, {"host", "device"})

    def __repr__(self) -> str:
        return self.make_table().to_text()

    def _repr_html_(self) -> str:
        return self.make_table().to_html()


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """A layer of a model, with all parameters below it."""

    name: str
    kind: str
    """Name of its class."""
    parameters: int

    def __repr__(self) -> str:
        return f"{self.name} ({self.kind}): {format_count(self.parameters, 'parameter')}"


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """A model's parameters and layers. A shared parameter counts once in `parameters`, and in each of its layers."""

    parameters: int
    trainable: int
    layers: tuple[LayerSummary, ...]
    kind: str = ""
    """Name of its class."""

    def __repr__(self) -> str:
        return "\n".join([self.headline, self._make_table().to_text()]).rstrip()

    def _repr_html_(self) -> str:
        return f"<p>{self.headline}</p>{self._make_table().to_html()}"

    @property
    def headline(self) -> str:
        """Number of parameters, such as "195 parameters, all trainable"."""
        trained = "all" if self.trainable == self.parameters else f"{self.trainable:,}"
        return f"{format_count(self.parameters, 'parameter')}, {trained} trainable"

    def _make_table(self) -> Table:
        rows = [[layer.name, layer.kind, f"{layer.parameters:,}"] for layer in self.layers]
        return Table(["layer", "class", "parameters"], rows, {"layer", "class"})


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
    sources: tuple[tuple[str, str], ...] = ()
    """Sources of the user's functions among these arguments: (name, source). Comparisons show lines that differ."""
    directions: tuple[tuple[str, bool], ...] = ()
    """Metrics that state whether higher is better, as torchmetrics' do: (name, whether it is)."""
    has_validation: bool = False
    """Whether the run evaluates held-out data."""
    data: str = ""
    """Shapes and dtypes of arrays, such as ``(1440, 64) float32, target (1440,) int64``; empty for other data."""

    @property
    def epochs(self) -> float:
        """Number of passes over the data."""
        return self.steps / self.steps_per_epoch

    def __repr__(self) -> str:
        return self._make_table().to_text(max_width=_MAX_TEXT_CHARS)

    def _repr_html_(self) -> str:
        return self._make_table().to_html()

    @property
    def _epochs_text(self) -> str:
        return "1 epoch" if self.epochs == 1 else f"{self.epochs:.4g} epochs"

    def _make_table(self) -> Table:
        """Return the arguments by the names that `train` has for them, with what follows from them."""
        settings = dict(self.settings)
        values = {
            "name": self.name,
            "tags": ", ".join(self.tags),
            "model": "" if self.model is None else self.model.headline,
            "data": "; ".join(filter(None, [self.data, f"{format_count(self.samples, 'sample')} in an epoch"])),
            "strategy": f"{self.strategy} on {format_count(self.world_size, 'node')}",
            "batch_size": f"{self.batch_size:,} samples per update, over all nodes",
            "steps": f"{self.steps:,}, {self._epochs_text} of {format_count(self.steps_per_epoch, 'step')}",
            "loss": settings.pop("loss", self.loss),
            "optimizer": settings.pop("optimizer", self.optimizer),
            "shuffle": str(self.shuffle),
            "seed": str(self.seed),
        }
        rows = settings | values
        return Table([], [(name, rows[name]) for name in {**values, **settings} if rows[name]])


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
    is_stepping: bool = False
    """Whether the run is RUNNING only for the steps of `step(n)`, and pauses after them."""

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "is_stepping"}
        return format_status(**{**shown, "state": self.state.value})


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

    def __repr__(self) -> str:
        if self.differing_ranks:
            noun = "node" if len(self.differing_ranks) == 1 else "nodes"
            names = f"{noun} {', '.join(map(str, self.differing_ranks))}"
            since = self.step if self.differing_since is None else self.differing_since
            return f"parameters differ on {names} since step {since:,}, checked at step {self.step:,}"
        what = "parameters that are not split" if self.num_holders == 1 else "parameters"
        where = f"between {self.num_holders:,} replicas" if (self.num_holders or 1) > 1 else "on all nodes"
        return f"{what} identical {where}, checked at step {self.step:,}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss and metrics on held-out data, after `step` updates."""

    step: int
    samples: int
    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {format_loss(value)}" for name, value in self.values.items())
        return f"step {self.step:,}: {values or UNKNOWN} ({format_count(self.samples, 'sample')})"


@dataclasses.dataclass(frozen=True)
class Event:
    """A mark on the time axis: a pause, a new learning rate, a lost node, NaN."""

    step: int
    kind: str
    """The kind of the mark.

    One of "start", "pause", "resume", "stop", "lr", "error", "note", "evaluation", "done", "print", "stuck", "lost",
    "repair", "save", "checkpoint", "restore" and "diverged". "save" is a checkpoint that the user asked for.
    """
    text: str
    time: float
    """Seconds since the epoch, as `time.time` returns them."""
    rank: int | None = None
    notice: str | None = None
    """A shorter text for the head of a view, where an event is worth a place there."""

    def __repr__(self) -> str:
        node = "" if self.rank is None else f", node {self.rank}"
        clock = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"{clock}, step {self.step:,}{node}, {self.kind}: {self.text}"


@dataclasses.dataclass(frozen=True)
class EngineLoss:
    """Why an engine is gone."""

    cause: str
    """The cause in words, such as "its process has ended"."""
    host: str = ""
    """The engine's host; empty if it is unknown, or the notebook's own."""
    exit_code: int | None = None
    """Exit status of its process, or the negative number of the signal that ended it; None if it is unknown, or if
    dtkit ended it."""


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
    loss: EngineLoss | None = None
    """Why the engine is gone, if its transport knows."""

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step:,}"
        role = ", which only lost its peer" if self.victim else ""
        return f"rank {self.rank} on {self.host}{step}{role}, {self.kind}: {self.type}: {self.message}"

    @property
    def is_engine_gone(self) -> bool:
        """Return whether the engine can't answer any more."""
        return self.kind in ("lost", "stuck")

    @property
    def engine_loss(self) -> EngineLoss:
        """Why the engine is gone; what the failure says where its transport doesn't know more."""
        return self.loss or EngineLoss(self.message.partition(". ")[0])
