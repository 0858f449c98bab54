"""Report of a rank that keeps the others waiting: a reason, a location and a remedy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.errors import format_ranks
from dtkit.health.status import IDLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.health.diagnosis import RankObservation
    from dtkit.health.status import EngineStatus


@dataclasses.dataclass(frozen=True)
class StallReport:
    """A change in whether ranks move, for the user."""

    kind: str
    """"stuck", "straggler", "together" (no rank alone), "compiling" or "recovered"."""
    rank: int | None
    """The rank that the others wait for; None for "together" and "compiling"."""
    host: str
    phase: str
    step: int | None
    location: str
    """``file:line in function``; empty if unknown."""
    reason: str
    """One sentence."""
    remedy: str
    stalled_s: float
    """Seconds without progress."""
    is_stopped: bool = False
    """Whether the rank's process is stopped (SIGSTOP). Its position is then the last one that it has reported."""

    @property
    def text(self) -> str:
        """Reason, location and remedy as one text."""
        location = (
            f" It {'was last' if self.is_stopped else 'is'} at {self.location}."
            if self.location and self.rank is not None
            else ""
        )
        return f"{self.reason}.{location} {self.remedy}".strip()

    @property
    def news_key(self) -> tuple[object, ...]:
        """Key that is equal for reports of the same stall."""
        return self.kind, self.rank, self.phase, self.step


STOPPED_WORDS = "is stopped (SIGSTOP)"
"""Words on a process that was stopped, in the text of its report."""

_SHOW_STACKS_HINT = "cluster.stacks() shows the position of all ranks"
_INTERRUPT_HINT = f"{_SHOW_STACKS_HINT}; cluster.interrupt() ends their calls"
_PHASE_NAMES = {IDLE: "no call", "call": "the call", "collective": "a collective", "step": "a step"}
_KEEPS_WAITING_TEXT = "rank {rank} keeps {others} waiting: it "
_TEXT_BY_CAUSE = {  # cause -> (reason, remedy)
    "stopped": (
        f"rank {{rank}} {STOPPED_WORDS} and was last seen in {{place}}; the others wait for it",
        (
            "`kill -CONT {pid}` on {host} lets it go on. After {limit_s:.0f} s of silence its engine counts as lost, "
            "and is replaced unless on_failure= says otherwise"
        ),
    ),
    "ended": (
        "the process of rank {rank} ({pid} on {host}) has ended; it was last in {place}",
        _SHOW_STACKS_HINT,
    ),
    "silent": (
        "rank {rank} has not reported for {seconds:.0f} s, last in {place}: C code holds its interpreter (the GIL)",
        _INTERRUPT_HINT,
    ),
    "away": (
        _KEEPS_WAITING_TEXT
        + "has been in {place} for {seconds:.0f} s, and has not begun the collective that they are in",
        _INTERRUPT_HINT,
    ),
    "returned": (
        _KEEPS_WAITING_TEXT + "has returned from the call, and never began the collective that they are in",
        f"Call the same collectives on every rank. {_INTERRUPT_HINT}",
    ),
    "other": (
        _KEEPS_WAITING_TEXT + "has been in another collective than they are for {seconds:.0f} s",
        f"Call the same collectives in the same order on every rank. {_INTERRUPT_HINT}",
    ),
}


def report_stuck(cause: str, observation: RankObservation, world_size: int) -> StallReport:
    """Return a report of one stuck rank."""
    reason, remedy = _TEXT_BY_CAUSE[cause]
    values = {
        "rank": observation.rank,
        "pid": observation.pid,
        "limit_s": timeouts.HEARTBEAT_TIMEOUT_S,
        "host": observation.host,
        "seconds": (observation.status_age_s or 0.0) if cause == "silent" else observation.stalled_s,
        "place": _format_position(observation.status),
        "others": "the other one" if world_size == 2 else "the others",
    }
    report = _make_report(observation, "stuck", reason.format(**values), remedy.format(**values))
    return dataclasses.replace(report, is_stopped=cause == "stopped")


def report_straggler(observation: RankObservation) -> StallReport:
    """Return a report of a rank that moves slowly."""
    delay_factor = 1.0 if observation.status is None else observation.status.delay_factor
    reason = f"rank {observation.rank} is a straggler: it moves, and the others wait for it most of the time"
    if delay_factor > 1:
        reason += f"; it is slowed {delay_factor:g}x on purpose"
        return _make_report(observation, "straggler", reason, f"run.inject_delay({observation.rank}, 1) ends that")
    remedy = "Give it a smaller shard: cluster.partition(data, by='speed', ...) does that"
    return _make_report(observation, "straggler", reason, remedy)


def report_all_stalled(cause: str, observations: Sequence[RankObservation]) -> StallReport:
    """Return a report of a stall without a single culprit."""
    longest = max(observations, key=lambda observation: observation.stalled_s)
    seconds = min(observation.stalled_s for observation in observations)
    places = "; ".join(
        f"rank {observation.rank} in {_format_position(observation.status)}, "
        f"{observation.format_location() or 'unknown location'}"
        for observation in observations
    )
    if cause == "apart":
        reason = f"all ranks have waited for each other for {seconds:.0f} s, in different places: {places}"
        remedy = f"They may not call the same collectives in the same order. {_INTERRUPT_HINT}"
    else:
        reason = f"no rank has moved for {seconds:.0f} s, and none waits for another: {places}"
        remedy = f"It is a long step, or one that doesn't end. {_INTERRUPT_HINT}"
    return dataclasses.replace(
        _make_report(longest, "together", reason, remedy), rank=None, host="", location="", stalled_s=seconds
    )


def report_compiling(observations: Sequence[RankObservation]) -> StallReport:
    """Return a report of ranks whose model is being compiled."""
    longest = max(observations, key=lambda observation: observation.stalled_s)
    ranks = format_ranks(sorted(observation.rank for observation in observations))
    verb = "compiles" if len(observations) == 1 else "compile"
    reason = f"{ranks} {verb} the model, for {longest.stalled_s:.0f} s so far (torch.compile)"
    report = _make_report(longest, "compiling", reason, "")
    return dataclasses.replace(report, rank=None, host="", location="", phase="compile")


def _make_report(observation: RankObservation, kind: str, reason: str, remedy: str) -> StallReport:
    status = observation.status
    return StallReport(
        kind=kind,
        rank=observation.rank,
        host=observation.host,
        phase="unknown" if status is None else status.phase,
        step=None if status is None else status.step,
        location=observation.format_location(),
        reason=reason,
        remedy=remedy,
        stalled_s=observation.stalled_s,
    )


def _format_position(status: EngineStatus | None) -> str:
    """Return phase and step, as in "forward of step 12"."""
    if status is None:
        return "an unknown phase"
    phase = _PHASE_NAMES.get(status.phase, status.phase)
    if status.step is None or status.phase == IDLE:
        return phase
    return f"step {status.step}" if status.phase == "step" else f"{phase} of step {status.step}"
