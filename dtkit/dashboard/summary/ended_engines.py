"""Engines that have ended since their run did: that says nothing about the run, but its cluster lacks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView

_MAX_EXPLAINED = 3
_MAX_CHARS = 400


def find_ended_engines(run: RunView) -> list[int]:
    """Return the ranks of an ended run whose engines have ended. A run that goes on reports its losses itself."""
    return sorted(run.ended_engines or ()) if run.status.state.has_ended else []


def describe_ended_engines(run: RunView) -> str:
    """Return a line with reason and remedy for each of the first engines that have ended."""
    reasons = list((run.ended_engines or {}).values())
    lines = [formatting.sanitize_text(formatting.name_nodes(reason), _MAX_CHARS) for reason in reasons[:_MAX_EXPLAINED]]
    num_more = len(reasons) - len(lines)
    return "\n".join([*lines, f"and {formatting.format_count(num_more, 'more engine')}"] if num_more else lines)
