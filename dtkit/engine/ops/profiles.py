"""Profiles of a job's next steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.rpc.measurements import ProfileOperations

if TYPE_CHECKING:
    from dtkit.engine.observe.step_profile import StepProfiler
    from dtkit.engine.ops.state import EngineState
    from dtkit.history.profile import RankProfile


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
        """Return what was recorded since `start_profile`; None if nothing was, since this is another process."""
        del job
        profiler, self._profiler = self._profiler, None
        return None if profiler is None else profiler.stop()

    def _discard(self) -> None:
        """End a profile whose notebook is gone."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
