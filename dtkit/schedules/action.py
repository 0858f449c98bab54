"""The cells of a schedule: what a rank does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:


    pass


class Action(NamedTuple):
    """One thing that a rank does."""

    kind: str
    """"F", "B", or a half of backward: "I" for the input's gradient, "W" for the weights'."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Row = tuple[Action | None, ...]

