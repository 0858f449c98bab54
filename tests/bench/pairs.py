"""Alternating pairs of a measurement and its reference, so that drift of the machine affects both."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAIRS = 7


@dataclasses.dataclass(frozen=True)
class Sample:
    """Repeated measurements of one figure."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({min(self.values):.4g} to {max(self.values):.4g}, {len(self.values)} times)"


def alternate(measure: Callable[[], float], reference: Callable[[], float], pairs: int) -> tuple[Sample, Sample]:
    """Call `measure` and `reference` in turn, each of them first in every other pair; each returns its figure."""
    measured: list[float] = []
    expected: list[float] = []
    for k in range(pairs):
        turns = [(expected, reference), (measured, measure)]
        for figures, work in turns if k % 2 == 0 else reversed(turns):
            figures.append(work())
        print(
            f"  pair: {measured[-1]:.4g} against {expected[-1]:.4g}, ratio {measured[-1] / expected[-1]:.3f}",
            flush=True,
        )
    return Sample(measured), Sample(expected)


def ratios(measured: Sample, reference: Sample) -> Sample:
    """Return the ratio of each pair."""
    return Sample([a / b for a, b in zip(measured.values, reference.values, strict=True)])


def report(name: str, sample: Sample, *, unit: str = "", least: float | None = None, most: float | None = None) -> bool:
    """Print a line with the target and whether it was met."""
    met = (least is None or sample.median >= least) and (most is None or sample.median <= most)
    targets = [f"{sign} {value}" for sign, value in ((">=", least), ("<=", most)) if value is not None]
    print(f"{'met ' if met else 'MISS'}  {name}: {sample} {unit}, target {' and '.join(targets)}", flush=True)
    return met
