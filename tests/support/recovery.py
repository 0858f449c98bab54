"""Wait for a step of a run, and its events of losses and repairs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dtkit


def wait_for_step(run: dtkit.Run, step: int) -> None:
    """Wait until the run is at `step` or later."""
    reached = threading.Event()
    unsubscribe = run.subscribe(lambda: run.status.step >= step and reached.set())
    assert run.status.step >= step or reached.wait(60)
    unsubscribe()


def list_loss_events(run: dtkit.Run) -> list[str]:
    return [event.kind for event in run.history.events if event.kind in ("lost", "repair")]


def list_texts(run: dtkit.Run, kind: str) -> list[str]:
    """Return the texts of a run's events of one kind."""
    return [event.text for event in run.history.events if event.kind == kind]
