"""The parts of a run's duration outside of its steps, in words: the same in its card and in its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.history.speed import split_time

if TYPE_CHECKING:
    from dtkit.history.history import History


def list_times_outside_steps(history: History, elapsed_s: float) -> list[str]:
    """Return the first step, which warms up, and the time between the steps, if they are worth a word.

    `elapsed_s` is the run's duration, without pauses.
    """
    parts = split_time(history, elapsed_s)
    if not history.num_steps:
        return []
    places = {"in the first step": parts.first_step_s}
    places[f"between the steps{_name_work_between_steps(history)}"] = parts.between_s
    return [f"{formatting.format_duration(s)} of it {place}" for place, s in places.items() if parts.is_noted(s)]


def _name_work_between_steps(history: History) -> str:
    """Return what a run did between its steps, in parentheses; nothing if it only sent calls and got their results."""
    has_saved = any(event.kind in ("save", "checkpoint") for event in history.events)
    names = [name for name, was_done in (("validation", history.evaluations), ("saving", has_saved)) if was_done]
    return f" ({', '.join(names)})" if names else ""
