"""Record of one trial."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtkit.errors import ItemError


@dataclasses.dataclass
class TrialRecord:
    """One trial."""

    number: int
    rank: int | None = None
    """Rank of the engine that computes it, or computed it last."""
    state: str = "running"
    """"running", "complete", "pruned" or "failed"."""
    value: float | None = None
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    reports: dict[int, float] = dataclasses.field(default_factory=dict)
    """Intermediate values by step."""
    user_attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float | None = None
    error: ItemError | None = None

    @property
    def last_report(self) -> float | None:
        """The last reported value."""
        return next(reversed(self.reports.values()), None)
