"""A thread that asks a scheduler how long its jobs have left, and prepares the current run before one ends."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded
from dtkit.cluster.launched_transport import LaunchedTransport
from dtkit.errors import DtkitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.job_end import JobEnd
    from dtkit.training.run import Run

_log = logging.getLogger("dtkit")


class JobEndWatcher:
    """Watches the jobs that run the engines of one cluster."""

    def __init__(self, engine_group: EngineGroup, get_run: Callable[[], Run | None]) -> None:
        self._engine_group, self._get_run = engine_group, get_run
        self._is_closed = threading.Event()
        self._prepared: set[tuple[str, Run]] = set()  # (job, run)

    def start(self) -> None:
        """Begin to ask, until `close`. No-op if no scheduler runs the engines."""
        transport = self._engine_group.transport
        if isinstance(transport, LaunchedTransport) and transport.has_time_limits:
            threading.Thread(target=self._watch, args=(transport,), name="dtkit-job-ends", daemon=True).start()

    def check_can_follow(self, on_failure: str) -> None:
        """Raise ValueError if a run could not move to a further job that its launcher would submit."""
        transport = self._engine_group.transport
        if on_failure != "repair" and isinstance(transport, LaunchedTransport) and transport.submits_further_jobs:
            raise ValueError(
                f"on_failure={on_failure!r} and Slurm(requeue=True) exclude each other: a further job replaces all "
                "engines, which only on_failure='repair' does. Leave one of them out"
            )

    def close(self) -> None:
        """Stop asking. Does not wait for a checkpoint that is being written."""
        self._is_closed.set()

    def _watch(self, transport: LaunchedTransport) -> None:
        wait_s = timeouts.MIN_TIME_LIMIT_POLL_S
        while not self._is_closed.wait(wait_s) and not self._engine_group.is_closed:
            wait_s = run_guarded(lambda: self.check(transport), _log_error)

    def check(self, transport: LaunchedTransport) -> float:
        """Prepare the current run for jobs that end soon. Return the seconds until the next check."""
        try:
            ends = transport.list_job_ends()
        except DtkitError:  # Slurm's controller restarts, say
            return timeouts.TIME_LIMIT_POLL_S
        run = self._get_run()
        for end in ends:
            if end.is_due and run is not None and (end.job, run) not in self._prepared:
                self._prepare(transport, end, run)
        until_due = [end.time_left_s - end.checkpoint_before_s for end in ends if not end.is_due]
        return max(timeouts.MIN_TIME_LIMIT_POLL_S, min([timeouts.TIME_LIMIT_POLL_S, *until_due]))

    def _prepare(self, transport: LaunchedTransport, end: JobEnd, run: Run) -> None:
        self._prepared.add((end.job, run))
        if run.lifecycle.prepare_for_end(end) and end.is_followed and not self._is_closed.is_set():
            transport.end_job_early(end.job)


def _log_error(error: Exception) -> float:
    _log.error("the end of a scheduler's jobs can't be watched", exc_info=error)
    return timeouts.TIME_LIMIT_POLL_S
