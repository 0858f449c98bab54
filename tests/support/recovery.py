"""Waits for a step of a run, and its events of loss and repair."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dtkit


def at_step(run: dtkit.Run, step: int) -> None:
    """Wait until so many steps are known of."""
    there = threading.Event()
    end = run.subscribe(lambda: run.status.step >= step and there.set())
    assert run.status.step >= step or there.wait(60)
    end()


def kinds(run: dtkit.Run) -> list[str]:
    return [event.kind for event in run.history.events if event.kind in ("lost", "repair")]
