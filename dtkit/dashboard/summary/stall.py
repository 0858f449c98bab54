"""The node that all others wait for and that does not move: what every view says of it, from the run's finding.

The seconds go on while it lasts, so they stand where a view shows numbers, and not in the sentence, which a screen
reader would begin anew with each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.health.status import IDLE

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView
    from dtkit.health.stall_report import StallReport

STUCK_GLYPH = "⊘"
"""Stands before the node, and marks the step on the time axes."""

_HALTING_KINDS = ("stuck", "together")  # a straggler moves
_PHASE_WORDS = {
    "unknown": "",
    IDLE: "not in the call",
    "call": "the call",
    "collective": "a collective",
    "step": "a step",
}


def find_stall(run: RunView) -> StallReport | None:
    """What keeps the run from moving now; None while it moves."""
    found = run.stall_report
    return found if found is not None and found.kind in _HALTING_KINDS else None


def format_short(stall: StallReport) -> str:
    """For where there is little room: ``⊘ node 1 stuck: forward, 12 s``."""
    who = "no node moves" if stall.rank is None else f"node {stall.rank} stuck"
    return f"{STUCK_GLYPH} {who}: {', '.join(filter(None, (_describe_phase(stall), formatting.format_clock(stall.stalled_s))))}"


def format_sentence(stall: StallReport) -> str:
    """All but the seconds: who, where, and what helps."""
    if stall.rank is None:
        return f"no node moves. {stall.remedy}".strip()
    return f"node {stall.rank} is stuck{_describe_position(stall)}, and the others wait for it. {_format_details(stall)}".strip()


def format_line(stall: StallReport) -> str:
    """For a terminal, where lines are cut: the most important first."""
    return f"{format_short(stall)}. {_format_details(stall)}".strip()


def _format_details(stall: StallReport) -> str:
    where = f"It stands at {stall.location}. " if stall.location else ""
    return f"{where}{stall.remedy}"


def _describe_position(stall: StallReport) -> str:
    """`` in forward of step 12``, with all that is not known left out."""
    phase = _describe_phase(stall)
    if stall.phase == IDLE:
        return f": {phase}"
    parts = [phase] if phase and not (stall.phase == "step" and stall.step is not None) else []
    if stall.step is not None:
        parts.append(f"step {stall.step:,}")
    return f" in {' of '.join(parts)}" if parts else ""


def _describe_phase(stall: StallReport) -> str:
    return "" if stall.rank is None else _PHASE_WORDS.get(stall.phase, stall.phase)
