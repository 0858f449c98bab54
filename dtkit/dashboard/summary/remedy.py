"""What helps a run that paused because a step was not finite: the action that its dashboard offers first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.errors import NonFiniteError
from dtkit.types import State

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView


def find_remedy(run: RunView) -> str | None:
    """Return "lr", "data" or "train" while a paused run needs that; None else, so also after a new learning rate."""
    error = run.exception
    if run.status.state is not State.PAUSED or not isinstance(error, NonFiniteError):
        return None
    last = next((event.kind for event in reversed(run.history.events) if event.kind in ("error", "lr")), "error")
    return error.remedy if last == "error" or error.remedy != "lr" else None
