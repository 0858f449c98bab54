"""The node that all others wait for and that does not move: what every view says of it, from the run's finding.

The seconds go on while it lasts, so they stand where a view shows numbers, and not in the sentence, which a screen
reader would begin anew with each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.health.status import IDLE

if TYPE_CHECKING:
    from dtkit.dashboard.source import Source
    from dtkit.health.stall_report import Finding

GLYPH = "⊘"
"""Stands before the node, and marks the step on the time axes."""

_KINDS = ("stuck", "together")  # a straggler moves
_PHASES = {"unknown": "", IDLE: "not in the call", "call": "the call", "collective": "a collective", "step": "a step"}


def halted(source: Source) -> Finding | None:
    """What keeps the run from moving now; None while it moves."""
    found = source.stall_report
    return found if found is not None and found.kind in _KINDS else None


def short(found: Finding) -> str:
    """For where there is little room: ``⊘ node 1 stuck: forward, 12 s``."""
    who = "no node moves" if found.rank is None else f"node {found.rank} stuck"
    return f"{GLYPH} {who}: {', '.join(filter(None, (_phase(found), formatting.clock(found.seconds))))}"


def sentence(found: Finding) -> str:
    """All but the seconds: who, where, and what helps."""
    if found.rank is None:
        return f"no node moves. {found.remedy}".strip()
    return f"node {found.rank} is stuck{_place(found)}, and the others wait for it. {_details(found)}".strip()


def line(found: Finding) -> str:
    """For a terminal, where lines are cut: the most important first."""
    return f"{short(found)}. {_details(found)}".strip()


def _details(found: Finding) -> str:
    where = f"It stands at {found.line}. " if found.line else ""
    return f"{where}{found.remedy}"


def _place(found: Finding) -> str:
    """`` in forward of step 12``, with all that is not known left out."""
    phase = _phase(found)
    if found.phase == IDLE:
        return f": {phase}"
    parts = [phase] if phase and not (found.phase == "step" and found.step is not None) else []
    if found.step is not None:
        parts.append(f"step {found.step:,}")
    return f" in {' of '.join(parts)}" if parts else ""


def _phase(found: Finding) -> str:
    return "" if found.rank is None else _PHASES.get(found.phase, found.phase)
