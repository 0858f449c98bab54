"""What is told of a rank that keeps the others waiting: one sentence, where it stands, and what helps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.health.status import IDLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.health.diagnosis import Seen
    from dtkit.health.status import Standing


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is to be told."""

    kind: str
    """"stuck", "straggler", "together" (no rank alone) or "recovered"."""
    rank: int | None
    """Whom the others wait for; None for "together"."""
    host: str
    phase: str
    step: int | None
    line: str
    """``file:line in function``; empty where nothing is known."""
    reason: str
    """One sentence."""
    remedy: str
    seconds: float
    """For how long nothing has moved."""

    @property
    def text(self) -> str:
        """All of it, as a person reads it."""
        where = f" It stands at {self.line}." if self.line and self.rank is not None else ""
        return f"{self.reason}.{where} {self.remedy}".strip()

    @property
    def key(self) -> tuple[object, ...]:
        """What must differ for another finding to be news."""
        return self.kind, self.rank, self.phase, self.step


_SHOW = "cluster.stacks() shows where all ranks stand"
_END = f"{_SHOW}; cluster.interrupt() ends what they do"
_PHASES = {IDLE: "no call", "call": "the call", "collective": "a collective", "step": "the midst"}
_WAIT = "rank {rank} keeps {others} waiting: it "
_STUCK = {  # cause -> what is the case, and what helps
    "stopped": (
        "rank {rank} is stopped (SIGSTOP) in {place}, and the others wait for it",
        "`kill -CONT {pid}` on {host} lets it go on",
    ),
    "ended": ("the process of rank {rank} ({pid} on {host}) has ended in {place}", _SHOW),
    "silent": (
        "rank {rank} says nothing, for {seconds:.0f} s now, last in {place}: C code holds its interpreter (the GIL)",
        _END,
    ),
    "away": (
        _WAIT + "has been in {place} for {seconds:.0f} s, and has not begun the collective that they are in",
        _END,
    ),
    "returned": (
        _WAIT + "has returned from the call, and never began the collective that they are in",
        f"Call the same collectives on every rank. {_END}",
    ),
    "other": (
        _WAIT + "has been in another collective than they are for {seconds:.0f} s",
        f"Call the same collectives in the same order on every rank. {_END}",
    ),
}


def stuck(cause: str, one: Seen, world_size: int) -> Finding:
    """A finding on one rank."""
    standing, seconds = one.standing, one.still_s
    reason, remedy = _STUCK[cause]
    words = {
        "rank": one.rank,
        "pid": one.pid,
        "host": one.host,
        "seconds": (one.age_s or 0.0) if cause == "silent" else seconds,
        "place": _place(standing),
        "others": "the other one" if world_size == 2 else "the others",
    }
    return _about(one, "stuck", reason.format(**words), remedy.format(**words))


def straggler(one: Seen) -> Finding:
    """A finding on a rank that is slow, and moves."""
    slowness = 1.0 if one.standing is None else one.standing.slowness
    why = f"; it is slowed {slowness:g}x on purpose" if slowness > 1 else ""
    reason = f"rank {one.rank} is a straggler: it goes on, and the others wait for it most of the time{why}"
    remedy = "It is left alone. Give it a smaller shard: cluster.partition(data, by='speed', ...) does that"
    return _about(one, "straggler", reason, "run.slow(rank, 1) ends that" if slowness > 1 else remedy)


def together(cause: str, seen: Sequence[Seen]) -> Finding:
    """A finding on no rank in particular."""
    one = max(seen, key=lambda each: each.still_s)
    seconds = min(each.still_s for each in seen)
    places = "; ".join(
        f"rank {each.rank} in {_place(each.standing)}, {each.line() or 'nowhere known'}" for each in seen
    )
    if cause == "apart":
        reason = f"all ranks have waited for each other for {seconds:.0f} s, in different places: {places}"
        remedy = f"They may not call the same collectives in the same order. {_END}"
    else:
        reason = f"no rank has moved for {seconds:.0f} s, and none waits for another one: {places}"
        remedy = f"It is a long step, or one that does not end. {_END}"
    return dataclasses.replace(_about(one, "together", reason, remedy), rank=None, host="", line="", seconds=seconds)


def _about(one: Seen, kind: str, reason: str, remedy: str) -> Finding:
    standing = one.standing
    return Finding(
        kind=kind,
        rank=one.rank,
        host=one.host,
        phase="unknown" if standing is None else standing.phase,
        step=None if standing is None else standing.step,
        line=one.line(),
        reason=reason,
        remedy=remedy,
        seconds=one.still_s,
    )


def _place(standing: Standing | None) -> str:
    """Phase and step, as in "forward of step 12"."""
    if standing is None:
        return "an unknown place"
    phase = _PHASES.get(standing.phase, standing.phase)
    return phase if standing.step is None or standing.phase == IDLE else f"{phase} of step {standing.step}"
