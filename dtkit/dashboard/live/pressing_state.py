"""What a live view shows at once, although a page on a busy machine is refreshed rarely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.summary.event_marks import MARKED_EVENTS

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView
    from dtkit.types import Status


class PressingState:
    """What a person waits for, or must see at once: the state, alarms, marked events, and the first step after those.

    A person who resumes a run looks for its next step. Later steps come at the page's own pace.
    """

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._sent: tuple[object, ...] = ()
        self._awaited_after: int | None = None  # the step after which a new one presses

    def is_outdated(self, num_events_read: int, num_effects: int) -> bool:
        """Return whether a page lacks any of it. `num_effects` counts the commands that took effect."""
        status = self._run.status
        return self._is_first_step(status) or self._read(status, num_events_read, num_effects) != self._sent

    def note_sent(self, status: Status, num_events_read: int, num_effects: int) -> bool:
        """Note a message with this status and the alarms. Return whether it brings an awaited first step."""
        is_first_step = self._is_first_step(status)
        if is_first_step:
            self._awaited_after = None
        state = self._read(status, num_events_read, num_effects)
        if state[:2] != self._sent[:2]:
            self._awaited_after = status.step
        self._sent = state
        return is_first_step

    def _is_first_step(self, status: Status) -> bool:
        return self._awaited_after is not None and status.step > self._awaited_after

    def _read(self, status: Status, num_events_read: int, num_effects: int) -> tuple[object, ...]:
        run = self._run
        num_marked = sum(event.kind in MARKED_EVENTS for event in run.history.events[num_events_read:])
        alarms = run.exception is None, run.stall_report is None
        return status.state, num_effects, run.spec.world_size, *alarms, num_marked
