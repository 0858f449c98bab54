"""What a live view shows at once, although a page on a busy machine is refreshed rarely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.summary.notices import MARKED_EVENTS

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView


def read_pressing_state(run: RunView, num_events_read: int, num_effects: int) -> tuple[object, ...]:
    """Return what a person waits for, or must see at once: the state, alarms, and new marked events.

    `num_effects` counts the commands that took effect.
    """
    num_marked = sum(event.kind in MARKED_EVENTS for event in run.history.events[num_events_read:])
    alarms = run.exception is None, run.stall_report is None
    return run.status.state, run.spec.world_size, *alarms, num_effects, num_marked
