"""Profiles of a job's next steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.rpc.measurements import ProfileOperations

if TYPE_CHECKING:
    from dtkit.engine.observe.step_profile import StepProfiler
    from dtkit.engine.ops.state import EngineState
    from dtkit.history.profile import RankProfile
    from dtkit.history.workload import Workload


class ProfileOps(ProfileOperations):
    """See :class:`~dtkit.rpc.measurements.ProfileOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._profiler: StepProfiler | None = None

    def start_profile(self, *, job: str) -> None:
        """Record all operators of the process from now on, for a job."""
        from dtkit.engine.observe.step_profile import StepProfiler

        phases = self._state.get_job(job).context.phases
        self._discard()
        self._profiler = StepProfiler(phases, self._state.get_device())

    def stop_profile(self, *, job: str) -> RankProfile | None:
        """Return the profile since `start_profile`; None if this is another process, which recorded nothing."""
        del job
        profiler, self._profiler = self._profiler, None
        return None if profiler is None else profiler.stop()

    def measure_workload(self, *, job: str, model: str) -> Workload:
        """Count the operations and the tokens of a sample. No collective."""
        from dtkit.engine.observe.call_output import ignore_logged, redirect_log
        from dtkit.engine.workload import measure_workload

        training = self._state.get_job(job)
        assert training.context.make_sample_batch is not None
        with redirect_log(ignore_logged):  # a trial of the loss belongs to no step
            return measure_workload(
                self._state.get_model(model),
                training.loss_fn,
                training.context.make_sample_batch,
                self._state.get_device(),
            )

    def _discard(self) -> None:
        """End a profile whose notebook is gone."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
