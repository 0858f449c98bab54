"""Text about a node that is stuck while all others wait for it, from the run's stall report.

The elapsed seconds change all the time, so a view shows them with its numbers. In the sentence, a screen reader would
read them again at every change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.health.status import IDLE

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView
    from dtkit.health.stall_report import StallReport

STUCK_GLYPH = "⊘"
"""Glyph of a stuck node, and of its mark on the step axis."""

_HALTING_KINDS = ("stuck", "together")  # a straggler still moves
_PHASE_WORDS = {
    "unknown": "",
    IDLE: "not in the call",
    "call": "the call",
    "collective": "a collective",
    "step": "a step",
}


def find_stall(run: RunView) -> StallReport | None:
    """Return the stall that stops the run now; None while it moves."""
    stall = run.stall_report
    return stall if stall is not None and stall.kind in _HALTING_KINDS else None


def format_place(stall: StallReport) -> str:
    """Return a short text such as ``⊘ node 1 stuck: forward``. The head of a view counts the seconds."""
    return f"{STUCK_GLYPH} {': '.join(filter(None, [_name_subject(stall), _name_place(stall)]))}"


def format_short(stall: StallReport) -> str:
    """Return a short text such as ``⊘ node 1 stuck: forward, 12 s``."""
    details = [_name_place(stall), formatting.format_clock(stall.stalled_s)]
    return f"{STUCK_GLYPH} {_name_subject(stall)}: {', '.join(filter(None, details))}"


def _name_subject(stall: StallReport) -> str:
    return "no node moves" if stall.rank is None else f"node {stall.rank} {_name_condition(stall)}"


def _name_place(stall: StallReport) -> str:
    phase = _describe_phase(stall)
    return f"last in {phase}" if stall.is_stopped and phase and stall.phase != IDLE else phase


def format_position(stall: StallReport) -> str:
    """Return a text such as ``stuck: node 1 in forward``, without the seconds."""
    if stall.rank is None:
        return "stuck: no node moves"
    phase, seen = _describe_phase(stall), ", last seen" if stall.is_stopped else ""
    return f"{_name_condition(stall)}: node {stall.rank}{phase and f'{seen} in {phase}'}"


def format_sentence(stall: StallReport) -> str:
    """Return a sentence with node, position and remedy, without the seconds."""
    if stall.rank is None:
        return f"no node moves. {formatting.name_nodes(stall.remedy)}".strip()
    place = _describe_position(stall)
    seen = ", last seen" if stall.is_stopped and place.startswith(" in ") else ""
    sentence = f"node {stall.rank} is {_name_condition(stall)}{seen}{place}, and the others wait for it."
    return f"{sentence} {_format_details(stall)}".strip()


def format_line(stall: StallReport) -> str:
    """Return a line with the most important first, because a terminal cuts lines."""
    return f"{format_short(stall)}. {_format_details(stall)}".strip()


def _format_details(stall: StallReport) -> str:
    location = f"It {'was last' if stall.is_stopped else 'is'} at {stall.location}. " if stall.location else ""
    return f"{location}{formatting.name_nodes(stall.remedy)}"


def _name_condition(stall: StallReport) -> str:
    return "stopped" if stall.is_stopped else "stuck"


def _describe_position(stall: StallReport) -> str:
    """Return a text such as `` in forward of step 12``, without the parts that are not known."""
    phase = _describe_phase(stall)
    if stall.phase == IDLE:
        return f": {phase}"
    parts = [phase] if phase and not (stall.phase == "step" and stall.step is not None) else []
    if stall.step is not None:
        parts.append(f"step {stall.step:,}")
    return f" in {' of '.join(parts)}" if parts else ""


def _describe_phase(stall: StallReport) -> str:
    return "" if stall.rank is None else _PHASE_WORDS.get(stall.phase, stall.phase)
