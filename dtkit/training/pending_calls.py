"""Calls to all ranks that are in flight, and the interruption of calls that delay a pause."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dtkit._util import timeouts
from dtkit._util.formatting import name_nodes
from dtkit.health.detector import StallDetector
from dtkit.health.links import SlowLinkDetector
from dtkit.health.stacks import StatusProbe, list_statuses, read_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from dtkit.errors import EngineError
    from dtkit.messages import Reply
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.protocol import Call
    from dtkit.training.progress import RunProgress


R = TypeVar("R")


def _do_nothing() -> None:
    """Do nothing: the driver continues from the ranks' step."""


@dataclasses.dataclass(eq=False)
class PendingCall(Generic[R]):
    """A call to all ranks at one step, and the callbacks for its replies."""

    call: Call[R]
    step: int
    """The step that the job must be at."""
    on_result: Callable[[int, Sequence[R]], None]
    """Called with (step, values by rank) when all ranks have completed the call."""
    on_failure: Callable[[EngineError], None]
    """Called when the user's code failed, or the engines refused the call repeatedly."""
    on_cancel: Callable[[], None] = _do_nothing
    """Called when the call was not executed, though nothing is wrong with it."""
    message: int = 0
    """The message in which it was sent; several calls may share one."""
    is_answered: bool = False
    """Whether all ranks have answered, or one has failed."""
    futures: list[Future[Reply[R]]] = dataclasses.field(default_factory=list)


class Interruption:
    """When to interrupt calls that delay a pause."""

    def __init__(self) -> None:
        self.is_active = False
        """Whether the calls in flight were interrupted."""
        self.is_logged = False
        """Whether the log mentions it."""
        self._pause_requested_at = 0.0
        self._interrupt_at = math.inf

    def note_pause_request(self) -> None:
        """Note that somebody waits for a pause from now on."""
        self._pause_requested_at = time.monotonic()

    def schedule(self, median_step_s: float, *, is_stuck: bool) -> None:
        """Interrupt at once if a rank is stuck; else give the pause a moment to take effect.

        A rank that is interrupted within a step may get out of sync with the others. If it holds the only copy of its
        part, all ranks must go back to the last snapshot.
        """
        grace = min(timeouts.MAX_PAUSE_GRACE_S, timeouts.PAUSE_GRACE_S + 2 * median_step_s)
        self._interrupt_at = -math.inf if is_stuck or self.is_active else self._pause_requested_at + grace

    @property
    def remaining_s(self) -> float:
        """Seconds until the calls should be interrupted."""
        return self._interrupt_at - time.monotonic()

    def begin(self) -> None:
        """Note that the calls were interrupted."""
        self._interrupt_at, self.is_active, self.is_logged = math.inf, True, True

    def cancel(self) -> None:
        """Cancel the interruption, because the pause was taken back."""
        self._interrupt_at = math.inf

    def reset(self) -> None:
        """Note that nothing is in flight."""
        self._interrupt_at, self.is_active = math.inf, False


class PendingCalls:
    """The calls in flight, oldest first, and the rank that the others wait for."""

    def __init__(
        self,
        engine_group: EngineGroup,
        progress: RunProgress,
        on_answered: Callable[[PendingCall[Any]], None],
        on_change: Callable[[], None],
    ) -> None:
        self.pending: collections.deque[PendingCall[Any]] = collections.deque()
        self.interruption = Interruption()
        hosts = engine_group.transport.hosts
        inspect = None if hosts is None else hosts.inspect_process
        self.stall_detector = StallDetector(StatusProbe(engine_group.folder, lambda: engine_group.nodes, inspect))
        self._link_detector = SlowLinkDetector(lambda: list_statuses(engine_group.folder, engine_group.nodes))
        self._engine_group, self._progress = engine_group, progress
        self._on_answered, self._on_change = on_answered, on_change
        self._num_messages = 0
        self._unsent: list[PendingCall[Any]] | None = None  # while calls are collected for one message

    @property
    def num_messages_with_steps(self) -> int:
        """Number of messages in flight whose calls take steps."""
        return len({pending.message for pending in self.pending if pending.call.operation == "advance"})

    @property
    def evaluating_s(self) -> float:
        """For how long engines have evaluated; 0 unless they do. A message with dispatches, too, is answered as one."""
        pending = list(self.pending)
        operations = [call.call.operation for call in pending if call.message == pending[0].message]
        waiting_s = self.stall_detector.measure_waiting_s(time.monotonic())
        if operations[:1] == ["evaluate"]:
            return waiting_s
        is_possible = "evaluate" in operations and waiting_s >= timeouts.SHOWN_VALIDATION_S
        return self._read_evaluating_s() if is_possible else 0.0

    def _read_evaluating_s(self) -> float:
        """Return for how long some rank has evaluated, by its own clock. The others may wait in their next step."""
        statuses = [read_status(self._engine_group.folder, node) for node in self._engine_group.nodes]
        evaluating = [status for status in statuses if status is not None and status.op == "evaluate"]
        return max((status.observed_at - status.phase_since for status in evaluating), default=0.0)

    def send(self, call: PendingCall[R]) -> None:
        """Send a call to all ranks. `on_answered` is called with it when all have answered, or one has failed."""
        self.pending.append(call)
        call.message = self._num_messages
        if self._unsent is not None:
            self._unsent.append(call)
            return
        self._num_messages += 1
        call.futures = self._engine_group.fan_out(call.call)
        self._watch(call)

    @contextlib.contextmanager
    def send_together(self) -> Iterator[None]:
        """Send the calls of the context in one message when it ends."""
        unsent = self._unsent = list[PendingCall[Any]]()
        try:
            yield
        finally:
            self._unsent = None
            self._num_messages += 1
            for call, futures in zip(unsent, self._fan_out([call.call for call in unsent]), strict=True):
                call.futures = futures
                self._watch(call)

    def _fan_out(self, calls: Sequence[Call[Any]]) -> list[list[Future[Reply[Any]]]]:
        engine_group = self._engine_group
        return [engine_group.fan_out(calls[0])] if len(calls) == 1 else engine_group.fan_out_together(calls)

    def _watch(self, call: PendingCall[Any]) -> None:
        """Report when all ranks have answered, or one has failed."""
        self.stall_detector.on_sent(time.monotonic())
        num_unanswered = len(call.futures)
        # locks: for a few assignments; waits on the Condition are marked
        lock = threading.Lock()

        def count(future: Future[Reply[Any]]) -> None:
            nonlocal num_unanswered
            with lock:
                num_unanswered -= 1
                is_last = num_unanswered == 0
            # The other ranks may wait for the one that failed.
            # waits: already done here
            if is_last or future.result().failure is not None:
                self._on_answered(call)

        for future in call.futures:
            future.add_done_callback(count)

    def take_answered(self, call: PendingCall[Any]) -> Iterator[PendingCall[Any]]:
        """Mark a call as answered. Yield the answered calls that can be handled now, in the order of sending."""
        if call not in self.pending:  # it was cancelled
            return
        call.is_answered = True
        while self.pending and self.pending[0].is_answered:
            yield self.pending[0]

    def gather_replies(self, call: PendingCall[R], step_s: float) -> list[Reply[R]]:
        """Take a call out of flight and return its replies, by rank."""
        self._tell_losses(call)
        replies = self._wait_for_replies(call)
        self.pending.remove(call)
        call.futures.clear()  # they refer to the call through their callbacks, and to its results
        self.stall_detector.on_result(time.monotonic(), step_s or None)
        return replies

    def _tell_losses(self, call: PendingCall[Any]) -> None:
        """Log the engines that are known to be gone. The others may take some more seconds to answer."""
        # waits: already done
        failures = [future.result().failure for future in call.futures if future.done()]
        for failure in failures:
            if failure is not None and failure.is_engine_gone:
                self._progress.add_loss(failure.rank, failure.engine_loss)
                self._on_change()

    def _wait_for_replies(self, call: PendingCall[R]) -> list[Reply[R]]:
        """Wait for replies. Stop waiting for interrupted ranks that don't answer (in C code) as soon as the steps'
        length allows.

        For short steps, that is three seconds after the request to pause.
        """
        if not self.interruption.is_active:  # one rank may have failed while another one is stuck
            return self._engine_group.gather_replies(
                call.futures, timeouts.GATHER_TIMEOUT_S, on_poll=self.check_for_stalls
            )
        grace = min(
            timeouts.FAILURE_GRACE_S, max(timeouts.INTERRUPTED_GATHER_TIMEOUT_S, 2 * self.stall_detector.median_step_s)
        )
        return self._engine_group.gather_replies(call.futures, timeouts.INTERRUPTED_GATHER_TIMEOUT_S, grace_s=grace)

    def gather_late_replies(self, lost_ranks: set[int], timeout: float) -> Iterator[dict[int, Reply[Any]]]:
        """Yield the replies, by rank, of the other calls in flight after one has failed."""
        for call in self.pending:
            ranks = [rank for rank in range(len(call.futures)) if rank not in lost_ranks]
            replies = self._engine_group.gather_replies([call.futures[rank] for rank in ranks], timeout, ranks)
            yield dict(zip(ranks, replies, strict=True))

    def cancel_all(self) -> None:
        """Stop waiting for all calls."""
        for call in reversed(self.pending):  # so that requests to repeat are in order
            call.on_cancel()
        self.pending.clear()

    def interrupt_if_due(self) -> bool:
        """Interrupt the engines if a pause has had its time. Return whether they were interrupted."""
        if self.interruption.remaining_s > 0:
            return False
        self.interruption.begin()
        self._progress.retry_count = 0
        self._progress.add_event(
            "pause", f"interrupted at step {self._progress.step:,}: what was under way is broken off"
        )
        self._engine_group.interrupt()
        return True

    def schedule_interrupt(self) -> None:
        """Schedule the interruption of calls in flight, after the pause has had a moment to take effect."""
        if self.pending:
            report = self.stall_detector.stall_report
            is_stuck = report is not None and report.kind == "stuck"
            self.interruption.schedule(self.stall_detector.median_step_s, is_stuck=is_stuck)

    def check_for_stalls(self) -> None:
        """Identify the rank that the others wait for, if a dispatch is overdue, and a slow link between hosts."""
        slow_link = self._link_detector.check(time.monotonic())
        if slow_link is not None:
            self._progress.add_event("note", slow_link.text)
        report = self.stall_detector.check(time.monotonic())
        if report is not None:
            kind = "stuck" if report.kind == "stuck" else "note"
            self._progress.add_event(kind, name_nodes(report.text), report.rank)
        is_stalled = report is not None or self.stall_detector.stall_report is not None
        if is_stalled or self.evaluating_s >= timeouts.SHOWN_VALIDATION_S:  # views show for how long
            self._on_change()
