"""The end of a scheduler's job, as launchers report it to runs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """End of a scheduler's job that runs engines, as the scheduler announces it."""

    job: str
    """Scheduler and id, such as "Slurm job 17"."""
    time_left_s: float
    checkpoint_before_s: float
    """Seconds before the end at which a run writes a checkpoint."""
    is_followed: bool = False
    """Whether a further job takes its place."""

    @property
    def is_due(self) -> bool:
        """Whether to prepare for the end now."""
        return self.time_left_s <= self.checkpoint_before_s
