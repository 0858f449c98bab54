"""State of fake engines, and the results that tests have set for them."""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit.engine.ops.admission import check_job_step, make_released_error
from dtkit.rpc import pickling
from dtkit.rpc.payload import make_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit._util.process import ProcessId
    from dtkit.messages import OutputItem
    from dtkit.rpc.payload import Payload

LOST_PEER_MESSAGE = "Connection closed by peer"


class FakeResults:
    """Results of all fake engines, as set by tests.

    `step_s` is the duration of a step in its row; nothing sleeps. `handshake_overrides[rank]` replaces parts of that
    engine's handshake, as in ``engines.handshake_overrides[1]["torch"] = "1.0"``.
    """

    def __init__(self, world_size: int, step_s: float) -> None:
        self.world_size, self.step_s = world_size, step_s
        self.memory_free = 5_000_000_000  # bytes that all fake engines share
        self.handshake_overrides: list[dict[str, Any]] = [{} for _ in range(world_size)]
        self.broadcasts: dict[str, Future[Any]] = {}  # objects that rank 0 broadcasts, by key
        # locks: for a few assignments
        self._lock = threading.Lock()
        self._nonfinite_steps: dict[int, tuple[Sequence[int], set[int], bool]] = {}
        self._end_early_after = [0] * world_size

    def inject_nonfinite(self, step: int, ranks: Sequence[int], *, always: bool = False) -> None:
        """Make the gradients of a step NaN, with a NaN loss on `ranks`: once, or `always`."""
        with self._lock:
            self._nonfinite_steps[step] = ranks, set(range(self.world_size)), always

    def end_early_after(self, steps: int) -> None:
        """End the next longer dispatch after so many steps, as if steps had become slow."""
        self._end_early_after = [steps] * self.world_size

    def take_early_end(self, rank: int, steps: int) -> int | None:
        """Return the number of these steps after which the rank's dispatch ends early, if it does."""
        early = self._end_early_after[rank]
        if not 0 < early < steps:
            return None
        self._end_early_after[rank] = 0
        return early

    def take_nonfinite(self, rank: int, steps: range) -> tuple[int, float] | None:
        """Return the first of these steps that is not finite on the rank, and the rank's loss in it."""
        with self._lock:
            for step in steps:
                ranks, remaining, always = self._nonfinite_steps.get(step, ((), set(), False))
                if rank in remaining:
                    if not always:
                        remaining.discard(rank)
                    return step, math.nan if rank in ranks else 1.0
        return None


@dataclasses.dataclass
class FakeJob:
    """Position of a fake job, and the values of its rows."""

    model: str
    samples: int
    steps_per_epoch: int
    step: int = 0
    between: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds since the last steps, by what was done."""


class FakeEngine:
    """State of one fake engine."""

    def __init__(self, rank: int, results: FakeResults) -> None:
        self.rank, self.results = rank, results
        self.owner, self.generation, self.is_broken = 0, -1, False
        self.file_owner: ProcessId | None = None
        self.lr = 0.1
        self.jobs: dict[str, FakeJob] = {}
        self.models: dict[str, Any] = {}
        self.num_rows: dict[str, int] = {}  # of each data set
        self.publish: Callable[[int, list[OutputItem]], None] | None = None
        self.pending_output: list[OutputItem] = []

    def get_job(self, job: str, step: int | None = None) -> FakeJob:
        """Return a job. With a `step`, the job must be at that step."""
        if job not in self.jobs:
            raise make_released_error(job)
        check_job_step(self.jobs[job].step, step)
        return self.jobs[job]

    def pack(self, obj: Any, name: str | None = None) -> Payload:
        """Return a payload for the notebook."""
        return make_payload(pickling.pack_object(obj, name=name), self.file_owner)

    def load(self, key: str, payload: Payload) -> Any:
        """Load a payload; if it is broadcast, rank 0 loads it for all."""
        if not payload.is_broadcast:
            return payload.load()
        arrived = self.results.broadcasts.setdefault(key, Future())
        if self.rank == 0:
            try:
                arrived.set_result(payload.load())
            except BaseException as error:
                arrived.set_exception(error)
                raise
        try:
            return arrived.result(timeouts.FAKE_ENGINE_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(LOST_PEER_MESSAGE) from None

    def take_output(self) -> list[OutputItem]:
        """Publish the output that a test has queued, and return it."""
        items, self.pending_output = self.pending_output, []
        if self.publish is not None and items:
            self.publish(0, items)
        return items

    def release(self, keys: Sequence[str]) -> None:
        """Free data, models and jobs."""
        for key in keys:
            self.jobs.pop(key, None)
            self.models.pop(key, None)
            self.num_rows.pop(key, None)
            self.results.broadcasts.pop(key, None)
