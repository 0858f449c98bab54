"""The measured times that a verdict judges: each rank's mean seconds of each phase of a step."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.summary.timing import PHASES

if TYPE_CHECKING:
    from dtkit.dashboard.summary.timing import StepTiming
    from dtkit.types import RunSpec


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Measured means in seconds. Arrays have one number for each known rank."""

    spec: RunSpec
    timing: StepTiming
    ranks: np.ndarray
    phases: np.ndarray
    ranks_per_replica: int

    def get(self, phase: str) -> np.ndarray:
        """Return the seconds of a phase by rank."""
        seconds: np.ndarray = self.phases[:, PHASES.index(phase)]
        return seconds

    @functools.cached_property
    def step_s(self) -> float:
        """Seconds of a step: those of the rank that takes longest."""
        return float(self.phases.sum(axis=1).max())

    @functools.cached_property
    def compute_s(self) -> np.ndarray:
        """Seconds that each rank does not wait and does not communicate."""
        return np.asarray(self.phases.sum(axis=1) - self.get("waiting") - self.get("communication"))

    @functools.cached_property
    def slowest(self) -> int:
        """Index in `ranks` of the rank that computes longest."""
        return int(np.argmax(self.compute_s))

    def share(self, phase: str) -> float:
        """Return the share of all ranks' time that a phase takes."""
        return float(self.get(phase).sum() / self.phases.sum())
