"""Confirmation of the last command, which a page shows for some seconds, or until something newer happens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit.dashboard.summary.event_marks import MARKED_EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.types import Event

_NEWER_KINDS = MARKED_EVENTS | {"done"}


class LastEffect:
    """The last command that took effect, in words. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._text, self._at, self._num_events = "", -math.inf, 0
        self.count = 0
        """Commands that took effect so far."""

    def note(self, text: str, events: Sequence[Event]) -> None:
        """Note a command that took effect after these events of the run."""
        self._text, self._at, self._num_events = text, self._clock(), len(events)
        self.count += 1

    def describe(self, events: Sequence[Event]) -> dict[str, object]:
        """Return the part of a message: the count, and the text while nothing newer happened."""
        is_recent = self._clock() - self._at < timeouts.EFFECT_SHOWN_S
        is_last = not any(event.kind in _NEWER_KINDS for event in events[self._num_events :])
        return {"count": self.count, "text": self._text if is_recent and is_last else ""}
