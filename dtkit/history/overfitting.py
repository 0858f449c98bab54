"""Overfitting: the validation loss has risen from its best, while the training loss went on falling.

Single evaluations are noise, and the best of many is low by chance. So three conditions must hold for the evaluations
after the best one. Most of their pairs rise, so far that chance alone does so in one of a thousand cases. The median of
the last three is above the best by a tenth, and by a multiple of the noise. The noise is what differs from a line
through neighbors, so a steady rise has none.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.history.mean_loss import compute_mean_loss
from dtkit.history.remembered import remember_while

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.history.history import History
    from dtkit.types import Evaluation

MIN_LATER = 7
"""Evaluations after the best one that a judgment needs: with fewer, even a steady rise may be chance."""
MIN_RISE = 0.1
"""Rise of the validation loss, as a share of the best one, from which a training overfits."""
MIN_NOISE_RATIO = 8.0
"""The same as a multiple of the noise, which few evaluations measure badly."""
MIN_TREND = 3.0
"""Number of rising pairs, in standard deviations from that of an order by chance (Kendall's test)."""
_MAX_LATER = 64  # evaluations that are compared in pairs; of more, equally distant ones
_NUM_PRESENT = 3


@dataclasses.dataclass(frozen=True)
class Overfitting:
    """The best validation loss with its step, the present one, and the training loss at both."""

    step: int
    best: float
    now: float
    training_before: float
    training_now: float

    @property
    def text(self) -> str:
        """What happened, with the remedy."""
        best, now, before, after = map(
            formatting.format_loss, (self.best, self.now, self.training_before, self.training_now)
        )
        return (
            f"overfitting since step {self.step:,}: the validation loss rose from {best}, its best, to {now}, and the "
            f"training loss fell from {before} to {after}. "
            "callbacks=[dtkit.EarlyStopping(restore_best=True)] would end with the best weights"
        )


def _count_evaluations(history: History) -> object:
    """Return what the judgment depends on. Messages ask for it far more often than a training evaluates."""
    last = history.evaluations[-1:]
    has_rows = not last or _read_last_step(history) >= last[0].step  # rows may come after their evaluation
    return len(history.evaluations), last, has_rows, len(history.events), len(history.returns)


@remember_while(_count_evaluations)
def find_overfitting(history: History) -> Overfitting | None:
    """Return how a training overfits; None if it does not, or if there are too few evaluations to judge."""
    evaluations = _select_evaluations(history)
    values = np.array([each.values["loss"] for each in evaluations])
    if len(values) <= MIN_LATER or not np.isfinite(values).all():
        return None
    best = int(np.argmin(values))
    now = float(np.median(values[-_NUM_PRESENT:]))
    if not has_risen(values):
        return None
    interval = max(1, evaluations[-1].step - evaluations[-2].step)
    before, after = (_measure_training(history, evaluations[k].step, interval) for k in (best, -1))
    if not after < before:  # also if one is unknown
        return None
    return Overfitting(evaluations[best].step, float(values[best]), now, before, after)


def has_risen(values: np.ndarray) -> bool:
    """Return whether losses have risen from their least by more than noise."""
    best = int(np.argmin(values))
    later, least = values[best + 1 :], float(values[best])
    if len(later) < MIN_LATER:
        return False
    rise = float(np.median(later[-_NUM_PRESENT:])) - least
    if rise <= MIN_RISE * abs(least):
        return False
    noise = float(np.sqrt(np.mean(np.diff(values[best:], 2) ** 2) / 6))  # of independent noise, these have its 6-fold
    return rise > MIN_NOISE_RATIO * noise and _measure_trend(later) >= MIN_TREND


def _measure_trend(later: np.ndarray) -> float:
    """Return Kendall's statistic: 0 for an order by chance, whose standard deviation is 1."""
    if len(later) > _MAX_LATER:
        later = later[np.linspace(0, len(later) - 1, _MAX_LATER).astype(int)]
    first, second = np.triu_indices(len(later), 1)
    score, n = np.sign(later[second] - later[first]).sum(), len(later)
    return float(score / np.sqrt(n * (n - 1) * (2 * n + 5) / 18))


def _select_evaluations(history: History) -> Sequence[Evaluation]:
    """Return the evaluations with a loss since the best weights were put back, if they were."""
    restored = max((event.step for event in history.events if event.kind == "restore"), default=-1)
    return [each for each in list(history.evaluations) if "loss" in each.values and each.step > restored]


def _measure_training(history: History, step: int, interval: int) -> float:
    """Return the mean training loss of the `interval` steps up to `step`; NaN if none has one."""
    behind = max(0, _read_last_step(history) - step)
    stop = max(0, history.num_steps - behind)
    return compute_mean_loss(history.read_valid_totals(max(0, stop - interval), stop))


def _read_last_step(history: History) -> int:
    """Return the last step that has rows; 0 without one."""
    return int(history.read_valid_totals(history.num_steps - 1)["step"][-1]) if history.num_steps else 0
