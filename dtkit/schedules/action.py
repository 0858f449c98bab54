"""Cells and rows of a schedule."""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """One action of a rank."""

    kind: str
    """"F" (forward), "B" (backward), "I" (gradient of the input only) or "W" (gradients of the weights only)."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Row = tuple[Action | None, ...]
