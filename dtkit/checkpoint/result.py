"""What a caller learns of a checkpoint that was written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class CheckpointResult:
    """Checkpoint that was written."""

    path: Path
    step: int
    nbytes: int
    duration_s: float
    """Time from the end of the step until it was complete on disk."""
    blocked_s: float
    """Part of this time for which training paused."""

    def __fspath__(self) -> str:
        """Return the path, so that ``resume_from=`` and other functions of files take the result itself."""
        return str(self.path)

    def __repr__(self) -> str:
        duration, blocked = map(formatting.format_duration, (self.duration_s, self.blocked_s))
        size = formatting.format_bytes(self.nbytes)
        return f"saved step {self.step}, {size} in {duration} (training paused for {blocked}): {self.path}"
