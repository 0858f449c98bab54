"""References of `verify`: trainings by one process alone."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGESTED_STEPS = 2
"""Steps in which `verify` compares the samples of two references: enough to show whether training is reproducible."""

_MAX_RATIO = 1.5  # between the repeated steps and those of the run; medians of few steps vary by less
_LARGE_RATIO = 2.0  # of speeds, from which one decimal is enough


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
    """Digests of the samples of the first `DIGESTED_STEPS` steps; none for a reference by parts."""
    update_dtype: str | None = None
    """Dtype that the optimizer computes in, if it isn't the parameters': Muon's is bfloat16."""
    comparison_s: tuple[float, ...] = ()
    """Seconds of each step that only the comparison takes: digests of samples, and largest gradients."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Median seconds of a step: on all ranks, in one process with the same rows, and of the run that was repeated."""

    num_steps: int
    """Number of steps of which these are the medians."""
    all_ranks_s: float
    single_process_s: float
    run_step_s: float | None = None
    """Median of the run's own steps on all ranks; None before its first ones."""
    others: str = ""
    """Which other programs took the cores from the repeated steps, in words; empty if none were seen to."""

    @property
    def speed_up(self) -> float:
        """How many times as fast all ranks are as one process."""
        return self.single_process_s / self.all_ranks_s

    def describe_speed(self) -> str:
        """Return how fast all ranks are: ``1.35 times as fast`` as one process, or ``3.6 times slower``."""
        if round(self.speed_up, 2) >= 1:
            return f"{self.speed_up:.2f} times as fast"
        ratio = 1 / self.speed_up
        return f"{ratio:.1f} times slower" if ratio >= _LARGE_RATIO else f"{ratio:.2f} times slower"

    def are_comparable(self, world_size: int) -> bool:
        """Return whether nothing shows that other programs disturbed the two (see :meth:`describe_disturbance`)."""
        return not self.describe_disturbance(world_size)

    def describe_disturbance(self, world_size: int) -> str:
        """Return why the two don't give a speed; "" if nothing shows that.

        All ranks can't be faster than their number, and the repeated steps take as long as those of the run.
        """
        if self.others:
            return self.others
        if self.speed_up > world_size:
            return "other programs used the processors"
        ratio = 1.0 if self.run_step_s is None else self.all_ranks_s / self.run_step_s
        if 1 / _MAX_RATIO <= ratio <= _MAX_RATIO:
            return ""
        own, repeated = formatting.format_duration(self.run_step_s), formatting.format_duration(self.all_ranks_s)
        steps = formatting.format_count(self.num_steps, "step")
        cause = f"the machine was busy, or {steps} are too few"
        if ratio > 1:
            return f"the median step took {repeated} in run.verify(), {ratio:.2g} times the {own} of the run: {cause}"
        return f"the median step took {own} in the run, {1 / ratio:.2g} times the {repeated} of run.verify(): {cause}"
