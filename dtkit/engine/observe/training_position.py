"""Where the training on this engine is, for user code that asks: a Lightning module's epoch, step and batch index."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class TrainingPosition:
    """Position of the step that is being taken. An engine takes one step at a time."""

    step: int = 0
    """Number of steps before this one, from the beginning of the training."""
    steps_per_epoch: int = 1
    evaluation_index: int = 0
    """Number of batches before this one in an evaluation."""

    @property
    def epoch(self) -> int:
        """Number of epochs before this one."""
        return self.step // self.steps_per_epoch

    @property
    def batch_index(self) -> int:
        """Number of steps before this one in its epoch."""
        return self.step % self.steps_per_epoch


POSITION = TrainingPosition()
