"""The result of `run.verify()`, and its text."""

from __future__ import annotations

import dataclasses
import html
import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.rpc.reference import StepTimes

ZERO_TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
HALF_PRECISION_TOLERANCE = 1e-2


@suggest_attributes("verification")
@explain_arguments
@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of a verification. ``differences`` has the largest difference in each parameter and buffer."""

    verdict: str
    """"PASS", "FAIL" or "NOT COMPARABLE"."""
    steps: int
    world_size: int
    dtype: str
    max_difference: float
    """The largest difference, without the numbers of zero gradient."""
    tolerance: float
    differences: Mapping[str, float]
    zero_gradient: Mapping[str, tuple[int, float]]
    """Parameters with numbers whose true gradient is zero: their count, and their largest difference."""
    incomparable_reasons: tuple[str, ...]
    """Why the two aren't comparable: modules as "name (Type): why", and options of the strategy."""
    part_difference: float | None = None
    """Largest difference to one process that takes each rank's part of a batch separately, with that rank's random
    numbers. None if it was not computed, or differs too.
    """
    step_times: StepTimes | None = None
    """Times of the repeated steps; None of fewer than eight, or without a comparable process."""
    float64_difference: float | None = None
    """Largest difference if both are repeated in float64. None if that was not needed, or failed."""
    rounding_note: str = ""
    """Whether rounding explains a difference beyond the tolerance, and why; empty where there is none."""

    def __bool__(self) -> bool:
        return self.verdict == "PASS"

    @property
    def is_within_tolerance(self) -> bool:
        """Whether all differences are within their bounds."""
        bound = self._zero_gradient_bound
        return self.max_difference <= self.tolerance and all(x <= bound for _, x in self.zero_gradient.values())

    @property
    def largest_difference(self) -> float:
        """The largest difference, also of the numbers of zero gradient."""
        return max([self.max_difference, *(difference for _, difference in self.zero_gradient.values())])

    def text(self) -> str:
        """Return the report, a few lines."""
        worst = max(self.differences, key=lambda name: self.differences[name], default="")
        lines = [f"{self.verdict}: {self.steps} steps on {self.world_size} ranks against one process, {self.dtype}"]
        if self.differences:
            lines.append(
                f"  largest difference of the parameters {self.max_difference:.3g}, tolerance {self.tolerance:g}"
            )
        if self.verdict == "FAIL":
            lines.append(f"  worst: {worst}, {self.differences[worst]:.3g}")
        if self.rounding_note and self.verdict != "NOT COMPARABLE":
            lines.append(f"  {self.rounding_note}")
        if self.zero_gradient and (wider := self._describe_zero_gradients()):
            lines.append(wider)
        lines += [f"  {module}" for module in self.incomparable_reasons]
        if self.step_times is not None:
            lines.append(self._describe_step_times(self.step_times))
        if self.part_difference is not None:
            lines.append(
                "  one process that takes each rank's part of the batches by itself gets the same parameters: largest "
                f"difference {self.part_difference:.3g}"
            )
        return "\n".join(lines)

    def _describe_step_times(self, times: StepTimes) -> str:
        both = (
            f"  median step {formatting.format_duration(times.all_ranks_s)} on {self.world_size} ranks, "
            f"{formatting.format_duration(times.single_process_s)} in one process: "
        )
        if times.are_comparable(self.world_size):
            return f"{both}{times.speed_up:.2f} times as fast"
        return f"{both}not comparable, because other programs used the processors"

    def _describe_zero_gradients(self) -> str:
        """Return one line, since a large model has dozens of such parameters.

        Return nothing if their differences are within the tolerance of all others: their wider bound then decides
        nothing.
        """
        worst = max(self.zero_gradient, key=lambda name: self.zero_gradient[name][1])
        others = len(self.zero_gradient) - 1
        names = f"{worst} and {formatting.format_count(others, 'other parameter')}" if others else worst
        count, largest = sum(n for n, _ in self.zero_gradient.values()), self.zero_gradient[worst][1]
        if largest <= self.tolerance:
            return ""
        bound = self._zero_gradient_bound
        judged = f"{'within' if largest <= bound else 'beyond'} a wider bound of {bound:g}"
        return (
            f"  {formatting.format_count(count, 'number')} in {names} {'differs' if count == 1 else 'differ'} by up to "
            f"{largest:.3g}, {judged}: their true gradient is 0, and only rounding changes them"
        )

    @property
    def _zero_gradient_bound(self) -> float:
        return ZERO_TOLERANCE.get(self.dtype, HALF_PRECISION_TOLERANCE)

    def _summarize(self) -> str:
        """Return the verdict with the difference that decided it."""
        if math.isnan(self.max_difference):
            return self.verdict
        if self.verdict == "PASS" and not self.is_within_tolerance:
            return (
                f"PASS in float64: difference={self.float64_difference:.2g}; {self.dtype} differs by "
                f"{self.largest_difference:.2g}, which is rounding"
            )
        if self.max_difference <= self.tolerance and not self.is_within_tolerance:
            return (
                f"{self.verdict}, difference={self.largest_difference:.3g} where the true gradient is 0, "
                f"bound={self._zero_gradient_bound:g}"
            )
        return f"{self.verdict}, difference={self.max_difference:.3g}, tolerance={self.tolerance:g}"

    def __repr__(self) -> str:
        return f"Verification({self._summarize()})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>"
