"""Jobs: models in training."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.lazy_compiler import load_compiler
from dtkit._util.metric_collections import import_metric_modules
from dtkit.engine.observe.call_output import CallOutput, activate_output, ignore_logged, redirect_log
from dtkit.history.between_steps import VALIDATION
from dtkit.messages import END_EARLY_PREFIX, JobPosition
from dtkit.rpc import pickling
from dtkit.rpc.job_plan import LoadingOptions
from dtkit.rpc.payload import Payload
from dtkit.rpc.protocol import JobOperations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.job import Job
    from dtkit.engine.ops.state import EngineState
    from dtkit.history.engine_outbox import EvaluationSums
    from dtkit.messages import DispatchResult, OutputItem
    from dtkit.planning.memory_report import MemoryUsage
    from dtkit.rpc.job_plan import JobDefinition
    from dtkit.rpc.reference import Reference

STEP_TIMEOUT_FACTOR = 20.0  # limit of a collective, relative to the median step


def _load_program(definition: JobDefinition) -> bytes | memoryview:
    program = definition.program
    return memoryview(program.load()) if isinstance(program, Payload) else program


class JobOps(JobOperations):
    """See :class:`~dtkit.rpc.protocol.JobOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    # -- building ---------------------------------------------------------------------------------------------

    def build_job(
        self, *, job: str, definition: JobDefinition, reference: Reference | None = None, uninitialized: bool = False
    ) -> float:
        """Build a job; return its learning rate."""
        built = self._build(job, definition, reference)
        built.partially_updated = uninitialized
        self._state.jobs[job] = built
        return built.lr

    def rebuild_job(self, *, job: str, definition: JobDefinition, payloads: Sequence[Payload]) -> tuple[int, float]:
        """Build a job again with the survivors' state; return its step and its learning rate.

        The old job is kept until the new one is complete. If the notebook ends here, the engine holds one of the two.
        """
        from dtkit.engine.state.survivors import restore_from_survivors

        built = self._build(job, definition)
        parts = [part for payload in payloads for part in payload.load()]
        self._state.run_abortable(lambda: restore_from_survivors(built, parts))
        self._state.jobs[job] = built
        return built.step, built.lr

    def _build(self, job: str, definition: JobDefinition, reference: Reference | None = None) -> Job:
        from dtkit.engine.build import build_job
        from dtkit.engine.memory import PeakMemoryTracker

        state = self._state
        # unpickles: sent by the notebook in a call
        program, stored = pickling.loads(_load_program(definition)), state.models[definition.model]
        location = state.get_group(), state.get_device()
        import_metric_modules(program.metric_modules)
        program.strategy.preload(None if isinstance(stored, Payload) else stored, location[0])
        if program.activation_checkpointing:
            load_compiler()  # by which torch.utils.checkpoint is excluded from compilation
        state.memory_trackers[job] = PeakMemoryTracker(location[1], None if isinstance(stored, Payload) else stored)
        key = definition.data
        data = state.streams[key] if key in state.streams else state.get_data(key)
        model = state.get_model(definition.model)
        with redirect_log(ignore_logged):  # trials of the loss belong to no step
            return state.run_abortable(
                lambda: build_job(
                    program,
                    model,
                    data,
                    definition.plan,
                    definition.loading,
                    location,
                    reference=reference,
                    in_float64=definition.in_float64,
                )
            )

    # -- steps ------------------------------------------------------------------------------------------------

    def advance(
        self,
        *,
        job: str,
        step: int,
        steps: int,
        lr: float | None = None,
        shares: Sequence[float] | None = None,
        explain: bool = False,
        fingerprint: bool = False,
        read_until: int = 0,
    ) -> tuple[DispatchResult, list[OutputItem]]:
        """Take steps of a job, which must be at `step`. Return the result and the output."""
        from dtkit.engine import memory

        state = self._state
        training = state.get_job(job, step)
        if lr is not None:
            training.set_lr(lr)
        if shares is not None:
            training.set_shares(shares)
        output = state.call_output = CallOutput()
        if (warning := state.watchdog.take_warning()) is not None:
            output.add_line(warning)
        while training.notes:
            output.add_line(training.notes.pop(0))
        timer, is_ending = state.get_boundary_timer(job), self._make_end_early_check(job)
        with activate_output(output), contextlib.nullcontext() if explain else self._track_memory(job):
            with timer.leave_out_steps():
                state.run_abortable(lambda: training.advance(steps, explain=explain, should_end_early=is_ending))
        state.sigint_handler.work_done = True
        if explain:
            memory.release_unused_memory()  # copies of the explained step have left holes in the heap
        self._shorten_collective_timeout(training)
        result = training.collect_results(fingerprint=fingerprint)
        result = dataclasses.replace(result, between=timer.take(has_steps=result.step > step))
        state.get_outbox(job).discard_read(read_until)
        state.get_outbox(job).store_dispatch(result, output.items)
        return result, output.items

    def _track_memory(self, job: str) -> contextlib.AbstractContextManager[None]:
        return self._state.memory_trackers[job].track_steps(self._state.count_snapshot_bytes(job))

    def _make_end_early_check(self, job: str) -> Callable[[], bool]:
        """Return the function that reads the notebook's flag, which asks to end this dispatch.

        It also ends the dispatches of a message that has taken too long: each one is short, and doesn't notice.
        """
        flag = self._state.cluster_folder / f"{END_EARLY_PREFIX}{job}"
        return lambda: self._state.is_message_overdue or flag.exists()

    def _shorten_collective_timeout(self, job: Job) -> None:
        """Limit collectives by the length of the steps, after the first step, which may compile."""
        state = self._state
        if state.step_timeout is None and state.group is not None and job.context.group is not None:
            limit = max(timeouts.MIN_STEP_TIMEOUT_S, STEP_TIMEOUT_FACTOR * job.median_step_s())
            if not 0.8 < limit / state.collective_timeout_s < 1.25:
                state.set_collective_timeout(limit)

    def evaluate(
        self,
        *,
        job: str,
        data: str,
        metrics: bytes,
        batch_size: int,
        loading: LoadingOptions | None = None,
        step: int | None = None,
    ) -> EvaluationSums:
        """Evaluate a job on the rank's shard of `data`."""
        from dtkit.engine.data.loader import load_evaluation_batches

        state = self._state
        training, rank = state.get_job(job, step), state.get_group().rank
        # unpickles: sent by the notebook in a call
        metrics_by_name = pickling.loads(metrics)
        source, shards = state.get_data(data)
        parts = shards.split_for_replicas(training.context.mesh.num_replicas)
        rows = parts[training.context.shards[0]]
        batches = load_evaluation_batches(
            source, rows, batch_size, loading or LoadingOptions(), rank=rank, link=training.context.replica_link
        )
        max_batches = -(-max(map(len, parts)) // batch_size)
        timer = contextlib.nullcontext() if step is None else state.get_boundary_timer(job).measure(VALIDATION)
        with timer:
            sums = state.run_abortable(
                lambda: training.evaluate(batches, metrics_by_name, max_batches, after_epoch=step is not None)
            )
        if step is not None:
            state.sigint_handler.work_done = True
            state.get_outbox(job).store_evaluation(step, sums)
        return sums

    def inject_delay(self, *, job: str, factor: float) -> None:
        """Make the rank's computation take `factor` times as long."""
        self._state.get_job(job).inject_delay(factor)

    # -- questions --------------------------------------------------------------------------------------------

    def job_status(self, *, job: str) -> JobPosition:
        """Return the rank's position in a job."""
        training = self._state.get_job(job)
        snapshots = {snapshot.step: tuple(snapshot.parts_by_rank) for snapshot in self._state.snapshots.get(job, ())}
        return JobPosition(training.step, not training.partially_updated, training.lr, snapshots)

    def memory_usage(self, *, job: str) -> MemoryUsage:
        """Return the memory that a job takes on this rank."""
        state = self._state
        return state.get_job(job).measure_memory(state.memory_trackers[job], state.count_snapshot_bytes(job))

    def model_placement(self, *, job: str) -> Any:
        """Return the strategy's table of the parts of the model and their ranks, or None."""
        return self._state.get_job(job).placement

    def state_dict_parts(self, *, job: str, callback: int | None = None) -> Payload:
        """Return the rank's part of the model's state dict. A collective."""
        return self._state.pack(self._state.get_job(job).state_dict_parts(callback))

    def reference_report(self, *, job: str) -> Payload:
        """Return the largest gradients and the digests of the batches so far, of a reference."""
        from dtkit.engine.reference_job import ReferenceJob

        reference = self._state.get_job(job)
        assert isinstance(reference, ReferenceJob)
        return self._state.pack(reference.build_reference_report())
