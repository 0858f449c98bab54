"""The thread that drives a run: it sends dispatches, records their results, and obeys commands.

The driver is an actor. All commands and replies of a run arrive in one inbox. So the run's state has one writer, and
events are handled one after another. Two dispatches are in flight, so that engines never wait for the notebook (one
when steps are slow, see :mod:`dtkit.training.dispatch`).

Every dispatch contains the step at which the job must be. Engines refuse it if they are at another step. The reason is
that an earlier dispatch ended early, the group was formed again, or a gradient was NaN. The driver then waits for all
calls, and continues from the engines' step.

The states are in :mod:`dtkit.training.states`. The driver waits without a limit only while nothing is in flight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.formatting import format_count, format_learning_rate, name_nodes_at_start
from dtkit._util.guard import run_guarded
from dtkit.errors import RunError
from dtkit.training.boundary_actions import (
    BoundaryActions,
    CallbackAction,
    CheckpointAction,
    EvaluationAction,
    ReplicaCheckAction,
    SnapshotAction,
)
from dtkit.training.dispatch import StepDispatcher
from dtkit.training.failures import FailureHandler
from dtkit.training.pending_calls import PendingCall, PendingCalls
from dtkit.training.progress import RunProgress, resolve
from dtkit.training.recorder import Recorder
from dtkit.training.states import ENDED_PHRASES, STATE_TABLE, describe_refusal
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.history.history import History
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.training.config import RunPlan


@dataclasses.dataclass(frozen=True)
class _Command:
    name: str
    value: Any
    answer: Future[int]


class Driver:
    """One run's thread, and the parts that it drives.

    `on_change` is called after every change, without a lock; `run_callbacks` at the end of every epoch.
    """

    def __init__(
        self,
        engine_group: EngineGroup,
        plan: RunPlan,
        history: History,
        on_change: Callable[[], None],
        run_callbacks: Callable[[], None],
    ) -> None:
        self._engine_group, self._on_change = engine_group, on_change
        self._inbox: queue.SimpleQueue[_Command | PendingCall[Any]] = queue.SimpleQueue()
        self._waiting_answers: list[Future[int]] = []
        self._thread: threading.Thread | None = None
        self.snapshot_folder = engine_group.cluster_folder.make_snapshot_folder(plan.job)
        """The folder of the checkpoints to go back to when an engine is lost."""
        progress = self.progress = RunProgress(plan, history, Recorder(engine_group, history))
        calls = self.calls = PendingCalls(engine_group, progress, self._inbox.put, on_change)
        self.actions = BoundaryActions(
            progress,
            EvaluationAction(engine_group, progress, calls),
            CallbackAction(progress, run_callbacks, self.submit),
            SnapshotAction(progress, calls),
            CheckpointAction(progress, calls, self.snapshot_folder, on_change),
        )
        self.replica_check = ReplicaCheckAction(progress)
        self.steps = StepDispatcher(engine_group, progress, calls, self.replica_check, self._fail)
        self.failures = FailureHandler(
            engine_group,
            progress,
            calls,
            self.snapshot_folder,
            rewind=self._rewind,
            fail=self._fail,
            on_change=on_change,
        )

    # -- from other threads -----------------------------------------------------------------------------------

    def start(self, state: State = State.PAUSED) -> None:
        """Begin to take commands, also again after the end; or be in the end state that another notebook left."""
        self.progress.begin()
        self.actions.callbacks.runner.reset()
        self._enter(state)
        if not state.has_ended:
            self._thread = threading.Thread(target=self._run, name=f"dtkit-{self.progress.plan.job}", daemon=True)
            self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the end of the run and of its views. Return whether they have ended."""
        if self._thread is not None and not self._is_own_thread:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return self.progress.state.has_ended

    def submit(self, name: str, value: Any = None) -> Future[int]:
        """Put a command into the inbox. The future returns the step at which it took effect."""
        answer: Future[int] = Future()
        with self.progress.changed:
            state, step = self.progress.state, self.progress.step
            if state.has_ended:
                raise RunError(describe_refusal(state, step, name, self.progress.release_hint))
            self._inbox.put(_Command(name, value, answer))
        return answer

    def wait(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds until the run is not RUNNING. Return whether it isn't."""
        return self.progress.wait_for(lambda: self.progress.state not in (State.PENDING, State.RUNNING), timeout)

    # -- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        run_guarded(self._run_loop, self._fail_all)

    def _fail_all(self, error: Exception) -> None:
        self.calls.cancel_all()  # answers their callers, too
        self._fail(error)

    @property
    def _is_own_thread(self) -> bool:
        """Whether this is the run's thread. A view that sees the end may start the run again, with another thread."""
        return self._thread is threading.current_thread()

    def _run_loop(self) -> None:
        while self._is_own_thread and not self.progress.state.has_ended:
            self._send_until_full()
            event = self._wait_for_event()
            if isinstance(event, _Command):
                self._execute_or_answer(event)
            else:
                for call in self.calls.take_answered(event):
                    self._process_replies(call)
            if self._is_own_thread and not self.calls.pending:
                self._on_idle()

    def _wait_for_event(self) -> _Command | PendingCall[Any]:
        """Return the next event. Engines that don't answer within a collective's time limit are stuck."""
        deadline = time.monotonic() + self._engine_group.call_timeout_s
        while True:
            if self.calls.interrupt_if_due():
                continue
            part = max(0.0, min(timeouts.DRIVER_POLL_S, self.calls.interruption.remaining_s))
            try:
                # waits: an idle run waits for its user; else the limit is `call_timeout_s`
                return self._inbox.get(timeout=part if self.calls.pending else None)
            except queue.Empty:
                self._engine_group.transport.check_reachable()
                self.calls.check_for_stalls()
                if time.monotonic() >= deadline:
                    return self.calls.pending[0]

    def _send_until_full(self) -> None:
        progress, actions = self.progress, self.actions
        while progress.state is State.RUNNING and not progress.stop_request and not progress.needs_resync:
            step = progress.next_step
            if actions.evaluation.is_due(step):
                actions.evaluation.perform(step)
            if self.steps.is_full or actions.callbacks.is_due(step):
                return
            actions.save_if_due(step, self.steps.flush_lr)
            if progress.next_step >= progress.target_step:
                return
            self.steps.send_message(actions)

    def _process_replies(self, call: PendingCall[Any]) -> None:
        replies = self.calls.gather_replies(call, self.steps.sizer.step_s)
        failures = [reply.failure for reply in replies if reply.failure is not None]
        with contextlib.ExitStack() as on_error:
            on_error.callback(call.on_cancel)
            if failures:
                self.failures.handle(call, replies, failures)
            else:
                call.on_result(call.step, [reply.value for reply in replies])
            on_error.pop_all()
        self.calls.check_for_stalls()  # notes at once that a straggler continues, even if no view asks for a while
        self._on_change()

    def _rewind(self, step: int) -> None:
        self.steps.rewind(step)
        self.actions.rewind(step)

    # -- commands ---------------------------------------------------------------------------------------------

    def _execute_or_answer(self, command: _Command) -> None:
        """Execute a command. If that fails, end the run and answer the caller."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._waiting_answers.append, command.answer)
            self._execute(command)
            on_error.pop_all()

    def _execute(self, command: _Command) -> None:
        progress = self.progress
        if command.name in ("resume", "step") and progress.lost_ranks and progress.state is not State.RUNNING:
            self.failures.repair()
        if progress.state.has_ended:
            self._waiting_answers.append(command.answer)
            self._answer_waiting()
        elif command.name not in STATE_TABLE[progress.state].commands:
            message = "the run is RUNNING; call run.pause() first, then run.step() takes one step at a time"
            command.answer.set_exception(RunError(message))
        else:
            self._handlers[command.name](command)

    @property
    def _handlers(self) -> Mapping[str, Callable[[_Command], None]]:
        return {
            "pause": self._handle_pause_or_stop,
            "stop": self._handle_pause_or_stop,
            "interrupt": self._handle_interrupt,
            "resume": self._handle_resume,
            "step": self._handle_step,
            "lr": self._handle_lr,
            "save": self._handle_save,
            "repair": self._handle_repair,
            "callback_failed": lambda failed: self.actions.callbacks.pause_after(failed.value),
            "callbacks_done": lambda done: self.actions.callbacks.on_done(*done.value),
            "abandon": self._handle_abandon,
        }

    def _handle_pause_or_stop(self, command: _Command) -> None:
        progress = self.progress
        if not progress.stop_request:
            self.calls.interruption.note_pause_request()
        progress.stop_request = "stop" if "stop" in (progress.stop_request, command.name) else "pause"
        self._waiting_answers.append(command.answer)
        if self.calls.pending:
            self._engine_group.cluster_folder.set_end_early(progress.plan.job, enabled=True)

    def _handle_interrupt(self, command: _Command) -> None:
        """Interrupt the engines, and pause at the step that they are then at."""
        if not self.progress.stop_request:
            self.calls.interruption.note_pause_request()
            self.progress.stop_request = "pause"
        self._waiting_answers.append(command.answer)
        self.calls.schedule_interrupt()

    def _handle_resume(self, command: _Command) -> None:
        if self.progress.stop_request != "stop":  # takes back a pause, or the end of `step(n)`
            self.calls.interruption.is_logged = self.steps.explain_next_step = False
            self._resolve_waiting()
        self._start_until(self.progress.plan.steps, "resume" if self.progress.step else "start")
        resolve(command.answer, self.progress.step)

    def _handle_step(self, command: _Command) -> None:
        self._waiting_answers.append(command.answer)
        steps, self.steps.explain_next_step = command.value
        self._start_until(min(self.progress.step + steps, self.progress.plan.steps), None)

    def _start_until(self, target_step: int, event: str | None) -> None:
        progress = self.progress
        progress.target_step, progress.exception = target_step, None
        if progress.stop_request == "pause":
            progress.stop_request = None
            self.calls.interruption.cancel()
        if progress.state is not State.RUNNING:
            if event:
                progress.add_event(event, f"{event} at step {progress.step:,}")
            self._enter(State.RUNNING)

    def _handle_lr(self, command: _Command) -> None:
        """Send the learning rate with the next dispatch. While callbacks run, no dispatch is coming."""
        progress = self.progress
        is_running = progress.state is State.RUNNING and not self.actions.callbacks.runner.is_running
        self.steps.lr_updater.request(command.value, command.answer if is_running else None)
        # Dispatches in flight have the old one.
        progress.recorder.add_event(progress.next_step, "lr", f"learning rate {format_learning_rate(command.value)}")
        if not is_running:
            progress.lr = command.value
            resolve(command.answer, progress.step)
        self._on_change()

    def _handle_save(self, command: _Command) -> None:
        self.actions.checkpoint.manager.add_request(command.value)
        resolve(command.answer, self.progress.step)

    def _handle_repair(self, command: _Command) -> None:
        """Replace lost engines. A run that takes steps does so without this command."""
        progress = self.progress
        progress.lost_ranks = sorted({*progress.lost_ranks, *self._engine_group.membership.find_lost_ranks()})
        if progress.lost_ranks and progress.state is not State.RUNNING:
            self.failures.repair()
        resolve(command.answer, progress.step)

    def _handle_abandon(self, _command: _Command) -> None:
        self.calls.cancel_all()
        self._end(State.STOPPED)

    # -- states -----------------------------------------------------------------------------------------------

    def _on_idle(self) -> None:
        """Decide what to do next. Nothing is in flight, and all ranks are at `step`."""
        progress = self.progress
        progress.next_step, progress.needs_resync = progress.step, False
        self.calls.interruption.reset()
        # A kernel that was killed meanwhile may have set the flag.
        self._engine_group.cluster_folder.set_end_early(progress.plan.job, enabled=False)
        if progress.state.has_ended:
            return
        is_running, is_stopping = progress.state is State.RUNNING, progress.stop_request == "stop"
        if self.actions.save_when_idle(self.calls, self.steps.flush_lr, is_running=is_running):
            return
        if is_stopping and self.actions.snapshot.perform_before_idle(progress.step):
            return
        if is_stopping:
            progress.add_event("stop", f"stopped at step {progress.step:,}")
            self._end(State.STOPPED)
        elif is_running:
            self._on_idle_while_running()
        elif progress.state is State.PAUSED:
            progress.stop_request = None
            self._answer_waiting()

    def _on_idle_while_running(self) -> None:
        """Perform the actions that are due before the next step. Pause or complete if no step is left."""
        progress, actions = self.progress, self.actions
        step, is_stopping, is_complete = progress.step, progress.stop_request, progress.step >= progress.plan.steps
        is_evaluation_due, is_resting = actions.evaluation.is_due(step), is_stopping or step >= progress.target_step
        if is_evaluation_due and not is_stopping:
            actions.evaluation.perform(step)
        elif not is_stopping and actions.callbacks.is_due(step):
            actions.callbacks.perform(step)
        elif is_resting and actions.snapshot.perform_before_idle(step, is_brief=not (is_stopping or is_complete)):
            return
        elif is_complete and not is_evaluation_due:
            progress.add_event("done", f"done after {format_count(step, 'step')}")
            self._end(State.COMPLETED)
        elif is_stopping and self.steps.check_replicas_before_pause():
            return
        elif is_resting:
            self._pause()

    def _pause(self) -> None:
        progress, interruption = self.progress, self.calls.interruption
        if progress.stop_request and progress.exception is None and not interruption.is_logged:
            progress.add_event("pause", f"paused at step {progress.step:,}")
        interruption.is_logged = False
        progress.stop_request = None
        self._enter(State.PAUSED)
        self._answer_waiting()

    def _fail(self, error: BaseException) -> None:
        self.progress.exception = error
        self.progress.add_event("error", name_nodes_at_start(str(error)))
        self._end(State.FAILED)

    def _end(self, state: State) -> None:
        manager = self.actions.checkpoint.manager
        with self.progress.changed:  # from here on, the inbox accepts no commands
            self._set_state(state)
            while not self._inbox.empty():
                event = self._inbox.get_nowait()
                if isinstance(event, _Command):
                    self._waiting_answers.append(event.answer)
                    if event.name == "save":
                        manager.add_request(event.value)
        manager.cancel_requests(f"the run has {ENDED_PHRASES[state]} at step {self.progress.step:,}")
        self._answer_waiting()
        self._on_change()

    def _enter(self, state: State) -> None:
        with self.progress.changed:
            self._set_state(state)
        self.progress.persist_position()
        self._on_change()

    def _set_state(self, state: State) -> None:
        assert state in STATE_TABLE[self.progress.state].next_states, f"{self.progress.state} -> {state}"
        self.progress.set_state(state)

    def _answer_waiting(self) -> None:
        """Answer all waiting commands with the run's step."""
        self._resolve_waiting()
        self.steps.lr_updater.answer_pending(self.progress.step)

    def _resolve_waiting(self) -> None:
        while self._waiting_answers:
            resolve(self._waiting_answers.pop(), self.progress.step)
