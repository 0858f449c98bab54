"""References of `verify`: trainings by one process alone."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Reference(enum.Enum):
    """Kind of a training by one process alone, for comparison with a distributed training."""

    WHOLE = "on whole batches"
    RESEEDED = "on whole batches, with other random numbers"
    BY_PART = "on each rank's part of a batch by itself, with that rank's random numbers"


@dataclasses.dataclass(frozen=True)
class ReferenceReport:
    """Results of the training of a reference so far."""

    max_gradients: Mapping[str, Any]
    """Largest absolute gradient of every element, as a tensor for each parameter."""
    batch_digests: tuple[str, ...]
    """Digest of the samples of each step; none for a reference by parts."""
    update_dtype: str | None = None
    """Dtype that the optimizer computes in, if it isn't the parameters': Muon's is bfloat16."""
    comparison_s: tuple[float, ...] = ()
    """Seconds of each step that only the comparison takes: digests of samples, and largest gradients."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Median seconds of a step: on all ranks, and in one process with the same rows."""

    num_steps: int
    """Number of steps of which these are the medians."""
    all_ranks_s: float
    single_process_s: float

    @property
    def speed_up(self) -> float:
        """How many times as fast all ranks are as one process."""
        return self.single_process_s / self.all_ranks_s

    def are_comparable(self, world_size: int) -> bool:
        """Return whether the two agree: beyond the number of ranks, other programs have slowed down one of them."""
        return self.speed_up <= world_size
