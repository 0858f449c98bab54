"""The pauses of a run, read from its events: their length, and what caused those that nobody asked for.

A run that pauses because of an error or of lost nodes logs these alone. Its pause lasts until it is resumed or stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dtkit.history.history import History
    from dtkit.types import Event

_ENDS = ("start", "resume", "stop", "done")  # kinds of events
_FAILURES = ("error", "lost")


class Pauses(NamedTuple):
    """All pauses of a run. One that still lasts has no length yet."""

    seconds: float
    has_requested: bool
    """Whether the user requested one of them."""
    causes: tuple[str, ...]
    """What caused the other ones, such as "not finite"."""


def find_pauses(history: History) -> Pauses:
    """Return the pauses of the run that writes this history."""
    reader = _PauseReader()
    for k, event in enumerate(history.events):
        if k == history.num_inherited_events:
            reader.forget_failure()  # it ended the earlier run
        reader.read(event)
    return Pauses(reader.seconds, reader.has_requested, tuple(dict.fromkeys(reader.causes)))


class _PauseReader:
    """Adds up pauses, event by event."""

    def __init__(self) -> None:
        self.seconds, self.has_requested = 0.0, False
        self.causes: list[str] = []
        self._begin: Event | None = None  # of a requested pause that lasts
        self.forget_failure()

    def forget_failure(self) -> None:
        """Continue as after a step without a failure."""
        self._failure: Event | None = None  # the first one at the last step that had one
        self._is_repaired = False

    def read(self, event: Event) -> None:
        """Add the pause that ends with this event."""
        if event.kind == "pause":
            self.has_requested, self._begin = True, self._begin or event
        elif event.kind == "repair":
            self._is_repaired = True
        elif event.kind in _FAILURES and self._begin is None:
            self._note_failure(event)
        elif event.kind in _ENDS:
            self._end(event)

    def _note_failure(self, event: Event) -> None:
        if self._failure is None or self._failure.step != event.step or self._is_repaired:
            self._failure, self._is_repaired = event, False

    def _end(self, event: Event) -> None:
        failure = self._failure if self._begin is None and self._has_paused(event) else None
        begin = self._begin or failure
        if begin is not None:
            self.seconds += max(0.0, event.time - begin.time)
        if failure is not None:
            self.causes.append(_name_cause(failure))
        self._begin = None
        self.forget_failure()

    def _has_paused(self, event: Event) -> bool:
        """Return whether the run was paused by its last failure when this event came.

        Only a paused run is resumed; before its first step, it is started again. One that is stopped may have
        continued, with other engines or after more steps.
        """
        if event.kind in ("start", "resume"):
            return True
        failure = self._failure
        return event.kind == "stop" and failure is not None and failure.step == event.step and not self._is_repaired


def _name_cause(failure: Event) -> str:
    if failure.kind == "lost":
        return "lost node"
    return "not finite" if failure.text.startswith("not finite") else "error"
