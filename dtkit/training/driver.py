"""The thread that drives a run: it sends dispatches, takes in what lands, and does what it is asked to.

It is an actor. Everything that happens to a run comes through one inbox, commands and landed replies alike, so its
state has one writer and no two things happen at once. Two dispatches are in flight, so that engines never wait for
the notebook (one when steps are slow, see :mod:`dtkit.training.dispatch`).

Every dispatch says at which step the job must stand. Whatever makes that untrue (a dispatch that ended early since
steps became slow, a group that was formed anew, NaN) lets the engines refuse what was sent behind it. The driver then
sends nothing until all has landed, and goes on from the step that the engines stand at.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import queue
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util.formatting import format_count
from dtkit._util.guard import run_guarded
from dtkit.checkpoint.manager import CheckpointManager, CheckpointRequest
from dtkit.errors import (
    ClusterError,
    DtkitError,
    EngineError,
    NonFiniteError,
    RunError,
    SupersededError,
    drop_consequential_refusals,
    format_ranks,
)
from dtkit.health.detector import StallDetector
from dtkit.health.stacks import StatusProbe
from dtkit.rpc.engine_group import FAILURE_GRACE_S
from dtkit.training import recovery
from dtkit.training.callback_runner import CallbackRunner
from dtkit.training.dispatch import DispatchSizer
from dtkit.training.evaluation import EvaluationTracker
from dtkit.training.learning_rate import LearningRateChange, LearningRateUpdater
from dtkit.training.load_balancing import LoadBalancer
from dtkit.training.nonfinite import build_nonfinite_failures
from dtkit.training.pending_call import PendingCall, resolve
from dtkit.training.recorder import Recorder
from dtkit.training.replica_check import ReplicaChecker
from dtkit.training.snapshots import SnapshotInterval, SnapshotTracker
from dtkit.types import DispatchResult, Failure, ReplicaCheckResult, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.cluster.cluster import Cluster
    from dtkit.health.stall_report import StallReport
    from dtkit.history.engine_outbox import EvaluationSums, UnreadDispatches
    from dtkit.history.history import History
    from dtkit.training.recovery import RecoveryResult
    from dtkit.types import Reply

_GATHER_TIMEOUT_S = 10.0  # for the other ranks, once one has answered
_INTERRUPTED_GATHER_TIMEOUT_S = 1.0  # for the same, once they were interrupted
_PAUSE_GRACE_S = 0.5  # and two steps: what a pause takes where nothing is stuck
_MAX_PAUSE_GRACE_S = 1.0  # so that with what a break takes it is less than the three seconds that it may last
_POLL_S = 0.5
_MAX_RETRIES = 3  # refusals in a row, without a step between them, before the run gives up
_MAX_ENGINE_LOSSES = (
    3  # engines are lost so often at one step before it does: whatever ends them there, ends others too
)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What to send for one run."""

    job: str
    steps: int
    """Where it is to end."""
    steps_per_epoch: int
    evaluation_args: dict[str, Any] | None = None
    """Arguments of the op "evaluate", for the end of every epoch; None where there is nothing to evaluate on."""
    run_callbacks: Callable[[], None] | None = None
    """What to call at the end of every epoch, on a thread of its own, before the next one begins."""
    balanced_shard_sizes: tuple[int, ...] | None = None
    """Rows of each shard, where shares of the batch are to follow the ranks' speeds."""
    recover: Callable[[Sequence[int]], RecoveryResult] | None = None
    """Brings all ranks to one step again, those that are given replaced or left out."""
    on_failure: str = "repair"
    """What to do without being asked when an engine is lost: see :data:`dtkit.training.recovery.FAILURE_MODES`."""


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """Steps that were sent for."""

    steps: int
    lr_change: LearningRateChange | None
    explain: bool


@dataclasses.dataclass(frozen=True)
class _Command:
    name: str
    value: Any
    answer: Future[int]


class Driver:
    """One run's thread, and the run's state. `changed` is called after every change, without a lock."""

    def __init__(self, cluster: Cluster, plan: RunPlan, history: History, on_change: Callable[[], None]) -> None:
        self.state, self.step = State.PENDING, 0
        self.lr: float | None = None
        self.exception: BaseException | None = None
        self.plan = plan
        self.dispatch_sizer = DispatchSizer()
        self.replica_checker = ReplicaChecker()
        self.checkpoint_manager = CheckpointManager(history, on_change)
        self.snapshot_tracker = SnapshotTracker()
        self.evaluation_tracker = EvaluationTracker()
        self.explain_reports: list[Any] = []
        """Of the last step that was explained, what each rank saw."""
        self.recent_spans: tuple[list[np.ndarray], list[float] | None] = [], None
        """What each rank did when, in the last steps, and how far each one's clock was ahead."""
        self._load_balancer = LoadBalancer(plan.balanced_shard_sizes) if plan.balanced_shard_sizes is not None else None
        self._explain_next_step = False
        self._cluster, self._history, self._on_change = cluster, history, on_change
        self._recorder = Recorder(cluster, history)
        self._callback_runner = CallbackRunner(plan.run_callbacks)
        self._stall_detector = StallDetector(StatusProbe(cluster.folder, lambda: cluster.nodes))
        self._inbox: queue.SimpleQueue[_Command | PendingCall] = queue.SimpleQueue()
        # locks: for a few assignments; waits on the Condition are marked
        self._state_condition = threading.Condition()  # guards `state`, and whether the inbox is still read
        self._pending_calls: collections.deque[PendingCall] = collections.deque()
        self._next_step = 0  # the step that the next dispatch starts at
        self._target_step = 0
        self._stop_request: str | None = None  # "pause" or "stop", once nothing is in flight
        self._needs_resync = False  # what is in flight will be refused; send nothing before it has landed
        self._retry_count = 0
        self._last_engine_loss_step, self._engine_loss_count = (
            -1,
            0,
        )  # the step at which engines were lost last, and how often in a row
        self._lost_ranks: list[int] = []  # ranks whose engines are gone, and that were not replaced yet
        self._pause_requested_at = 0.0  # when somebody began to wait for the end of what is under way
        self._interrupt_at = math.inf  # when what is under way then still is to be interrupted
        self._is_interrupting = False  # what is under way was interrupted
        self._was_interrupted = False  # and the log says so
        self._pending_answers: list[Future[int]] = []
        self._lr_updater = LearningRateUpdater()
        self._accumulated_s = 0.0
        self._running_since: float | None = None
        self._thread: threading.Thread | None = None

    # -- from other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin (or, after the end, begin again) to take commands; the run stands paused."""
        self._next_step = self._target_step = self.step
        self._stop_request, self._needs_resync, self._retry_count = None, False, 0
        self._callback_runner.reset()
        self._enter_state(State.PAUSED)
        self._thread = threading.Thread(target=self._run, name=f"dtkit-{self.plan.job}", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Whether within so many seconds the run has ended, and all views have been told."""
        if self._thread is not None and not self._is_own_thread:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return self.state.has_ended

    def restore_position(
        self, step: int, last_callback_step: int, last_evaluation_step: int, elapsed_s: float = 0.0
    ) -> None:
        """Before `start`: the job goes on after so many steps, and seconds; callbacks were called after `called`, and
        held-out data evaluated after `step_after_epoch` of them.
        """
        self._recorder.record_extra_rows(step)
        self.step, self._callback_runner.last_called_step, self._accumulated_s = step, last_callback_step, elapsed_s
        self.evaluation_tracker.reset_to(step, last_evaluation_step)
        self.checkpoint_manager.reset_to(step)
        self.snapshot_tracker.reset_to(step)
        if self.plan.balanced_shard_sizes is not None:  # of as many ranks as there are now
            self._load_balancer = LoadBalancer(self.plan.balanced_shard_sizes)

    def replay_unread(
        self,
        unread_dispatches: Mapping[int, UnreadDispatches],
        unread_evaluations: Mapping[int, Mapping[int, EvaluationSums]],
        common_step: int,
    ) -> None:
        """Before `start`: record what dispatches and evaluations left unread, by rank; all that are there have taken
        `common` steps. An evaluation that is missing there is made as the run goes on.
        """
        route, seen = self.plan, self._recorder.next_step
        self._recorder.record_unread(unread_dispatches, common_step)
        every = route.steps_per_epoch
        due = range(max(1, -(-seen // every)) * every, common_step, every) if route.evaluation_args is not None else ()
        if missing := self._recorder.record_unread_evaluations(unread_evaluations, due):
            steps = ", ".join(map(str, missing))
            self._recorder.add_event(common_step, "note", f"what evaluations found after these steps was lost: {steps}")

    def record_repair(self, lost_ranks: Sequence[int], old_world_size: int, result: RecoveryResult) -> None:
        """After the end: of `size` ranks these were lost, and the job that was made anew may stand further back."""
        before = self.step
        self.restore_position(
            result.step, self.last_callback_step, self.evaluation_tracker.last_evaluated_step, self._accumulated_s
        )
        self._lost_ranks, self.lr = [], result.lr
        how = "replaced" if self._cluster.world_size == old_world_size else "left out"
        self._add_event("repair", _describe_repair(lost_ranks, how, before, result))
        self._on_change()

    @property
    def is_pausing(self) -> bool:
        """Whether it was asked to pause or stop, and has not yet."""
        return self.state is State.RUNNING and self._stop_request is not None

    @property
    def last_callback_step(self) -> int:
        """The step after which callbacks were called last."""
        return self._callback_runner.last_called_step

    def submit(self, name: str, value: Any = None) -> Future[int]:
        """Put a command into the inbox; the answer is the step at which it took effect."""
        answer: Future[int] = Future()
        with self._state_condition:
            if self.state.has_ended:
                word = f"this run has {_ENDED_PHRASES[self.state]} at step {self.step}, so it can't {_COMMAND_PHRASES[name]}"
                raise RunError(f"{word}. {RETRAIN_HINT if self.state is State.FAILED else _EXTEND_HINT}")
            self._inbox.put(_Command(name, value, answer))
        return answer

    def shut_down(self, timeout: float) -> bool:
        """The cluster is closing: stop at a step boundary if that is soon (True), else just end. Idempotent."""
        self.snapshot_tracker.interval = SnapshotInterval()  # nobody will come back to one
        stands = self.state.has_ended
        with contextlib.suppress(RunError, TimeoutError):
            self.submit("stop").result(timeout)
            stands = True
        with contextlib.suppress(RunError):
            self.submit("abandon")
        return stands

    def wait(self, timeout: float | None) -> bool:
        """Until the run has left RUNNING; whether it did within `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        left = False
        with self._state_condition:
            while not left:  # a signal that another thread received is seen between two waits
                part = max(0.0, min(_POLL_S, deadline - time.monotonic()))
                left = self._state_condition.wait_for(lambda: self.state not in (State.PENDING, State.RUNNING), part)
                if time.monotonic() >= deadline:
                    break
        return left

    @property
    def elapsed_s(self) -> float:
        """Seconds spent RUNNING."""
        since = self._running_since
        return self._accumulated_s + (0.0 if since is None else time.monotonic() - since)

    # -- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        run_guarded(self._run_loop, self._fail)

    def _fail(self, error: Exception) -> None:
        self._cancel_pending_calls()  # those who wait for what is under way are answered, too
        self._end(State.FAILED, error)

    @property
    def _is_own_thread(self) -> bool:
        """Whether this is the run's thread; a view that is told of the end may have it begin again, with another."""
        return self._thread is threading.current_thread()

    def _run_loop(self) -> None:
        while self._is_own_thread and not self.state.has_ended:
            self._send_until_full()
            event = self._wait_for_event()
            if isinstance(event, _Command):
                self._execute_or_answer(event)
            elif event in self._pending_calls:
                event.is_answered = True
                while (
                    self._pending_calls and self._pending_calls[0].is_answered
                ):  # what was sent first is taken in first
                    self._process_replies(self._pending_calls[0])
            if self._is_own_thread and not self._pending_calls:
                self._on_idle()

    def _execute_or_answer(self, command: _Command) -> None:
        """The run ends where it can't obey; then too nobody is left waiting."""
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(self._pending_answers.append, command.answer)
            self._execute(command)
            otherwise.pop_all()

    def _wait_for_event(self) -> _Command | PendingCall:
        """The next event. Engines that say nothing for longer than a collective may take are stuck."""
        deadline = time.monotonic() + self._cluster.call_timeout_s
        while True:
            left = self._interrupt_at - time.monotonic()
            if left <= 0:
                self._interrupt_engines()
                continue
            try:
                # waits: an idle run waits for its user; else the limit is `patience`
                return self._inbox.get(timeout=min(_POLL_S, left) if self._pending_calls else None)
            except queue.Empty:
                self._cluster.check_reachable()
                self._check_for_stalls()
                if time.monotonic() >= deadline:
                    return self._pending_calls[0]

    def _check_for_stalls(self) -> None:
        """Name the rank that keeps the others waiting, once a dispatch is overdue."""
        found = self._stall_detector.check(time.monotonic())
        if found is not None:
            kind = "stuck" if found.kind == "stuck" else "note"
            self._add_event(kind, found.text, found.rank)
        if found is not None or self.stall_report is not None:  # views show for how long
            self._on_change()

    @property
    def stall_report(self) -> StallReport | None:
        """Who keeps the others waiting now; None while all is well."""
        return self._stall_detector.stall_report

    def _send_until_full(self) -> None:
        while self.state is State.RUNNING and not self._stop_request and not self._needs_resync:
            if self._is_evaluation_due(self._next_step):
                self._send_evaluation(self._next_step)
            dispatches = sum(flight.op == "advance" for flight in self._pending_calls)
            if dispatches >= self.dispatch_sizer.max_in_flight or self._is_callback_due(self._next_step):
                return
            self._send_checkpoint(self._next_step)
            if self._next_step >= self._target_step:
                return
            self._send_steps(self._count_steps_to_send())

    def _count_steps_to_send(self) -> int:
        """How many steps to send for: to the next thing that is due, and no more than are sent at once."""
        steps = min(self.dispatch_sizer.next_steps, self._target_step - self._next_step)
        steps = min(
            steps,
            self.checkpoint_manager.steps_until_due(self._next_step),
            self.snapshot_tracker.steps_until_due(self._next_step),
        )
        if self.plan.evaluation_args or self.plan.run_callbacks:
            steps = min(steps, self.plan.steps_per_epoch - self._next_step % self.plan.steps_per_epoch)
        return steps

    def _send_steps(self, steps: int) -> None:
        """So many, with what they are to begin with; none, for that alone."""
        order = StepRequest(steps, self._lr_updater.take_pending(), self._explain_next_step and steps > 0)
        more: dict[str, Any] = {"explain": True, "seen": self.step} if order.explain else {"seen": self.step}
        if self.replica_checker.is_due(time.monotonic()) or self._next_step + steps == self.plan.steps:
            more["fingerprint"] = True
        if self._load_balancer is not None:
            more["shares"] = self._load_balancer.shares
        flight = PendingCall(
            "advance",
            self._next_step,
            on_result=functools.partial(self._on_steps_result, order),
            on_failure=functools.partial(self._on_steps_failure, order, self._next_step),
            on_cancel=functools.partial(self._on_steps_cancel, order, self._next_step),
        )
        begun = time.perf_counter()
        self._send_call(flight, steps=steps, lr=order.lr_change and order.lr_change.value, **more)
        self.dispatch_sizer.on_sent(time.perf_counter() - begun)
        self._next_step += steps

    def _send_checkpoint(self, step: int) -> None:
        """Send a save, if one is due after so many steps; with a snapshot, if that is due, it is written of its copy.

        Who waits for a save is to hear what is wrong with the state: that one goes first, with a copy of its own.
        """
        due = self.checkpoint_manager.is_due(step, self.plan.steps)
        if due and self._lr_updater.has_pending:
            self._send_steps(0)  # what was set before it is saved along
        copied = not self.checkpoint_manager.has_requests and self._send_due_snapshot(step)
        if due and (save := self.checkpoint_manager.begin_next(step)) is not None:
            flight = PendingCall(
                "save_checkpoint",
                step,
                on_result=functools.partial(self.checkpoint_manager.on_result, save),
                on_failure=functools.partial(self._on_checkpoint_failure, save),
                on_cancel=functools.partial(self.checkpoint_manager.on_cancel, save),
            )
            self._send_call(flight, copied=copied, **save.make_args())

    def _send_due_snapshot(self, step: int) -> bool:
        """Have the ranks keep a snapshot in memory, if one is due after so many steps. Whether that was asked for."""
        if due := self.snapshot_tracker.is_due(step):
            self._send_snapshot(step)
        return due

    def _send_snapshot(self, step: int) -> None:
        self.snapshot_tracker.on_sent(step)
        flight = PendingCall(
            "take_snapshot", step, self._on_snapshot_result, self._on_snapshot_failure, self.snapshot_tracker.on_cancel
        )
        self._send_call(flight)

    def _snapshot_before_idle(self) -> bool:
        """Before the run comes to rest, have what it stands at kept. Whether that is under way."""
        wanted = not self._lost_ranks and self.snapshot_tracker.is_missing(self.step)
        if wanted:
            self._send_snapshot(self.step)
        return wanted

    def _send_evaluation(self, step: int) -> None:
        assert self.plan.evaluation_args is not None
        self.evaluation_tracker.on_sent(step)
        failed = functools.partial(self._on_evaluation_failure, step)
        flight = PendingCall("evaluate", step, self._on_evaluation_result, failed, self.evaluation_tracker.on_cancel)
        self._send_call(flight, **self.plan.evaluation_args)

    def _is_evaluation_due(self, step: int) -> bool:
        route = self.plan
        return route.evaluation_args is not None and self.evaluation_tracker.is_due(
            step, route.steps_per_epoch, route.steps
        )

    def _send_checkpoints_when_idle(self) -> bool:
        """With nothing else in flight: send a save that is due. An evaluation and callbacks come before it."""
        ahead = self._stop_request or self._is_evaluation_due(self.step) or self._is_callback_due(self.step)
        if self._lost_ranks:  # none can be written, and who waits for one must hear of it
            self.checkpoint_manager.cancel_requests(
                f"lost: {format_ranks(self._lost_ranks)}; run.resume() or run.repair() replaces what is lost"
            )
        elif self.checkpoint_manager.has_requests or (self.state is State.RUNNING and not ahead):
            self._send_checkpoint(self.step)
            while (
                self.checkpoint_manager.has_requests and not self._pending_calls
            ):  # one that can't be begun keeps no other one waiting
                self._send_checkpoint(self.step)
        return bool(self._pending_calls)

    def _send_call(self, call: PendingCall, **args: Any) -> None:
        self._pending_calls.append(call)
        call.futures = self._cluster.fan_out(call.op, job=self.plan.job, step=call.step, **args)
        self._stall_detector.on_sent(time.monotonic())
        left = len(call.futures)
        # locks: for a few assignments; waits on the Condition are marked
        lock = threading.Lock()

        def landed(future: Future[Reply]) -> None:
            # At once with the first failure: the other ranks may be waiting for the one that failed.
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            # waits: already done here
            if last or future.result().failure is not None:
                self._inbox.put(call)

        for future in call.futures:
            future.add_done_callback(landed)

    # -- what lands -------------------------------------------------------------------------------------------

    def _process_replies(self, call: PendingCall) -> None:
        replies = self._gather_replies(call)
        self._pending_calls.remove(call)
        call.futures.clear()  # they hold the flight by their callbacks, and what it brought
        self._stall_detector.on_result(time.monotonic(), self.dispatch_sizer.step_s or None)
        failures = [reply.failure for reply in replies if reply.failure is not None]
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(call.on_cancel)
            if failures:
                self._handle_failures(call, replies, failures)
            else:
                call.on_result(call.step, [reply.value for reply in replies])
            otherwise.pop_all()
        self._check_for_stalls()  # who kept the others waiting goes on: nobody may ask again for long
        self._on_change()

    def _gather_replies(self, call: PendingCall) -> list[Reply]:
        """Of ranks that were interrupted, one that lets none in (in C code) is given up as soon as steps allow.

        Where they are short, that is three seconds after somebody asked for it.
        """
        if not self._is_interrupting:  # one may have failed or refused where another one is stuck
            return self._cluster.gather_replies(call.futures, _GATHER_TIMEOUT_S, on_poll=self._check_for_stalls)
        grace = min(FAILURE_GRACE_S, max(_INTERRUPTED_GATHER_TIMEOUT_S, 2 * self._stall_detector.median_step_s))
        return self._cluster.gather_replies(call.futures, _INTERRUPTED_GATHER_TIMEOUT_S, grace_s=grace)

    def _on_steps_result(self, request: StepRequest, step: int, values: Sequence[Any]) -> None:
        advances: list[DispatchResult] = [advance for advance, _ in values]
        self._recorder.record_steps(values)
        first = advances[0]
        done, self.step, self.lr = first.step - step, first.step, first.lr
        if done:
            self._retry_count = 0
            self.dispatch_sizer.on_result(done, _get_slowest_step_s(advances))
            self._check_replicas_and_balance(advances)
            spans = [np.asarray(a.spans) for a in advances if a.spans is not None]
            self.recent_spans = spans, self._cluster.clock_offsets
        if request.explain:
            self.explain_reports, self._explain_next_step = [advance.step_report for advance in advances], False
        self._lr_updater.on_result(request.lr_change, step)
        if first.end_reason == "nonfinite":
            self._on_nonfinite(advances)
        elif first.end_reason == "exhausted":
            self._on_stream_end()
        elif self.step != step + request.steps:
            self._needs_resync = True

    def _check_replicas_and_balance(self, advances: Sequence[DispatchResult]) -> None:
        """What the notebook concludes from all ranks' rows: are parameters equal, are shares of the batch fair."""
        seconds = max(advance.fingerprint_s for advance in advances)
        prints = [advance.fingerprint for advance in advances]
        if (
            self.replica_checker.on_result(time.monotonic(), self.step, prints, seconds)
            and self.replica_checker.result is not None
        ):
            self._report_differing_replicas(self.replica_checker.result)
        if self._load_balancer is not None and self._load_balancer.on_result([np.asarray(a.rows) for a in advances]):
            shares = ", ".join(f"{share:.0%}" for share in self._load_balancer.shares)
            self._add_event("note", f"shares of the batch by node: {shares}")

    def _report_differing_replicas(self, result: ReplicaCheckResult) -> None:
        if result.differing_ranks:
            names = ", ".join(map(str, result.differing_ranks))
            where = "on all nodes" if result.num_holders is None else "on all nodes that hold the same ones"
            self._add_event(
                "error", f"parameters are not equal {where}: {names} differ since step {result.differing_since}"
            )

    def _on_stream_end(self) -> None:
        """A stream without length has ended on all ranks: the run is as long as that, and one epoch."""
        self._needs_resync = True
        self._target_step = self.step
        self.plan = dataclasses.replace(self.plan, steps=self.step, steps_per_epoch=max(1, self.step))
        self._add_event("note", f"the stream ended after {self.step} steps")

    def _on_nonfinite(self, advances: Sequence[DispatchResult]) -> None:
        self._needs_resync, self._stop_request = True, self._stop_request or "pause"
        self.exception = NonFiniteError(build_nonfinite_failures(self.step, advances, self._cluster.nodes))
        self._add_event("error", f"not finite at step {self.step}; all ranks paused before the update")

    def _on_evaluation_result(self, step: int, values: Sequence[Any]) -> None:
        self.evaluation_tracker.mark_done(step)
        self._recorder.record_evaluation(step, values)

    def _on_snapshot_result(self, _step: int, values: Sequence[Any]) -> None:
        word = self.snapshot_tracker.on_result(values)
        if word is not None:
            self._add_event("note", word)

    def _handle_failures(self, call: PendingCall, replies: Sequence[Reply], failures: Sequence[Failure]) -> None:
        """A refusal, a lost engine and an interrupt can be gone on from; a failure of the user's code can't."""
        if any(f.type == "SupersededError" for f in failures):
            self._cancel_pending_calls()
            call.on_cancel()
            self._history.close_run_log()  # the other notebook writes there
            self._end(State.FAILED, SupersededError(_SUPERSEDED_MESSAGE.format(step=self.step)))
            return
        if all(f.kind == "refused" for f in failures) and self._needs_resync:
            call.on_cancel()
            return
        self._needs_resync = True
        self._retry_count += 1
        self._recorder.clear_extra_rows()
        self._record_common_steps(dict(enumerate(replies)))
        gone = {f.rank for f in failures if f.is_engine_gone}  # they have had their time
        patience = _INTERRUPTED_GATHER_TIMEOUT_S if any(f.kind == "stuck" for f in failures) else _GATHER_TIMEOUT_S
        for other in self._pending_calls:
            ranks = [rank for rank in range(len(other.futures)) if rank not in gone]
            late = self._cluster.gather_replies([other.futures[r] for r in ranks], patience, ranks)
            self._record_common_steps(dict(zip(ranks, late, strict=True)))
        self._cancel_pending_calls()
        self._stall_detector.reset()
        own = [f for f in failures if f.kind == "error" and not f.victim]
        lost = sorted(gone | set(self._cluster.find_lost_ranks()))
        if lost and not own:
            call.on_cancel()
            self._handle_lost_ranks(lost, failures)
        elif not own and (self._is_interrupting or self._retry_count < _MAX_RETRIES):
            call.on_cancel()
            self._resync()
        else:
            self._resync()
            call.on_failure(EngineError(drop_consequential_refusals(failures)))

    def _cancel_pending_calls(self) -> None:
        """Nothing that is under way is waited for any longer."""
        for flight in reversed(self._pending_calls):  # so that what is wanted again stands in order
            flight.on_cancel()
        self._pending_calls.clear()

    def _on_steps_cancel(self, request: StepRequest, step: int) -> None:
        self._lr_updater.on_cancel(request.lr_change, step, self.step)

    def _on_steps_failure(self, request: StepRequest, step: int, error: EngineError) -> None:
        self._on_steps_cancel(request, step)  # who waits for it is told as the run ends
        self._end(State.FAILED, error)

    def _on_checkpoint_failure(self, request: CheckpointRequest, error: EngineError) -> None:
        self.checkpoint_manager.on_failure(request, self.step, error)  # the training itself is whole

    def _on_snapshot_failure(self, error: EngineError) -> None:  # here too
        self._add_event("error", f"the snapshot in memory failed: {error}".partition("\n")[0])

    def _on_evaluation_failure(self, step: int, error: EngineError) -> None:  # and here
        self.evaluation_tracker.mark_done(step)
        self._stop_request, self.exception = self._stop_request or "pause", error
        self._add_event("error", f"the evaluation failed: {error}".partition("\n")[0])

    def _handle_lost_ranks(self, lost_ranks: list[int], failures: Sequence[Failure]) -> None:
        """Engines are gone: go on with others or without, or pause until somebody asks for that."""
        self._lost_ranks = lost_ranks
        for failure in failures:
            if failure.rank in lost_ranks:
                why = failure.message.partition(". ")[0]
                self._add_event("lost", f"node {failure.rank} lost at step {self.step}: {why}", failure.rank)
        self._engine_loss_count = self._engine_loss_count + 1 if self.step == self._last_engine_loss_step else 1
        self._last_engine_loss_step = self.step
        if self.plan.on_failure == "pause":
            self._stop_request, self.exception = self._stop_request or "pause", EngineError(failures)
        elif self._engine_loss_count > _MAX_ENGINE_LOSSES:
            self._add_event(
                "error",
                f"engines were lost {self._engine_loss_count} times in a row at step {self.step}: so would others be",
            )
            self._end(State.FAILED, EngineError(failures))
        else:
            self._repair()

    def _repair(self, reason: str = "") -> None:
        """Bring all ranks to one step, the lost ones replaced or left out. What can't be repaired ends the run.

        `why` that is to be done, where none is lost.
        """
        if self.plan.recover is None:
            raise ClusterError("this run can't be repaired")
        lost, before, size = self._lost_ranks, self.step, self._cluster.world_size
        self._on_change()
        try:
            found = self.plan.recover(lost)
        except (DtkitError, ValueError) as error:
            self._end(State.FAILED, error)
            return
        self._recorder.record_extra_rows(found.step)
        self._lost_ranks, self.step, self.lr, self._retry_count = [], found.step, found.lr, 0
        self._next_step = self.step
        self._lr_updater.reset_to(self.step)
        self.evaluation_tracker.reset_to(self.step)
        self.snapshot_tracker.reset_to(self.step)
        if self._load_balancer is not None and self.plan.balanced_shard_sizes is not None:
            self._load_balancer = LoadBalancer(self.plan.balanced_shard_sizes)
        if lost:
            how = "replaced" if self._cluster.world_size == size else "left out"
            self._add_event("repair", _describe_repair(lost, how, before, found))
        elif (gone := before - found.step) > 0:
            source = f" ({found.source})" if found.source else ""
            self._add_event(
                "note", f"all go back to step {found.step}, {format_count(gone, 'step')} lost{source}: {reason}"
            )
        else:
            self._add_event("note", f"all go on from step {found.step}, no step lost: {reason}")

    def _resync(self) -> None:
        """After a failure in which no engine was lost: form the group anew, and have all ranks at one step."""
        standings = recovery.query_positions(self._cluster, self.plan.job)
        self._lost_ranks = [rank for rank in range(self._cluster.world_size) if rank not in standings]
        if self._lost_ranks or recovery.is_out_of_sync(standings):
            self._repair(recovery.explain_out_of_sync(standings))
            return
        self.step = next(iter(standings.values())).step
        self._reform_group()

    def _reform_group(self) -> None:
        """Twice if need be: an interrupt may arrive at an engine late."""
        with contextlib.suppress(DtkitError):
            self._cluster.form_process_group()
            return
        try:
            self._cluster.form_process_group()
        except DtkitError as error:
            self._add_event("error", f"the process group could not be formed anew: {error}")

    def _record_common_steps(self, replies: Mapping[int, Reply]) -> None:
        """Record the steps that all ranks completed before one failed."""
        common = self._recorder.record_common_steps(replies)
        if common is not None:
            self.step = common

    # -- commands ---------------------------------------------------------------------------------------------

    def _execute(self, command: _Command) -> None:
        running = self.state is State.RUNNING
        if command.name in ("resume", "step") and self._lost_ranks and not running:
            self._repair()
        if self.state.has_ended:
            self._pending_answers.append(command.answer)
            self._answer_waiting()
        elif command.name == "called":
            self._on_callbacks_done(*command.value)
        elif command.name == "abandon":
            self._cancel_pending_calls()
            self._end(State.STOPPED)
        elif command.name in ("pause", "stop"):
            if not self._stop_request:
                self._pause_requested_at = time.monotonic()
            self._stop_request = "stop" if "stop" in (self._stop_request, command.name) else "pause"
            self._pending_answers.append(command.answer)
            if self._pending_calls:
                self._cluster.end_early(self.plan.job, enabled=True)
        else:
            {
                "lr": self._handle_set_lr,
                "resume": self._handle_resume,
                "step": self._handle_step,
                "save": self._handle_save,
                "break": self._handle_interrupt,
                "repair": self._handle_repair,
            }[command.name](command)

    def _is_callback_due(self, step: int) -> bool:
        return self._callback_runner.is_due(step, self.plan.steps_per_epoch)

    def _on_callbacks_done(self, token: object, error: BaseException | None) -> None:
        """Callbacks have returned."""
        if self._callback_runner.mark_done(token) and error is not None:
            self._stop_request, self.exception = self._stop_request or "pause", error
            self._add_event("error", f"a callback failed: {type(error).__name__}: {error}".partition("\n")[0])

    def _handle_repair(self, command: _Command) -> None:
        """Somebody asks for what is lost to be replaced. While steps are taken it is seen to anyway."""
        self._lost_ranks = sorted({*self._lost_ranks, *self._cluster.find_lost_ranks()})
        if self._lost_ranks and self.state is not State.RUNNING:
            self._repair()
        resolve(command.answer, self.step)

    def _handle_save(self, command: _Command) -> None:
        self.checkpoint_manager.add_request(command.value)
        resolve(command.answer, self.step)

    def _handle_resume(self, command: _Command) -> None:
        if self._stop_request != "stop":  # a pause, or the end of some steps, that is overtaken
            self._was_interrupted = self._explain_next_step = False
            while self._pending_answers:
                resolve(self._pending_answers.pop(), self.step)
        self._start_until(self.plan.steps, "resume" if self.step else "start")
        resolve(command.answer, self.step)

    def _handle_step(self, command: _Command) -> None:
        if self.state is State.RUNNING:
            word = "the run is RUNNING; call run.pause() first, then run.step() takes one step at a time"
            command.answer.set_exception(RunError(word))
            return
        self._pending_answers.append(command.answer)
        steps, self._explain_next_step = command.value
        self._start_until(min(self.step + steps, self.plan.steps), None)

    def _handle_interrupt(self, command: _Command) -> None:
        """Interrupt what the engines do, and pause where that leaves them.

        Where nothing is known to be stuck, the pause that was asked for has a moment to take effect: broken off amid a
        step, ranks may stand apart, and where each has a part of its own all go back to the last snapshot.
        """
        if not self._stop_request:
            self._pause_requested_at, self._stop_request = time.monotonic(), "pause"
        self._pending_answers.append(command.answer)
        if self._pending_calls:
            stuck = self.stall_report is not None and self.stall_report.kind == "stuck"
            grace = min(_MAX_PAUSE_GRACE_S, _PAUSE_GRACE_S + 2 * self._stall_detector.median_step_s)
            self._interrupt_at = -math.inf if stuck or self._is_interrupting else self._pause_requested_at + grace

    def _interrupt_engines(self) -> None:
        self._interrupt_at, self._is_interrupting, self._was_interrupted, self._retry_count = math.inf, True, True, 0
        self._add_event("pause", f"interrupted at step {self.step}: what was under way is broken off")
        self._cluster.interrupt()

    def _start_until(self, target_step: int, event: str | None) -> None:
        self._target_step, self.exception = target_step, None
        if self._stop_request == "pause":
            self._stop_request, self._interrupt_at = None, math.inf
        if self.state is not State.RUNNING:
            if event:
                self._add_event(event, f"{event} at step {self.step}")
            self._enter_state(State.RUNNING)

    def _handle_set_lr(self, command: _Command) -> None:
        running = (
            self.state is State.RUNNING and not self._callback_runner.is_running
        )  # callbacks are called between steps
        self._lr_updater.request(command.value, command.answer if running else None)
        if not running:
            self.lr = command.value
            resolve(command.answer, self.step)
        self._recorder.add_event(
            self._next_step, "lr", f"learning rate {command.value:g}"
        )  # what is under way has the old one
        self._on_change()

    # -- states -----------------------------------------------------------------------------------------------

    def _on_idle(self) -> None:
        """Nothing is in flight: all ranks stand at `step`."""
        self._next_step, self._needs_resync, self._is_interrupting, self._interrupt_at = (
            self.step,
            False,
            False,
            math.inf,
        )
        self._cluster.end_early(
            self.plan.job, enabled=False
        )  # whoever left the word: a kernel that was killed since, too
        if (
            self.state.has_ended
            or self._send_checkpoints_when_idle()
            or (self._stop_request == "stop" and self._snapshot_before_idle())
        ):
            return
        if self._stop_request == "stop":
            self._add_event("stop", f"stopped at step {self.step}")
            self._end(State.STOPPED)
        elif self.state is State.RUNNING:
            self._on_idle_while_running()
        elif self.state is State.PAUSED:
            self._stop_request = None
            self._answer_waiting()

    def _on_idle_while_running(self) -> None:
        """What is to be done before the next step, if there is one."""
        due = self._is_evaluation_due(self.step)
        if due and not self._stop_request:
            self._send_evaluation(self.step)
        elif not self._stop_request and self._is_callback_due(self.step):
            self._callback_runner.start(self.step, lambda *found: self._inbox.put(_Command("called", found, Future())))
        elif (self._stop_request or self.step >= self.plan.steps) and self._snapshot_before_idle():
            return
        elif self.step >= self.plan.steps and not due:
            self._add_event("done", f"done after {self.step} steps")
            self._end(State.COMPLETED)
        elif self._stop_request or self.step >= self._target_step:
            if self._stop_request and self.exception is None and not self._was_interrupted:
                self._add_event("pause", f"paused at step {self.step}")
            self._was_interrupted = False
            self._stop_request = None
            self._enter_state(State.PAUSED)
            self._answer_waiting()

    def _end(self, state: State, error: BaseException | None = None) -> None:
        if error is not None:
            self.exception = error
            self._add_event("error", str(error).partition("\n")[0])
        with self._state_condition:  # from here on nobody can put a command into the inbox
            self._set_state(state)
            while not self._inbox.empty():
                event = self._inbox.get_nowait()
                if isinstance(event, _Command):
                    self._pending_answers.append(event.answer)
                    if event.name == "save":
                        self.checkpoint_manager.add_request(event.value)
        self.checkpoint_manager.cancel_requests(f"the run has {_ENDED_PHRASES[state]} at step {self.step}")
        self._answer_waiting()
        self._on_change()

    def _answer_waiting(self) -> None:
        """Tell those who wait where the run stands now."""
        while self._pending_answers:
            resolve(self._pending_answers.pop(), self.step)
        self._lr_updater.answer_pending(self.step)

    def _enter_state(self, state: State) -> None:
        with self._state_condition:
            self._set_state(state)
        self._on_change()

    def _set_state(self, state: State) -> None:
        now = time.monotonic()
        if self._running_since is not None:
            self._accumulated_s, self._running_since = self._accumulated_s + now - self._running_since, None
        if state is State.RUNNING:
            self._running_since = now
        self.state = state
        self._state_condition.notify_all()

    def _add_event(self, kind: str, text: str, rank: int | None = None) -> None:
        self._recorder.add_event(self.step, kind, text, rank)


_ENDED_PHRASES = {State.COMPLETED: "completed", State.STOPPED: "been stopped", State.FAILED: "failed"}
RETRAIN_HINT = "run.exception says why. cluster.train(...) starts anew, with resume_from=path from a checkpoint"
"""What to do when a run has failed."""
_EXTEND_HINT = "run.extend(epochs=1) trains on; cluster.train(...) starts anew"
_SUPERSEDED_MESSAGE = (
    "another notebook has taken this cluster over, and the run with it, after step {step}. This one shows what was "
    "until then; dtkit.attach() takes it back"
)
_COMMAND_PHRASES = {
    "pause": "be paused",
    "resume": "be resumed",
    "stop": "be stopped",
    "step": "take a step",
    "lr": "change",
    "abandon": "end",
    "save": "be saved",
    "break": "be interrupted",
    "repair": "be repaired",
}


def _describe_repair(lost_ranks: Sequence[int], action: str, old_step: int, result: RecoveryResult) -> str:
    """What a repair did, in a line."""
    names = ", ".join(map(str, lost_ranks))
    gone = max(result.lost_steps, old_step - result.step)
    steps = "no step lost" if gone == 0 else f"{format_count(gone, 'step')} lost"
    nodes = f"node{'s' * (len(lost_ranks) > 1)} {names}"
    source = f" ({result.source})" if result.source else ""
    return f"{nodes} {action}: all go on from step {result.step}{source} after {result.duration_s:.1f} s, {steps}"


def _get_slowest_step_s(advances: Sequence[DispatchResult]) -> float:
    """Seconds a step: the slowest rank's median."""
    return max(float(np.median(np.asarray(advance.rows)["step_s"])) for advance in advances)
