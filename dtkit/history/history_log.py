"""What a history needs of the log on disk that receives its items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from dtkit.history.items import LogItem
    from dtkit.types import ReplicaCheckResult


class HistoryLog(Protocol):
    """Log on disk that receives a history's new items. :class:`~dtkit.history.run_log.RunLog` is one."""

    folder: Path

    @property
    def write_error(self) -> str | None:
        """Reason why some items are not on disk yet; None if all are."""

    def append_rows(self, block: np.ndarray) -> None:
        """Append rows of dtype :data:`~dtkit.history.history.ROW_DTYPE`."""

    def append_event(self, item: LogItem) -> None:
        """Append an item that is no row."""

    def write_elapsed(self, num_steps: int, elapsed_s: float) -> None:
        """Store how long the run was RUNNING for the first `num_steps` of its history."""

    def write_last_step(self, spans: np.ndarray, check: ReplicaCheckResult | None) -> None:
        """Store the timeline of the last step, and the last comparison of replicas."""

    def close(self) -> None:
        """Stop writing."""

    def remove(self) -> None:
        """Close the log, and delete its folder."""
