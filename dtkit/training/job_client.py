"""The notebook's requests to a run's job on the engines, such as weights, an evaluation, memory or a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting, timeouts
from dtkit._util.deadline import Deadline
from dtkit._util.function_checks import check_metrics
from dtkit.checkpoint import folders
from dtkit.checkpoint.manager import CheckpointRequest
from dtkit.dashboard.text.progress import show_progress
from dtkit.data import broadcast, distribute
from dtkit.errors import DtkitError, EngineError, RunError
from dtkit.history.speed import compute_median_step_s
from dtkit.rpc.measurements import ProfileOperations
from dtkit.rpc.protocol import DataOperations, JobOperations, make_call
from dtkit.training import state_dict
from dtkit.training.adapters import to_user_model
from dtkit.training.boundary_actions import make_save_call
from dtkit.training.recorder import combine_evaluations
from dtkit.training.validation import check_count
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dtkit.history.workload import Workload
    from dtkit.planning.memory_report import Memory
    from dtkit.planning.plan import Plan
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.verification import Verification
    from dtkit.training.driver import Driver
    from dtkit.types import Evaluation

_log = logging.getLogger("dtkit")
_MAX_DELAY_FACTOR = 100.0


class JobClient:
    """Calls the engines about one run's job, as long as they hold it."""

    def __init__(self, engine_group: EngineGroup, driver: Driver) -> None:
        self.release_cause: str | None = None
        """What made the engines free the job, as in "by run.release()"; None while they hold it."""
        self.check_idle: Callable[[], None] | None = None
        """Check that no other run is training, where the engines keep data and model after they freed the job."""
        self._engine_group, self._driver = engine_group, driver
        self._progress = driver.progress
        self._fetched_state: tuple[int, Mapping[str, Any]] | None = None
        self._model: tuple[int, Any] | None = None
        self._kept_placement: tuple[Any] | None = None
        self._last_memory: tuple[int, Sequence[Any]] | None = None  # its step, and the reports of all ranks

    @property
    def is_released(self) -> bool:
        """Whether the engines have freed the job."""
        return self.release_cause is not None

    @property
    def is_running(self) -> bool:
        """Whether the run takes steps, or is about to."""
        return self._progress.state in (State.PENDING, State.RUNNING)

    def check_not_released(self, action: str, remedy: str = "") -> None:
        """Raise RunError if the engines have freed the job. By default, it says how to train on."""
        if self.is_released:
            raise RunError(
                f"{action} needs the job on the engines, and this run was released {self.release_cause}. "
                f"{remedy or self.describe_remains()}"
            )

    def describe_remains(self) -> str:
        """Return how to continue after the engines have freed the job."""
        saved = self._driver.actions.checkpoint.manager.last_result
        if saved is not None:
            return f"Its checkpoint of step {saved.step:,} remains: cluster.train(..., resume_from={str(saved.path)!r})"
        if self._fetched_state is None:
            return "It has no checkpoint; cluster.train(...) starts again"
        return (
            "Its weights are in run.model, which this notebook can use; cluster.train(run.model, ...) trains on, with "
            "a new optimizer"
        )

    # -- the weights ------------------------------------------------------------------------------------------

    def fetch_model(self) -> Any:
        """Return the model of the present step. It is the same object until the run takes another step."""
        step = self._progress.step
        if self._model is not None and self._model[0] == step and not self.is_running:
            return self._model[1]
        model = to_user_model(self._progress.plan.job_spec.model_handle.build_with_state(self.fetch_state_dict()))
        if step == self._progress.step:
            self._model = step, model
        return model

    def forget_weights(self) -> None:
        """Fetch weights again when they are asked for, since the engines have others at the same step."""
        self._fetched_state = self._model = None

    @property
    def has_weights(self) -> bool:
        """Whether the weights of the present step were fetched."""
        return self._fetched_state is not None and self._fetched_state[0] == self._progress.step

    def fetch_callback_model(self, callback: Any) -> Any:
        """Return the model with the tensors of one of the run's callbacks on the engines."""
        plan = self._progress.plan
        if callback not in plan.options.on_engine:
            known = ", ".join(map(repr, plan.options.on_engine)) or "none"
            raise ValueError(f"{callback!r} is not among the callbacks of this run: on_engine= had {known}")
        self.check_not_released("build_model")
        index = plan.options.on_engine.index(callback)
        state = state_dict.fetch_state_dict(self._engine_group, plan.job, callback=index)
        return to_user_model(plan.job_spec.model_handle.build_with_state(state))

    def fetch_state_dict(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Return the whole model's state dict at the present step."""
        if self._fetched_state is not None and (self.is_released or self._fetched_state[0] == self._progress.step):
            return self._fetched_state[1]
        if self.is_released:
            raise RunError(
                "this run was released, and its weights could not be fetched before (an engine was lost or stuck, or "
                "no step was made). Ask for run.model as soon as a run has ended"
            )
        step = self._progress.step
        state = state_dict.fetch_state_dict(self._engine_group, self._progress.plan.job, timeout=timeout)
        if not self.is_running and step == self._progress.step:
            self._fetched_state = step, state
        return state

    def keep_state_dict(self, deadline: Deadline) -> None:
        """Fetch the weights and the placement before the job is freed, unless an engine with a part of them is gone."""
        try:
            self._fetched_state = self._progress.step, self.fetch_state_dict(deadline.get_remaining_s())
            self._kept_placement = (self.get_placement(deadline.get_remaining_s()),)
        except DtkitError as error:
            deadline.get_remaining_s()  # raises if engines are only slow, which then keep the job
            if isinstance(error, EngineError) and all(failure.kind == "refused" for failure in error.failures):
                return  # new engines never had the job; the run's own error says so
            _log.warning("the weights of %s were not kept: %s", self._progress.plan.spec.name, error)

    def keep_state_dict_if_quick(self) -> None:
        """Fetch the weights when the cluster closes, if all engines send them within some seconds."""
        if not self._progress.step or self.is_released:
            return
        with contextlib.suppress(DtkitError):
            state = state_dict.fetch_state_dict_within(
                self._engine_group, self._progress.plan.job, timeouts.CLOSE_FETCH_TIMEOUT_S
            )
            self._fetched_state = self._fetched_state if state is None else (self._progress.step, state)

    def free(self, timeout: float | None = None) -> None:
        """Let the engines free the job, and its inputs unless the cluster keeps those of earlier runs."""
        plan, group = self._progress.plan, self._engine_group
        with contextlib.suppress(DtkitError):
            if self.check_idle is not None:
                group.free_later(plan.job)  # with the call that builds the later run
            else:
                call = make_call(DataOperations.release, keys=[*plan.job_spec.owned_keys, plan.job])
                group.call_all(call, timeout=timeout)
            group.cluster_folder.set_job_flag(present=False)

    def free_inputs(self) -> None:
        """Let the engines free the inputs of an earlier run."""
        if self.check_idle is not None:
            self.check_idle = None
            self.release_cause = "by a later training, and its data were freed since"
            for key in self._progress.plan.job_spec.owned_keys:
                self._engine_group.free_later(key)

    # -- questions --------------------------------------------------------------------------------------------

    def evaluate(
        self,
        data: Any,
        metrics: Mapping[str, Callable[..., Any]] | None,
        batch_size: int | None,
        timeout: float | None,
    ) -> Evaluation:
        """See :meth:`dtkit.Run.evaluate`."""
        plan = self._progress.plan
        if plan.options.is_manual:
            raise ValueError(
                "evaluate() needs a loss= or a training_step(model, batch); this run's takes the optimizers too, and "
                "would update the model. Compute from run.model"
            )
        checked_metrics = check_metrics(metrics)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        deadline = Deadline(timeout, "evaluate")
        self._check_has_weights("evaluate")
        self._try_held_out(data, checked_metrics)
        with self._open_job(deadline) as job:
            handle = distribute.distribute_validation_data(
                self._engine_group, data, training_data=plan.job_spec.data_handle
            )
            pickled_metrics = (
                self._driver.actions.evaluation.pickled_metrics
                if metrics is None
                else self._engine_group.uploads.dumps(dict(checked_metrics), name="metrics")
            )
            plan = dataclasses.replace(plan, job=job)
            call = plan.make_evaluation_call(handle, pickled_metrics, batch_size=batch_size)
            step = self._progress.step
            return combine_evaluations(step, self._engine_group.call_all(call, timeout=deadline.get_remaining_s()))

    def _try_held_out(self, data: Any, metrics: Mapping[str, Callable[..., Any]] | None) -> None:
        """Raise FirstBatchError if model, loss or metrics refuse the first rows of `data`. No engine is asked."""
        from dtkit.data.first_batch import EVALUATION, check_held_out
        from dtkit.data.trial import TrialInputs

        job_spec = self._progress.plan.job_spec
        rows = job_spec.data_handle
        inputs = TrialInputs(self._engine_group, job_spec.model_handle, job_spec.program, rows, rows.columns)
        check_held_out(inputs, data, metrics, EVALUATION)

    def _check_has_weights(self, action: str) -> None:
        """Raise RunError unless the engines hold the job, or can build it again with the weights in the notebook."""
        if not self.is_released or self._fetched_state is None:
            self.check_not_released(action)
        elif self.check_idle is None:
            raise RunError(
                f"{action} needs the job on the engines, and this run was released {self.release_cause}. Call "
                f"run.{action}(...) before that, or compute from run.model, which this notebook has: "
                "with torch.no_grad(): run.model.eval()(inputs)"
            )
        else:
            self.check_idle()

    @contextlib.contextmanager
    def _open_job(self, deadline: Deadline) -> Iterator[str]:
        """Yield the key of a job with the run's model: its own, or one with the kept weights for a run before the
        current one, whose data the engines keep.
        """
        if not self.is_released or self._fetched_state is None:
            yield self._progress.plan.job
            return
        plan, group = self._progress.plan, self._engine_group
        model = plan.job_spec.model_handle.build_with_state(self._fetched_state[1])
        handle = broadcast.broadcast(group, model, by_shared_file=plan.options.strategy.shards_model)
        job = group.make_key("job")
        try:
            dataclasses.replace(plan.job_spec, model_handle=handle).build(
                group, job, timeout=deadline.get_remaining_s()
            )
            yield job
        finally:
            group.free_later(job)

    def measure_memory(self, expected: Plan | None, timeout: float | None) -> Memory:
        """See :meth:`dtkit.Run.memory`."""
        from dtkit.planning.memory_report import Memory

        if self._last_memory is None:
            self.check_not_released("memory", "Call run.memory() before that: it then returns the same afterwards")
        if expected is not None and not hasattr(expected, "get_rows"):
            raise TypeError(f"memory(plan={expected!r}): it must be a plan, as from cluster.plan(...)")
        plan = self._progress.plan
        if self.is_released and self._last_memory is not None:
            step, reports = self._last_memory
        else:
            step, call = self._progress.step, make_call(JobOperations.memory_usage, job=plan.job)
            reports = self._engine_group.call_all(call, timeout=timeout)
            self._last_memory = step, reports
        return Memory.from_reports(plan.spec.name, plan.spec.strategy, step, reports, expected)

    def measure_workload(self, timeout: float | None) -> Workload:
        """See :meth:`dtkit.Run.efficiency`."""
        self.check_not_released("efficiency")
        plan = self._progress.plan
        key = plan.job_spec.model_handle.key
        call = make_call(ProfileOperations.measure_workload, job=plan.job, model=key)
        return self._engine_group.call_all(call, timeout=timeout, ranks=[0])[0]

    def get_placement(self, timeout: float | None) -> Any:
        """See :meth:`dtkit.Run.placement`."""
        if self.is_released and self._kept_placement is not None:
            return self._kept_placement[0]
        self.check_not_released("placement")
        if not self._progress.plan.options.strategy.shards_model:
            return None
        call = make_call(JobOperations.model_placement, job=self._progress.plan.job)
        return self._engine_group.call_all(call, timeout=timeout, ranks=[0])[0]

    def verify(self, steps: int, timeout: float | None) -> Verification:
        """See :meth:`dtkit.Run.verify`."""
        from dtkit.training import verify

        verify.check_steps(steps)
        if self.is_running:
            raise RunError("verify needs the engines to itself; call run.pause() first, then run.resume()")
        if self.check_idle is None:
            self.check_not_released("verify")
        else:
            self.check_idle()
        plan = self._progress.plan
        options, deadline = plan.options, Deadline(timeout, "verify")
        steps, notes = min(steps, plan.steps), options.equivalence_notes
        with show_progress(f"repeating {formatting.format_count(steps, 'step')}, also in one process"):
            found = verify.verify(self._engine_group, plan.job_spec, steps, options.strategy, notes, deadline)
        own_s = compute_median_step_s(self._progress.history, self._engine_group.world_size)
        if found.step_times is None or own_s is None:
            return found
        return dataclasses.replace(found, step_times=dataclasses.replace(found.step_times, run_step_s=own_s))

    # -- checkpoints ------------------------------------------------------------------------------------------

    def make_checkpoint_request(self, path: str | Path | None, keep_last: int | None) -> CheckpointRequest:
        """Check the arguments of `save`; return the request."""
        target = self._progress.plan.options.checkpoint_policy.default_folder if path is None else path
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"save(keep_last={keep_last!r}): it is how many checkpoints stay; an integer from 1 up")
        self.check_not_released("save")
        folder = folders.parse_new_folder("save(path", target).absolute()
        return CheckpointRequest(folder, keep_last, is_by_user=True)

    def save_after_end(self, checkpoint: CheckpointRequest) -> None:
        """Write a checkpoint of a run that has ended, whose driver can't send the request any more."""
        manager, step = self._driver.actions.checkpoint.manager, self._progress.step
        manager.add_request(checkpoint)
        if manager.begin_next(step) is None:
            return
        try:
            values = self._engine_group.call_all(make_save_call(self._progress.plan.job, step, checkpoint))
        except DtkitError as error:
            manager.on_failure(checkpoint, step, error)
        else:
            manager.on_result(checkpoint, step, values)

    def inject_delay(self, rank: int, factor: float, timeout: float | None) -> str:
        """Slow a rank down; return a line for the log. See :meth:`dtkit.Run.inject_delay`."""
        progress = self._progress
        world_size = progress.plan.spec.world_size
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"inject_delay(rank={rank!r}): there are ranks 0 to {world_size - 1}")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= _MAX_DELAY_FACTOR:
            raise ValueError(
                f"inject_delay(factor={factor!r}): it must be a number from 1 (full speed) to {_MAX_DELAY_FACTOR:g}"
            )
        self.check_not_released("inject_delay")
        call = make_call(JobOperations.inject_delay, job=progress.plan.job, factor=float(factor))
        self._engine_group.call_all(call, timeout=timeout, ranks=[rank])
        others = {r: f for r, f in progress.delay_factors.items() if r != rank}
        progress.delay_factors = others if factor == 1 else dict(sorted({**others, rank: float(factor)}.items()))
        return f"node {rank} " + ("runs at full speed" if factor == 1 else f"slowed {factor:g}x on purpose")

    def check_fault(self, name: str, rank: int) -> str:
        """Check the arguments of `inject_fault`; return a line for the log."""
        ranks = self._engine_group.world_size
        if name != "kill" or isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
            raise ValueError(
                f"inject_fault({name!r}, {rank!r}): it is inject_fault('kill', rank), with a rank from 0 to {ranks - 1}"
            )
        self.check_not_released("inject_fault")
        return f"node {rank} killed on purpose"

    def kill(self, rank: int, timeout: float | None) -> None:
        """End a rank's process. Raises TimeoutError if it has not ended within `timeout` seconds."""
        timeout = timeouts.KILL_TIMEOUT_S if timeout is None else timeout
        if not self._engine_group.transport.kill([rank], timeout):
            raise TimeoutError(f"the process of rank {rank} has not ended within timeout={timeout:g} s; give it longer")

    def check_explainable(self) -> None:
        """Raise RunError if the strategy can't explain a step."""
        plan = self._progress.plan
        if plan.options.is_manual:
            raise RunError(
                "this run's training_step takes the optimizers and updates itself, so dtkit doesn't see the parts of a "
                "step. Train with loss= or training_step(model, batch) to have a step explained"
            )
        if not plan.options.supports_explain:
            raise RunError(
                f"{plan.spec.strategy} has no whole gradients on each rank to be all-reduced, and nothing is sharded "
                "or sent within a step: there is little to explain. Train with DataParallel(), Pipeline(), Sharded() "
                "or TensorParallel() to have a step explained"
            )
