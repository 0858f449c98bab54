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
