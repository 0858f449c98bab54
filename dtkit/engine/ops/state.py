"""State of an engine between two calls. All its operations share one :class:`EngineState`.

Modules that need torch are imported late, so that a handshake neither waits for torch nor fails without it.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtkit._util import timeouts
from dtkit.engine.comm.sigint import SigintHandler
from dtkit.engine.memory_limit import MemoryLimit
from dtkit.engine.observe.boundary_timer import BoundaryTimer
from dtkit.engine.observe.watchdog import Watchdog
from dtkit.engine.ops.admission import check_job_step, make_released_error
from dtkit.errors import EmptyEnginesError
from dtkit.history.engine_outbox import ResultOutbox
from dtkit.rpc import pickling
from dtkit.rpc.payload import Payload, make_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dtkit._util.process import ProcessId
    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.iterable import StreamSource
    from dtkit.engine.data.sources import RowSource
    from dtkit.engine.job import Job
    from dtkit.engine.memory import PeakMemoryTracker
    from dtkit.engine.observe.call_output import CallOutput
    from dtkit.engine.state.peer_snapshots import PeerSnapshot
    from dtkit.messages import GroupSpec, OutputItem

T = TypeVar("T")


@dataclasses.dataclass
class EngineState:
    """Owner, process group, data, models and jobs of one engine."""

    owner: int = 0
    group: Group | None = None
    device: torch.device | None = None
    spec: GroupSpec | None = None
    """Settings of the group that was joined last."""
    file_owner: ProcessId | None = None
    """The process that owns shared files; None if the notebook is on another host."""
    step_timeout: float | None = None
    collective_timeout_s: float = 0.0
    models: dict[str, torch.nn.Module | Payload] = dataclasses.field(default_factory=dict)
    data: dict[str, tuple[RowSource, Shards]] = dataclasses.field(default_factory=dict)
    streams: dict[str, StreamSource] = dataclasses.field(default_factory=dict)
    """Data without numbered rows."""
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    outboxes: dict[str, ResultOutbox] = dataclasses.field(default_factory=dict)
    """Unread results of each job."""
    memory_trackers: dict[str, PeakMemoryTracker] = dataclasses.field(default_factory=dict)
    """Memory that each job takes."""
    boundary_timers: dict[str, BoundaryTimer] = dataclasses.field(default_factory=dict)
    """Times between the dispatches of each job."""
    snapshots: dict[str, list[PeerSnapshot]] = dataclasses.field(default_factory=dict)
    """Snapshots of each job: of this rank's part and of a peer's."""
    call_output: CallOutput | None = None
    """Output of the call that is being served."""
    message_begun_at: float = 0.0
    """Time at which the engine began to serve the message at hand, which may have several calls."""
    publish: Callable[[int, list[OutputItem]], None] | None = None
    """Function that publishes output during that call."""
    sigint_handler: SigintHandler = dataclasses.field(default_factory=SigintHandler)
    memory_limit: MemoryLimit = dataclasses.field(default_factory=MemoryLimit)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.jobs)

    # -- the group --------------------------------------------------------------------------------------------

    def get_group(self) -> Group:
        """Return the process group, which has been formed."""
        assert self.group is not None
        return self.group

    def get_device(self) -> torch.device:
        """Return the device, which is known once the group has been formed."""
        assert self.device is not None
        return self.device

    @property
    def rank(self) -> int:
        """Rank in the group that was joined last; -1 before the first."""
        return -1 if self.spec is None else self.spec.rank

    @property
    def cluster_folder(self) -> Path:
        """The folder that notebook and engines share."""
        assert self.spec is not None
        return Path(self.spec.store_path).parent

    @property
    def is_message_overdue(self) -> bool:
        """Whether the notebook has waited so long for this message's replies that no further steps should begin."""
        return time.monotonic() - self.message_begun_at > timeouts.MAX_DISPATCH_S

    def get_boundary_timer(self, job: str) -> BoundaryTimer:
        """Return the timer of what a job does between its steps."""
        return self.boundary_timers.setdefault(job, BoundaryTimer())

    def close_group(self) -> None:
        """Close the process group, if there is one."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def set_collective_timeout(self, seconds: float) -> None:
        """Limit the time of a collective."""
        self.get_group().set_timeout(seconds)
        self.collective_timeout_s = seconds

    def run_abortable(self, work: Callable[[], T]) -> T:
        """Run work that may wait in a collective. An interrupt aborts the group, so that the wait ends."""
        from dtkit.engine.comm.interrupt import abort_on_sigint

        with abort_on_sigint(self.get_group().abort):
            return work()

    # -- payloads ---------------------------------------------------------------------------------------------

    def pack(self, obj: Any, name: str | None = None) -> Payload:
        """Return a payload for the notebook."""
        return make_payload(pickling.pack_object(obj, name=name), self.file_owner)

    def load(self, payload: Payload) -> Any:
        """Load a payload from the notebook, whose buffers rank 0 may broadcast."""
        if not payload.is_broadcast:
            return payload.load()
        group = self.get_group()
        buffers = payload.open_buffers() if group.rank == 0 else None
        return payload.load(group.broadcast_buffers(buffers, payload.sizes))

    # -- what is held -----------------------------------------------------------------------------------------

    def get_data(self, key: str) -> tuple[RowSource, Shards]:
        """Return the rows of a partition, and which rank has which. Raises EmptyEnginesError if they are gone."""
        if key not in self.data:
            raise EmptyEnginesError(
                "these rows are not on the engines any more: all engines ended, and new ones have none of their data. "
                "Place the rows again, by cluster.partition(...) or by the arrays themselves"
            )
        return self.data[key]

    def get_model(self, key: str) -> torch.nn.Module:
        """Return a model as it was sent."""
        held = self.models[key]
        return held.load() if isinstance(held, Payload) else held

    def get_job(self, job: str, step: int | None = None) -> Job:
        """Return a job. With a `step`, the job must be at that step."""
        if job not in self.jobs:
            raise make_released_error(job)
        check_job_step(self.jobs[job].step, step)
        return self.jobs[job]

    def get_outbox(self, job: str) -> ResultOutbox:
        """Return the outbox that keeps a job's results until the notebook has read them."""
        if job not in self.outboxes:
            self.outboxes[job] = ResultOutbox(self.cluster_folder, job, self.rank)
        return self.outboxes[job]

    def count_snapshot_bytes(self, job: str) -> int:
        """Return the size of a job's snapshots in this process."""
        return sum(snapshot.nbytes for snapshot in self.snapshots.get(job, ()))

    def release(self, keys: Sequence[str]) -> None:
        """Free data, models and jobs. Unknown keys are ignored."""
        for key in keys:
            self.data.pop(key, None)
            self.streams.pop(key, None)
            self.models.pop(key, None)
            self.close_job(key)

    def release_all(self) -> None:
        """Free everything."""
        self.release([*self.models, *self.data, *self.streams, *self.jobs])

    def close_job(self, job: str) -> None:
        """Free a job and return its memory to the system, because the next job may need it in one block."""
        if job in self.jobs:
            from dtkit.engine import memory

            self.jobs.pop(job).close()
            self.memory_trackers.pop(job, None)
            self.boundary_timers.pop(job, None)
            self.snapshots.pop(job, None)
            if job in self.outboxes:
                self.outboxes.pop(job).discard_read()
            memory.release_unused_memory()
