"""A profile of a run's next steps, between two pauses."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from dtkit.errors import DtkitError, RunError
from dtkit.history.profile import Profile
from dtkit.rpc.measurements import ProfileOperations
from dtkit.rpc.protocol import make_call
from dtkit.types import State

if TYPE_CHECKING:
    from dtkit.history.profile import RankProfile
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.types import RunSpec, Status

MAX_STEPS = 100
"""Largest number of steps in a profile; a longer trace takes gigabytes."""


class ProfiledRun(Protocol):
    """The part of a run that a profile needs."""

    @property
    def spec(self) -> RunSpec:
        """The arguments of the training."""
        ...

    @property
    def status(self) -> Status:
        """State and step."""
        ...

    def pause(self, timeout: float | None = None) -> int:
        """Pause at a step boundary."""
        ...

    def step(self, n: int = 1, *, timeout: float | None = None) -> int:
        """Take `n` steps while paused."""
        ...

    def resume(self, timeout: float | None = None) -> None:
        """Continue."""
        ...


def profile_steps(run: ProfiledRun, engine_group: EngineGroup, job: str, steps: int, timeout: float | None) -> Profile:
    """Take `steps` steps with torch's profiler on all ranks. A running run is paused before, and resumed afterwards."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"profile(steps={steps!r}): it is a number of steps from 1 to {MAX_STEPS}")
    was_running = run.status.state is State.RUNNING
    if was_running:
        run.pause(timeout)
    first = run.status.step
    if first >= run.spec.steps:
        raise RunError(f"profile: the run has taken all of its {run.spec.steps} steps; run.extend() it")
    ranks = _record(run, engine_group, job, steps, timeout)
    taken = run.status.step - first
    if was_running and not run.status.state.has_ended:
        run.resume(timeout)
    missing = [rank for rank, profile in enumerate(ranks) if profile is None]
    if missing:
        raise RunError(f"profile: rank {missing[0]} was replaced meanwhile, so its steps are not known; profile again")
    profiles = [profile for profile in ranks if profile is not None]
    return Profile(run.spec.name, first, taken, profiles, engine_group.membership.clock_offsets)


def _record(
    run: ProfiledRun, engine_group: EngineGroup, job: str, steps: int, timeout: float | None
) -> list[RankProfile | None]:
    stop_call = make_call(ProfileOperations.stop_profile, job=job)
    with contextlib.ExitStack() as on_error:
        on_error.callback(_stop_quietly, engine_group, job)
        engine_group.call_all(make_call(ProfileOperations.start_profile, job=job), timeout=timeout)
        run.step(steps, timeout=timeout)
        on_error.pop_all()
    return engine_group.call_all(stop_call, timeout=timeout)


def _stop_quietly(engine_group: EngineGroup, job: str) -> None:
    """End the profiles after an error, which must be the one that the caller sees."""
    with contextlib.suppress(DtkitError):
        engine_group.call_all(make_call(ProfileOperations.stop_profile, job=job))
