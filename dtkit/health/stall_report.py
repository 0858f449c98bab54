"""What is told of a rank that keeps the others waiting: one sentence, where it stands, and what helps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.health.status import IDLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.health.diagnosis import RankObservation
    from dtkit.health.status import EngineStatus


@dataclasses.dataclass(frozen=True)
class StallReport:
    """What is to be told."""

    kind: str
    """"stuck", "straggler", "together" (no rank alone) or "recovered"."""
    rank: int | None
    """Whom the others wait for; None for "together"."""
    host: str
    phase: str
    step: int | None
    location: str
    """``file:line in function``; empty where nothing is known."""
    reason: str
    """One sentence."""
    remedy: str
    stalled_s: float
    """For how long nothing has moved."""

    @property
    def text(self) -> str:
        """All of it, as a person reads it."""
        where = f" It stands at {self.location}." if self.location and self.rank is not None else ""
        return f"{self.reason}.{where} {self.remedy}".strip()

    @property
    def news_key(self) -> tuple[object, ...]:
        """What must differ for another finding to be news."""
        return self.kind, self.rank, self.phase, self.step


_SHOW_STACKS_HINT = "cluster.stacks() shows where all ranks stand"
_INTERRUPT_HINT = f"{_SHOW_STACKS_HINT}; cluster.interrupt() ends what they do"
_PHASE_NAMES = {IDLE: "no call", "call": "the call", "collective": "a collective", "step": "the midst"}
_KEEPS_WAITING_TEXT = "rank {rank} keeps {others} waiting: it "
_TEXT_BY_CAUSE = {  # cause -> what is the case, and what helps
    "stopped": (
        "rank {rank} is stopped (SIGSTOP) in {place}, and the others wait for it",
        "`kill -CONT {pid}` on {host} lets it go on",
    ),
    "ended": ("the process of rank {rank} ({pid} on {host}) has ended in {place}", _SHOW_STACKS_HINT),
    "silent": (
        "rank {rank} says nothing, for {seconds:.0f} s now, last in {place}: C code holds its interpreter (the GIL)",
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
    """A finding on one rank."""
    standing, seconds = observation.status, observation.stalled_s
    reason, remedy = _TEXT_BY_CAUSE[cause]
    words = {
        "rank": observation.rank,
        "pid": observation.pid,
        "host": observation.host,
        "seconds": (observation.status_age_s or 0.0) if cause == "silent" else seconds,
        "place": _format_position(standing),
        "others": "the other one" if world_size == 2 else "the others",
    }
    return _make_report(observation, "stuck", reason.format(**words), remedy.format(**words))


def report_straggler(observation: RankObservation) -> StallReport:
    """A finding on a rank that is slow, and moves."""
    slowness = 1.0 if observation.status is None else observation.status.delay_factor
    why = f"; it is slowed {slowness:g}x on purpose" if slowness > 1 else ""
    reason = f"rank {observation.rank} is a straggler: it goes on, and the others wait for it most of the time{why}"
    remedy = "It is left alone. Give it a smaller shard: cluster.partition(data, by='speed', ...) does that"
    return _make_report(observation, "straggler", reason, "run.slow(rank, 1) ends that" if slowness > 1 else remedy)


def report_all_stalled(cause: str, observations: Sequence[RankObservation]) -> StallReport:
    """A finding on no rank in particular."""
    one = max(observations, key=lambda each: each.stalled_s)
    seconds = min(each.stalled_s for each in observations)
    places = "; ".join(
        f"rank {each.rank} in {_format_position(each.status)}, {each.format_location() or 'nowhere known'}"
        for each in observations
    )
    if cause == "apart":
        reason = f"all ranks have waited for each other for {seconds:.0f} s, in different places: {places}"
        remedy = f"They may not call the same collectives in the same order. {_INTERRUPT_HINT}"
    else:
        reason = f"no rank has moved for {seconds:.0f} s, and none waits for another one: {places}"
        remedy = f"It is a long step, or one that does not end. {_INTERRUPT_HINT}"
    return dataclasses.replace(
        _make_report(one, "together", reason, remedy), rank=None, host="", location="", stalled_s=seconds
    )


def _make_report(observation: RankObservation, kind: str, reason: str, remedy: str) -> StallReport:
    standing = observation.status
    return StallReport(
        kind=kind,
        rank=observation.rank,
        host=observation.host,
        phase="unknown" if standing is None else standing.phase,
        step=None if standing is None else standing.step,
        location=observation.format_location(),
        reason=reason,
        remedy=remedy,
        stalled_s=observation.stalled_s,
    )


def _format_position(status: EngineStatus | None) -> str:
    """Phase and step, as in "forward of step 12"."""
    if status is None:
        return "an unknown place"
    phase = _PHASE_NAMES.get(status.phase, status.phase)
    return phase if status.step is None or status.phase == IDLE else f"{phase} of step {status.step}"
