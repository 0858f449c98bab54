"""A training that has learned nothing: its loss is at the start again, or above it, after updates that were too large.

A loss that stays level is no proof: a model may be trained already, or learn late. So four conditions must hold.

- The mean of the last steps is not below the start, which is the loss of the first samples. A difference within its
  noise doesn't count: the noise is the standard deviation of the last steps, by the steps of both means.
- The loss does not fall: the later half of these steps is not below the earlier one by more than noise.
- The last validation losses, if there are any, are not below the start either.
- Something shows that the training did harm. Either the median of some steps in a row was far above the start and its
  noise, and the loss came back to the start. Or the loss and the validation loss are both above it by more than noise.

Without validation, only a very high peak counts: the loss of one of two models that play against each other rises and
comes back, too. Losses that are negative at times, such as those of a policy, have no scale, and are not judged.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtkit._util import formatting
from dtkit.history.divergence import START_SAMPLES, find_divergence
from dtkit.history.mean_loss import compute_mean_loss, select_known
from dtkit.history.remembered import remember_last, remember_while

if TYPE_CHECKING:
    from dtkit.history.history import History

MIN_STEPS = 80
"""Steps that a judgment needs."""
NUM_PRESENT = 40
"""Steps of the present loss."""
MIN_PEAK = 2.0
"""Ratio of the peak to the start that shows harm, where there is a validation loss."""
MIN_PEAK_ALONE = 10.0
"""The same without a validation loss."""
MAX_RETURN = 1.5
"""Ratio of the present loss to the start up to which it came back from the peak."""
MIN_RISE = 0.1
"""Rise above the start, as a share of it, that shows harm in training and validation."""
MIN_NOISE_RATIO = 6.0
"""Peak and rise above the start, as a multiple of the noise of one step."""
MAX_FALL = 3.0
"""Fall within the last steps, as a multiple of its noise, up to which the loss is level."""
_PEAK_STEPS = 5  # whose median is no spike
_EARLY_STEPS = 64
_SURELY_LOWER = 0.6  # of the start: with all losses below it, their noise is below a third of the start
_NUM_EVALUATIONS = 3


@dataclasses.dataclass(frozen=True)
class NoLearning:
    """The present loss, that of the first steps, and the highest one between, with its step and learning rate."""

    now: float
    start: float
    num_start: int
    peak: float
    peak_step: int
    lr: float

    @property
    def short(self) -> str:
        """The losses alone, for a view that names the finding."""
        now, start = formatting.format_loss(self.now), formatting.format_loss(self.start)
        return f"loss {now}, that of the {self._first_steps} {start}"

    @property
    def text(self) -> str:
        """What happened, with the remedy."""
        now, start, peak = map(formatting.format_loss, (self.now, self.start, self.peak))
        within = " by more than its noise" if self.now < self.start else ""
        text = (
            f"the model has learned nothing so far: the loss ({now}, mean of {NUM_PRESENT} steps) is not below that of "
            f"the {self._first_steps} ({start}){within}"
        )
        if self.peak > self.now:
            text += f", and rose to {peak} at step {self.peak_step:,}"
        lr, lower = map(formatting.format_learning_rate, (self.lr, self.lr / 10))
        return f"{text}. Train again with a lower learning rate than {lr}, such as {lower}"

    @property
    def _first_steps(self) -> str:
        return "first step" if self.num_start == 1 else f"first {self.num_start} steps"


class _Start(NamedTuple):
    """The loss of the first samples with its steps, and the noise of one early step."""

    loss: float
    num_steps: int
    noise: float


def _count_early_steps(history: History) -> object:
    return min(history.num_steps, _EARLY_STEPS), len(history.returns)


@remember_while(_count_early_steps)
def _read_start(history: History) -> _Start | None:
    """Return the start, once there are enough steps; None without one that has a scale."""
    early = select_known(history.read_valid_totals(0, _EARLY_STEPS))
    if len(early) < _EARLY_STEPS or early["step"][0] > 1:  # resumed: the first loss is that of a trained model
        return None
    num_steps = int(np.searchsorted(np.cumsum(early["samples"]), START_SAMPLES)) + 1
    loss, noise = compute_mean_loss(early[:num_steps]), 1.05 * float(np.median(np.abs(np.diff(early["loss"]))))
    return _Start(loss, num_steps, noise) if loss > 0 and early["loss"].min() >= 0 else None


@remember_last
def find_no_learning(history: History) -> NoLearning | None:
    """Return how a training has learned nothing; None if it has, or if that is not certain."""
    if history.num_steps < MIN_STEPS or (start := _read_start(history)) is None:
        return None
    last = select_known(history.read_valid_totals(history.num_steps - NUM_PRESENT))
    losses, half = last["loss"], NUM_PRESENT // 2
    if len(last) < NUM_PRESENT or losses.min() < 0 or losses.max() < _SURELY_LOWER * start.loss:
        return None
    now = compute_mean_loss(last)
    noise = float(losses.std())
    lowest = start.loss - noise * math.sqrt(1 / start.num_steps + 1 / NUM_PRESENT)
    is_level = losses[:half].mean() - losses[half:].mean() <= MAX_FALL * noise * math.sqrt(2 / half)
    if not now >= lowest or not is_level or find_divergence(history) is not None:
        return None
    peak, noise = _get_peak(history), max(noise, start.noise)
    if not _has_done_harm(now, start.loss, noise, peak.loss, _read_validation(history), lowest):
        return None
    return NoLearning(now, start.loss, start.num_steps, peak.highest, peak.step, _read_lr(history, peak))


def _has_done_harm(
    now: float, start: float, noise: float, peak: float, validation: float | None, lowest: float
) -> bool:
    """Return whether losses show that updates were too large. `validation` is a loss, or None without one."""
    least = start + max(MIN_RISE * start, MIN_NOISE_RATIO * noise)
    if validation is not None and not validation >= lowest:
        return False
    if validation is not None and min(now, validation) > least:
        return True
    ratio = MIN_PEAK_ALONE if validation is None else MIN_PEAK
    return peak > max(ratio * start, start + MIN_NOISE_RATIO * noise) and now <= MAX_RETURN * start


def _read_validation(history: History) -> float | None:
    """Return the median of the last validation losses; None without one."""
    losses = [each.values["loss"] for each in history.evaluations[-_NUM_EVALUATIONS:] if "loss" in each.values]
    return float(np.median(losses)) if losses else None


def _read_lr(history: History, peak: _Peak) -> float:
    """Return the learning rate at the peak, by the rows of each step: a schedule may have lowered it since."""
    rows_per_step = history.num_valid_rows / history.num_steps
    row = min(int(peak.index * rows_per_step), history.num_valid_rows - 1)
    return float(history.read_valid_rows(row, row + 1)["lr"][0])


class _Peak:
    """The highest median of some steps in a row. Each look reads the new steps alone, since a run may have many."""

    def __init__(self) -> None:
        self.loss = self.highest = -math.inf
        self.step = self.index = 0
        self._num_read = self._num_returns = 0

    def update(self, history: History) -> None:
        """Read the blocks that are complete, each from the step after the last one."""
        if len(history.returns) != self._num_returns:  # the steps of the peak may have been undone
            self.loss, self._num_read, self._num_returns = -math.inf, 0, len(history.returns)
        num_blocks = (history.num_steps - self._num_read) // _PEAK_STEPS
        totals = history.read_valid_totals(self._num_read, self._num_read + num_blocks * _PEAK_STEPS)
        blocks = totals.reshape(-1, _PEAK_STEPS)
        if len(blocks):
            medians = np.nan_to_num(np.median(blocks["loss"], axis=1), nan=-math.inf)  # NaN: a block without a loss
            highest = int(np.argmax(medians))
            if medians[highest] > self.loss:
                self.loss, losses = float(medians[highest]), blocks["loss"][highest]
                row = int(np.nanargmax(losses))
                self.highest, self.step = float(losses[row]), int(blocks["step"][highest, row])
                self.index = self._num_read + highest * _PEAK_STEPS + row
        self._num_read += len(totals)


def _get_peak(history: History) -> _Peak:
    with _lock:
        peak = _peaks.setdefault(history, _Peak())
        peak.update(history)
        return peak


# locks: while a view or the run reads new steps
_lock = threading.Lock()
_peaks: weakref.WeakKeyDictionary[History, _Peak] = weakref.WeakKeyDictionary()
