"""Lifecycle of a run: its job is built or taken over from another notebook, extended, and released."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import shutil
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.formatting import name_nodes, name_nodes_at_start
from dtkit._util.guard import run_guarded_in_thread
from dtkit.checkpoint import folders
from dtkit.checkpoint.checkpoint import Checkpoint
from dtkit.checkpoint.manager import CheckpointRequest
from dtkit.errors import CheckpointError, DtkitError, EngineError, RunError
from dtkit.history import engine_outbox, run_log
from dtkit.history.between_steps import sum_time_since
from dtkit.training import job_end, persisted_run, recovered_data, recovered_state, recovery
from dtkit.training.callbacks import check_epochs, finish_callbacks
from dtkit.training.config import SnapshotInterval
from dtkit.training.resume import ResumePoint
from dtkit.training.states import RETRAIN_HINT
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit._util.deadline import Deadline
    from dtkit.checkpoint.result import CheckpointResult
    from dtkit.history.engine_outbox import EvaluationSums, UnreadDispatches
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.job_end import JobEnd
    from dtkit.training.driver import Driver
    from dtkit.training.job_client import JobClient


_NOT_KEPT_NOTE = (
    "the notebook keeps no copy of the engines' data, which are large or of unknown size. If all engines end at once, "
    "the run fails, and its last snapshot becomes a checkpoint"
)


class RunLifecycle:
    """The cluster's operations on one run."""

    def __init__(
        self, engine_group: EngineGroup, driver: Driver, job: JobClient, on_change: Callable[[], None]
    ) -> None:
        self._engine_group, self._driver, self._job, self._on_change = engine_group, driver, job, on_change
        self._progress = driver.progress
        if (hosts := engine_group.transport.hosts) is not None:
            driver.actions.checkpoint.manager.host_files = hosts.checkpoint_files
        driver.actions.checkpoint.manager.on_snapshot = self._keep_inputs
        self._repair: Future[None] | None = None
        # locks: while a repair starts, since two threads must not replace the same engines
        self._repair_lock = threading.Lock()

    def build(self, resume_point: ResumePoint | None) -> None:
        """Build the job on the engines. The run is then paused before its first step, or at the checkpoint's step."""
        progress, plan = self._progress, self._progress.plan
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._job.free)
            progress.lr = plan.job_spec.build(self._engine_group, plan.job)
            if resume_point is not None:
                self._restore(resume_point)
            on_error.pop_all()
        self._engine_group.cluster_folder.set_job_flag(present=True)
        if not self._can_keep_inputs:
            progress.add_event("note", _NOT_KEPT_NOTE)
        self._persist()
        self._driver.start()

    def _restore(self, resume_point: ResumePoint) -> None:
        progress, plan = self._progress, self._progress.plan
        progress.lr, overridden = resume_point.restore_job(self._engine_group, plan.job)
        progress.history.extend(resume_point.checkpoint.load_history())
        progress.history.num_inherited_events = len(progress.history.events)
        callback_step, evaluation_step = resume_point.last_callback_step, resume_point.last_evaluation_step
        self._restore_position(resume_point.step, callback_step, evaluation_step, resume_point.elapsed_s)
        resume_point.restore_callbacks(plan.options.callbacks)
        mesh = plan.options.strategy.build_mesh(plan.spec.world_size)
        progress.add_event("note", name_nodes(resume_point.describe(plan.spec, mesh, overridden)))

    # -- for the loss of all engines --------------------------------------------------------------------------

    def _keep_inputs(self) -> None:
        """Store data and model once, now that there is a snapshot to continue from. A later one tries again."""
        folder = self._driver.snapshot_folder
        if self._can_keep_inputs and not recovered_data.is_stored(folder) and not self._progress.state.has_ended:
            with contextlib.suppress(DtkitError, OSError):
                recovered_data.store(self._engine_group, folder)

    @property
    def _can_keep_inputs(self) -> bool:
        """Whether data and model are small enough to be kept on disk; data that engines load have no known size."""
        spec, validation = self._progress.plan.job_spec, self._progress.plan.options.validation
        sizes = [spec.model_handle.nbytes, spec.data_handle.nbytes, 0 if validation is None else validation.nbytes]
        is_local = self._engine_group.membership.is_single_host
        return sum(sizes) <= (recovered_data.MAX_BYTES if is_local else recovered_data.MAX_SENT_BYTES)

    # -- for a notebook that takes over -----------------------------------------------------------------------

    def _persist(self) -> None:
        """Write the plan for a notebook that takes this run over, and from here on the run's history."""
        if not self._engine_group.can_be_reattached:
            return
        log, warning = persisted_run.save(self._engine_group, self._progress.plan)
        if warning:
            self._progress.add_event("note", warning)
        log.start_recording(self._progress.history)

    def _update_persisted(self) -> None:
        """Write the changed plan, if the earlier one was written."""
        log = self._progress.history.run_log
        if log is None or self._engine_group.is_superseded:  # the folder is another notebook's now
            return
        try:
            persisted_run.save(self._engine_group, self._progress.plan)
        except OSError as error:
            reason = f"{error.strerror or error}: {log.folder}"
            text = f"a notebook that takes over won't know about this extension: {reason}"
            self._progress.add_event("note", text)

    def reattach(self) -> None:
        """Restore a run of another notebook, with its history. It is then paused at the engines' step, or has ended."""
        group, progress, plan = self._engine_group, self._progress, self._progress.plan
        folder = group.folder / run_log.RUNS_FOLDER / plan.job
        history = progress.history
        list_unread_ranks = functools.partial(engine_outbox.list_ranks, group.folder, plan.job, range(group.world_size))
        history.extend(
            run_log.read_history(
                folder, ranks_per_replica=plan.options.ranks_per_replica, list_unread_ranks=list_unread_ranks
            )
        )
        run_log.RunLog(folder).start_recording(history)
        lost_ranks = group.membership.find_lost_ranks()
        positions = recovery.query_positions(group, plan.job, lost_ranks)
        common_step = min((position.step for position in positions.values()), default=0)
        self._read_unread(common_step)
        failures = engine_outbox.read_failures(group.folder, plan.job, range(group.world_size), common_step)
        if lost_ranks or len(positions) < group.world_size or recovery.is_out_of_sync(positions):
            result = self._driver.failures.recover(lost_ranks)
            step, progress.lr, source = result.step, result.lr, f" ({result.source})" if result.source else ""
        else:
            step, progress.lr, source = positions[0].step, positions[0].lr, ""
            # A recovery may have restored this state before its notebook died.
            if (state := recovered_state.load_interrupted(group.folder, plan.job)) is not None:
                state.discard(group.folder, plan.job)
        if any(not failure.victim for failure in failures):
            progress.exception = EngineError(failures)
        self._continue_from(step, source)

    def _read_unread(self, common_step: int) -> None:
        """Record the engines' results that the other notebook did not read."""
        folder, job = self._engine_group.folder, self._progress.plan.job
        ranks = range(self._engine_group.world_size)
        dispatches = {rank: engine_outbox.read_dispatches(folder, job, rank) for rank in ranks}
        evaluations = {rank: engine_outbox.read_evaluations(folder, job, rank) for rank in ranks}
        self.replay_unread(dispatches, evaluations, common_step)

    def _continue_from(self, step: int, source: str) -> None:
        history = self._progress.history
        last_evaluation = max((evaluation.step for evaluation in history.evaluations), default=0)
        folder = self._engine_group.folder / run_log.RUNS_FOLDER / self._progress.plan.job
        num_steps, elapsed_s = run_log.read_elapsed(folder)
        elapsed_s += sum_time_since(history, num_steps)  # since then, and of the steps that engines took alone
        spans, check = run_log.read_last_step(folder, self._engine_group.world_size)
        if check is None or check.step <= step:  # the run did not go back to an earlier state
            self._progress.recorder.restore_spans(spans)
            self._driver.replica_check.checker.result = check
        self._restore_position(step, step, last_evaluation, elapsed_s=elapsed_s)
        kind, has_failed = run_log.find_takeover_kind(history.events), self._progress.exception is not None
        self._progress.add_event(kind, run_log.describe_takeover(kind, step, source, has_failed=has_failed))
        self._progress.recorder.note_missing_steps(step)
        self._driver.start(self._find_end() or State.PAUSED)

    def _find_end(self) -> State | None:
        """Return how the other notebook's run ended; None if it didn't. An error may have come after that notebook."""
        progress = self._progress
        if progress.exception is not None:
            if not any(event.kind == "error" and event.step == progress.step for event in progress.history.events):
                progress.add_event("error", name_nodes_at_start(str(progress.exception)))
            return State.FAILED
        commands = [
            event.kind for event in progress.history.events if event.kind in ("start", "resume", "stop", "done")
        ]
        is_over = {"stop": True, "done": progress.step >= progress.plan.spec.steps}.get((commands or [""])[-1], False)
        return None if not is_over else State.STOPPED if commands[-1] == "stop" else State.COMPLETED

    def replay_unread(
        self,
        unread_dispatches: Mapping[int, UnreadDispatches],
        unread_evaluations: Mapping[int, Mapping[int, EvaluationSums]],
        common_step: int,
    ) -> None:
        """Record the results that engines kept for a notebook that died. All ranks have taken `common_step` steps.

        An evaluation that is missing at that step is made when the run continues.
        """
        recorder, plan = self._progress.recorder, self._progress.plan
        first_unread = recorder.next_step
        recorder.record_unread(unread_dispatches, common_step)
        due = plan.list_due_evaluations(first_unread, common_step)
        recorder.record_unread_evaluations(unread_evaluations, due, common_step)

    def _restore_position(
        self, step: int, last_callback_step: int, last_evaluation_step: int, elapsed_s: float = 0.0
    ) -> None:
        """Continue an earlier run from `step`. The other arguments are its last steps with callbacks and evaluation."""
        self._progress.recorder.record_extra_rows(step)
        self._progress.restore(step, elapsed_s)
        self._driver.actions.restore(step, last_callback_step, last_evaluation_step)
        self._driver.steps.reset_balancer()

    def prepare_for_end(self, end: JobEnd) -> bool:
        """Write a checkpoint before the engines' job ends. Return whether a further job can continue from it."""
        return job_end.prepare(self._engine_group, self._driver, end)

    # -- the end ----------------------------------------------------------------------------------------------

    @property
    def last_checkpoint(self) -> CheckpointResult | None:
        """The last checkpoint that this notebook has written for the user."""
        return self._driver.actions.checkpoint.manager.last_result

    @property
    def has_weights(self) -> bool:
        """Whether the notebook has the weights of the present step."""
        return self._job.has_weights

    def save_into_own_folder(self) -> None:
        """Write a checkpoint of a paused run into its `checkpoint_dir`, unless it has none or that step's."""
        folder, step = self._progress.plan.options.checkpoint_policy.folder, self._progress.step
        saved = self.last_checkpoint
        is_saved = saved is not None and (saved.step, saved.path.parent) == (step, folder)
        if folder is None or not step or self._progress.lost_ranks or is_saved:
            return
        request = CheckpointRequest(folder, None)
        with contextlib.suppress(RunError, CheckpointError):  # the log has the reason
            self._driver.submit("save", request)
            request.result(self._engine_group.call_timeout_s)

    def keep_weights(self) -> Path:
        """Write a checkpoint of the present step for a callback, in place of its last one. Return its folder."""
        policy = self._progress.plan.options.checkpoint_policy
        assert policy.default_folder is not None
        request = CheckpointRequest(policy.default_folder / f"best-{policy.lineage[-1][:8]}", 1)
        self._driver.submit("save", request)
        return request.result(self._engine_group.call_timeout_s).path

    def restore_weights(self, path: Path, text: str) -> None:
        """Put a checkpoint's weights back on the engines, while a callback runs. The run stays at its step.

        Its history gets an event with `text`.
        """
        checkpoint, progress = Checkpoint(path), self._progress
        checkpoint.check_files()
        ResumePoint(checkpoint).restore_weights(self._engine_group, progress.plan.job, progress.step)
        self._job.forget_weights()
        progress.add_event("restore", text)

    def extend(self, *, epochs: int | None, steps: int | None, timeout: float | None) -> None:
        """Let an ended run take more steps; it is then paused. `limit` bounds the wait for views to show its end."""
        if (epochs is None) == (steps is None):
            raise ValueError(f"epochs={epochs}, steps={steps}: say how much longer by one of them, as in epochs=1")
        for name, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}; it must be an integer, as in {name}=1")
        num_steps = steps if steps is not None else (epochs or 0) * self._progress.plan.spec.steps_per_epoch
        if num_steps < 1:
            raise ValueError(f"epochs={epochs}, steps={steps}: train on by at least one step")
        state = self._progress.state
        if state not in (State.COMPLETED, State.STOPPED):
            message = f"this run is {state.value}; extend one that has completed or was stopped"
            raise RunError(f"{message}. {RETRAIN_HINT}" if state is State.FAILED else message)
        self._job.check_not_released("extend")
        limit = timeouts.LIFECYCLE_JOIN_TIMEOUT_S if timeout is None else timeout
        if not self._driver.join(limit):
            raise RunError(f"the run has ended, but a view has not shown its end within {limit:g} s; try again")
        plan = self._progress.plan.end_at(self._progress.step + num_steps)
        check_epochs(plan.options.callbacks, plan.spec)
        self._progress.plan = plan
        self._driver.start()
        self._update_persisted()

    def repair(self, timeout: float | None) -> None:
        """Replace the engines that are gone, after the run's end. After a TimeoutError, the repair continues."""
        with self._repair_lock:
            if self._repair is None or self._repair.done():
                self._repair = future = Future[None]()
                arguments = (functools.partial(self._replace_lost_engines, future), future.set_exception)
                threading.Thread(target=run_guarded_in_thread, args=arguments, name="dtkit-repair", daemon=True).start()
            future = self._repair
        if not concurrent.futures.wait([future], timeout).done:
            raise TimeoutError(f"the repair has not ended within timeout={timeout:g} s; it goes on")
        # waits: no more, since the repair has ended
        error = future.exception()
        if error is not None:
            raise error

    def _replace_lost_engines(self, done: Future[None]) -> None:
        if lost_ranks := self._engine_group.membership.find_lost_ranks():
            old_world_size = self._engine_group.world_size
            result = self._driver.failures.recover(lost_ranks)
            self._driver.failures.record_repair(old_world_size, result)
            actions = self._driver.actions
            self._restore_position(
                result.step,
                actions.callbacks.runner.last_called_step,
                actions.evaluation.last_evaluated_step,
                self._progress.elapsed_s,
            )
            self._on_change()
        done.set_result(None)

    def export(
        self,
        save: Callable[[Path], CheckpointResult],
        path: str | Path | None,
        format: str,  # noqa: A002 - as users type it
    ) -> CheckpointResult:
        """Write the model into a folder in another format, from a checkpoint that `save` writes next to it."""
        from dtkit.checkpoint.export import check_format  # loads torch

        check_format(format)
        if path is None:
            raise ValueError(f"format={format!r} needs a folder: run.save('model', format={format!r})")
        folder = folders.parse_new_folder("save(path", path).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        model = self._progress.plan.job_spec.model_handle.build_model()
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            saved = save(Path(temporary))
            Checkpoint(saved.path).export(folder, model, format)
        return dataclasses.replace(saved, path=folder)

    def fetch_callback_model(self, callback: Any) -> Any:
        """See :meth:`dtkit.EngineCallback.build_model`."""
        return self._job.fetch_callback_model(callback)

    def release(self, deadline: Deadline, *, check_idle: Callable[[], None] | None = None) -> None:
        """Free the job, after fetching its weights, and delete the run's own checkpoints for recovery. Idempotent.

        With `check_idle`, which raises RunError while another run is training, the engines keep data and model.
        """
        if self._job.is_released:
            self._job.free_inputs()
            return
        self._job.keep_state_dict(deadline)
        remaining = deadline.get_remaining_s()
        self._job.release_cause = "by run.release()" if check_idle is None else "by a later training"
        self._on_change()  # views advise nothing that needs the job
        self._progress.release_hint = f"The engines have freed it for a later training. {self._job.describe_remains()}"
        self._job.check_idle = check_idle
        self._job.free(remaining)
        history = self._progress.history
        log = history.run_log
        history.close_run_log()
        if self._engine_group.is_superseded:  # the folder is another notebook's now
            return
        shutil.rmtree(self._driver.snapshot_folder, ignore_errors=True)
        if log is not None:
            log.remove()

    def count_input_bytes(self) -> float:
        """Return the memory of the objects that were sent only for this run; infinite if unknown."""
        spec, world_size = self._progress.plan.job_spec, self._engine_group.world_size
        model, data = spec.model_handle, spec.data_handle
        sizes = {model.key: world_size * model.nbytes, data.key: data.nbytes}  # engines of a host share data
        return sum(size for key, size in sizes.items() if key in spec.owned_keys)

    def close(self) -> None:
        """End the run when the cluster closes, at a step boundary if the next one is soon. Idempotent.

        The weights are kept if the engines still send them.
        """
        self._driver.actions.snapshot.tracker.interval = SnapshotInterval()  # no snapshot will be used any more
        is_at_boundary = self._progress.state.has_ended
        with contextlib.suppress(RunError, TimeoutError):
            self._driver.submit("stop").result(timeouts.CLOSE_STOP_TIMEOUT_S)
            is_at_boundary = True
        with contextlib.suppress(RunError):
            self._driver.submit("abandon")
        self._driver.actions.checkpoint.manager.close(timeouts.CLOSE_CHECKPOINT_TIMEOUT_S)
        if is_at_boundary:
            self._job.keep_state_dict_if_quick()
        finish_callbacks(self._progress.plan.options.callbacks, timeouts.CLOSE_CALLBACKS_TIMEOUT_S)
        self._progress.history.close_run_log()
        self._job.release_cause = self._job.release_cause or "when its cluster closed"
