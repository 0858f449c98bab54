"""The result of `run.verify()`, and its text."""

from __future__ import annotations

import dataclasses
import html
import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.notebook import get_shell, in_notebook
from dtkit._util.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.rpc.reference import StepTimes

ZERO_TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
HALF_PRECISION_TOLERANCE = 1e-2
MAX_SHOWN_DIFFERENCES = 40
"""Parameters with a row in the table of differences; a large model has hundreds."""


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
    """Parameters with numbers that differ, though their true gradient is zero: how many, and by how much at most."""
    incomparable_reasons: tuple[str, ...]
    """Why the two aren't comparable: modules as "name (Type): why", and options of the strategy."""
    part_difference: float | None = None
    """Largest difference to one process that takes each rank's part of a batch separately, with that rank's random
    numbers. None if it was not computed, or differs too.
    """
    whole_difference: float | None = None
    """Largest difference to one process on whole batches, if this verification is with one that takes each rank's part
    of a batch by itself, since a lower precision rounds sums over the samples. None otherwise.
    """
    step_times: StepTimes | None = None
    """Times of the repeated steps; None of fewer than eight, or without a comparable process."""
    float64_difference: float | None = None
    """Largest difference if both are repeated in float64. None if that was not needed, or failed."""
    rounding_note: str = ""
    """Whether rounding explains a difference beyond the tolerance, and why; empty where there is none."""
    num_micro_batches: int = 1
    """Micro-batches that BatchNorm normalizes by themselves, on all ranks as in one process; 1 without BatchNorm."""
    _printed_in: list[int | None] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

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
        lines = [f"{self.verdict}: {self.steps} steps on {self.world_size} ranks against one process, {self.dtype}"]
        if self.differences:
            lines.append(
                f"  largest difference of the parameters {self.compared_difference:.3g}, tolerance {self.tolerance:g}"
            )
        if self.differences and self.verdict != "PASS":
            lines.append(self._describe_worst())
        if self.rounding_note and self.verdict != "NOT COMPARABLE":
            lines.append(f"  {self.rounding_note}")
        if self.verdict != "NOT COMPARABLE" and self.zero_gradient and (wider := self._describe_zero_gradients()):
            lines.append(wider)
        if self.whole_difference is not None:
            lines.append(
                "  a lower precision rounds sums over samples, so the one process takes each rank's part of a batch by "
                f"itself; on whole batches it differs by {self.whole_difference:.2g}"
            )
        if self.num_micro_batches > 1:
            lines.append(
                f"  BatchNorm normalizes each of {self.num_micro_batches} micro-batches by itself, and the one process "
                "does so too: without micro-batches, it would train another model"
            )
        lines += [f"  {module}" for module in self.incomparable_reasons]
        if self.step_times is not None:
            lines.append(self._describe_step_times(self.step_times))
        if self.part_difference is not None:
            lines.append(
                "  one process that takes each rank's part of the batches by itself gets the same parameters: largest "
                f"difference {self.part_difference:.3g}"
            )
        return "\n".join(lines)

    @property
    def compared_difference(self) -> float:
        """The largest difference that the verdict names.

        Where trainings differ by nature, a gradient that is 0 in one process may not be 0 on the ranks. So rounding
        explains no number there.
        """
        return self.largest_difference if self.verdict == "NOT COMPARABLE" else self.max_difference

    def _describe_worst(self) -> str:
        differences = dict(self.differences)
        if self.verdict == "NOT COMPARABLE":
            for name, (_, difference) in self.zero_gradient.items():
                differences[name] = max(differences[name], difference)
        worst = max(differences, key=lambda name: differences[name])
        return f"  worst: {worst}, {differences[worst]:.3g}"

    def _describe_step_times(self, times: StepTimes) -> str:
        if self.world_size == 1:  # which is one process, too
            return f"  median step {formatting.format_duration(times.all_ranks_s)}"
        both = (
            f"  median step {formatting.format_duration(times.all_ranks_s)} on {self.world_size} ranks, "
            f"{formatting.format_duration(times.single_process_s)} in one process: "
        )
        disturbance = times.describe_disturbance(self.world_size)
        return both + (f"not comparable, because {disturbance}" if disturbance else times.describe_speed())

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

    def describe_difference(self) -> str:
        """Return the difference that decided the verdict, with its bound; "" where nothing was compared."""
        if math.isnan(self.max_difference):
            return ""
        if self.verdict == "PASS" and not self.is_within_tolerance:
            return (
                f"in float64: largest difference {self.float64_difference:.2g}; {self.dtype} differs by "
                f"{self.largest_difference:.2g}, which is rounding"
            )
        if self.verdict == "FAIL" and self.max_difference <= self.tolerance and not self.is_within_tolerance:
            bound = f"bound {self._zero_gradient_bound:g}"
            return f"largest difference {self.largest_difference:.3g} where the true gradient is 0, {bound}"
        return f"largest difference {self.compared_difference:.3g}, tolerance {self.tolerance:g}"

    def _summarize(self) -> str:
        """Return the verdict with the difference that decided it."""
        difference = self.describe_difference()
        separator = " " if difference.startswith("in float64") else ", "
        return f"{self.verdict}{separator}{difference}" if difference else self.verdict

    def show(self) -> None:
        """Show the report. A script prints a PASS in one line; a cell does not show the report again as its value."""
        self._printed_in.append(_get_execution_count())
        if in_notebook():
            from IPython.display import display

            display({"text/plain": self.text(), "text/html": self._repr_html_()}, raw=True)  # type: ignore[no-untyped-call]
            return
        is_script = get_shell() is None
        print(f"verify: {self._summarize()}" if is_script and self.verdict == "PASS" else self.text())  # noqa: T201 - asked for as a report

    def _ipython_display_(self) -> None:
        if _get_execution_count() not in self._printed_in:
            from IPython.display import display

            display({"text/plain": repr(self), "text/html": self._repr_html_()}, raw=True)  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Verification({self._summarize()})"

    def _repr_html_(self) -> str:
        result, *lines = (html.escape(line.strip()) for line in self.text().splitlines())
        verdict, _, rest = result.partition(": ")
        items = f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>" if lines else ""
        return f"<p><strong>{verdict}</strong>: {rest}</p>{items}{self._format_differences()}"

    def _format_differences(self) -> str:
        """Return the table of differences, folded; "" where nothing was compared."""
        if not self.differences:
            return ""
        table, hidden = self.make_differences_table(), ""
        if (num_hidden := len(self.differences) - len(table.rows)) > 0:
            hidden = f"<p><small>and {formatting.format_count(num_hidden, 'smaller difference')}</small></p>"
        name, largest = table.rows[0]
        summary = f"differences: at most {largest}, in {html.escape(name)}"
        return f"<details><summary>{summary}</summary>{table.to_html()}{hidden}</details>"

    def make_differences_table(self) -> Table:
        """Return the parameters and buffers with the largest differences, at most ``MAX_SHOWN_DIFFERENCES``."""
        ordered = sorted(self.differences.items(), key=lambda item: -item[1])[:MAX_SHOWN_DIFFERENCES]
        rows = [(formatting.sanitize_text(name, 100), f"{difference:.3g}") for name, difference in ordered]
        return Table(("parameter", "largest difference"), rows, {"parameter"})


def _get_execution_count() -> int | None:
    return getattr(get_shell(), "execution_count", None)
