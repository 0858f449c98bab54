"""A training that has learned nothing: its loss is at the start or above it, and something shows that it stays there.

A loss that stays level is no proof: a model may be trained already, or learn late. So four conditions must hold.

- The mean of the last steps is not below the start, which is the loss of the first samples. A difference within its
  noise doesn't count: the noise is the standard deviation of the last steps, by the steps of both means.
- The loss does not fall: the later half of these steps is not below the earlier one by more than noise.
- The last validation losses, if there are any, are not below the start either.
- Something shows that the training did harm. Either the median of some steps in a row was far above the start and its
  noise, and the loss came back to the start. Or the loss and the validation loss are both above it by more than noise.

Many evaluations replace the last condition: if none of them is below the start, a single step far above it shows harm.
Twice as many, over more epochs, show that nothing was learned even without one. Their cause is less certain.

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
    from collections.abc import Sequence

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
_MIN_EVALUATIONS = 5  # over more than one epoch, which show with a single high step that nothing was learned
_MIN_FLAT_EVALUATIONS, _MIN_FLAT_EPOCHS = 10, 2  # the same without such a step; the epochs that must be complete
_NEAR_START = 0.98  # share of the start: one batch of a new model differs from others by as much
_MAX_FLAT_NOISE = 0.1  # of a step, as a share of the start, with which a level loss is known
_MIN_VALIDATION_FALL = 0.001  # share of the start from which a steady fall is slow learning


@dataclasses.dataclass(frozen=True)
class NoLearning:
    """The present loss, that of the first steps, and the highest one between, with its step and learning rate."""

    now: float
    start: float
    num_start: int
    peak: float
    peak_step: int
    lr: float
    num_evaluations: int = 0
    """Evaluations that show that nothing was learned; 0 if other losses do."""
    least_validation: float = math.nan
    has_done_harm: bool = True
    """Whether updates were too large, as far as losses show."""

    @property
    def short(self) -> str:
        """The losses alone, for a view that names the finding."""
        now, start = formatting.format_loss(self.now), formatting.format_loss(self.start)
        return f"loss {now}, that of the {self._first_steps} {start}"

    @property
    def advice(self) -> str:
        """The finding and the remedy, without the numbers that change with each step."""
        return f"the model has learned nothing so far: {self.remedy}"

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """The losses behind the finding."""
        now, start, peak = map(formatting.format_loss, (self.now, self.start, self.peak))
        lines = [f"loss of the {self._first_steps}: {start}", f"mean of the last {NUM_PRESENT} steps: {now}"]
        if self.peak > max(self.now, self.start):
            lines.append(f"highest loss: {peak}, at step {self.peak_step:,}")
        if self.num_evaluations:
            least = formatting.format_loss(self.least_validation)
            lines.append(f"lowest of the last {self.num_evaluations} validation losses: {least}")
        return tuple(lines)

    @property
    def text(self) -> str:
        """What happened, with the remedy."""
        now, start, peak = map(formatting.format_loss, (self.now, self.start, self.peak))
        within = " by more than its noise" if self.now < self.start else ""
        text = (
            f"the model has learned nothing so far: the loss ({now}, mean of {NUM_PRESENT} steps) is not below that of "
            f"the {self._first_steps} ({start}){within}"
        )
        if self.has_done_harm and self.peak > self.now:
            text += f", and rose to {peak} at step {self.peak_step:,}"
        if self.num_evaluations:
            least = formatting.format_loss(self.least_validation)
            text += f". The lowest of the last {self.num_evaluations} validation losses is {least}"
        return f"{text}. {self.remedy[0].upper()}{self.remedy[1:]}"

    @property
    def remedy(self) -> str:
        """What would help."""
        lr, lower = map(formatting.format_learning_rate, (self.lr, self.lr / 10))
        if self.has_done_harm:
            return f"train again with a lower learning rate than {lr}, such as {lower}"
        return (
            f"the learning rate ({lr}) may be too low or too high, the labels may not belong to the rows, or the model "
            "was trained before"
        )

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
    if not np.isfinite(early["loss"]).all():
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
    if not np.isfinite(losses).all():  # it has diverged
        return None
    now = compute_mean_loss(last)
    noise = float(losses.std())
    lowest = start.loss - noise * math.sqrt(1 / start.num_steps + 1 / NUM_PRESENT)
    is_level = losses[:half].mean() - losses[half:].mean() <= MAX_FALL * noise * math.sqrt(2 / half)
    if not now >= min(lowest, _NEAR_START * start.loss) or not is_level or find_divergence(history) is not None:
        return None
    peak, validation = _get_peak(history), _read_validation(history)
    largest_noise = max(noise, start.noise)
    if now >= lowest and _has_done_harm(now, start.loss, largest_noise, peak.loss, validation, lowest):
        lr = _read_lr(history, peak.index)
        return NoLearning(now, start.loss, start.num_steps, peak.highest, peak.step, lr)
    return _judge_evaluations(history, now, noise, start) if now >= _NEAR_START * start.loss else None


def _judge_evaluations(history: History, now: float, noise: float, start: _Start) -> NoLearning | None:
    """Return that nothing was learned, by many evaluations of which none is below the start."""
    validation = _list_validation_losses(history)
    first, last = (history.read_valid_rows(row, row + 1)["epoch"][0] for row in (0, history.num_valid_rows - 1))
    epochs = int(last - first)
    late = validation[-max(_MIN_FLAT_EVALUATIONS, len(validation) // 2) :]  # early ones may be lower: units die later
    least = _NEAR_START * start.loss
    if len(late) < _MIN_EVALUATIONS or epochs < 1 or not min(late) >= least or _is_falling(late, start.loss):
        return None
    peak = _get_peak(history).spike
    lr, known = _read_lr(history, peak.place), (len(late), min(late))
    found = NoLearning(now, start.loss, start.num_steps, peak.loss, peak.step, lr, *known)
    is_flat = noise <= _MAX_FLAT_NOISE * start.loss
    min_peak = MIN_PEAK if is_flat else MIN_PEAK_ALONE
    is_far = peak.loss > max(min_peak * start.loss, max(start.loss, now) + MIN_NOISE_RATIO * noise)
    if is_far and noise <= start.loss:
        return found
    is_long = len(validation) >= _MIN_FLAT_EVALUATIONS and epochs >= _MIN_FLAT_EPOCHS
    is_long = is_long and min(validation) >= least and not _is_falling(validation, start.loss)
    if is_long and is_flat and now <= (1 + MIN_RISE) * start.loss:
        return dataclasses.replace(found, has_done_harm=False)
    return None


def _is_falling(validation: Sequence[float], start: float) -> bool:
    """Return whether losses fall by more than noise, if slowly. The noise is that from one to the next."""
    half = len(validation) // 2
    fall = np.mean(validation[:half]) - np.mean(validation[half:])
    noise = float(np.median(np.abs(np.diff(validation)))) / math.sqrt(2)
    return bool(fall > max(_MIN_VALIDATION_FALL * start, MAX_FALL * noise * math.sqrt(2 / half)))


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
    losses = _list_validation_losses(history, _NUM_EVALUATIONS)
    return float(np.median(losses)) if losses else None


def _list_validation_losses(history: History, num_last: int = 0) -> list[float]:
    """Return the losses of the last evaluations; of all for 0."""
    return [each.values["loss"] for each in history.evaluations[-num_last:] if "loss" in each.values]


def _read_lr(history: History, index: int) -> float:
    """Return the learning rate of a step, by the rows of each one: a schedule may have lowered it since."""
    rows_per_step = history.num_valid_rows / history.num_steps
    row = min(int(index * rows_per_step), history.num_valid_rows - 1)
    return float(history.read_valid_rows(row, row + 1)["lr"][0])


class _Spike(NamedTuple):
    """The step with the highest loss, and its place in the history."""

    loss: float = -math.inf
    step: int = 0
    place: int = 0


class _Peak:
    """The highest median of some steps in a row. Each look reads the new steps alone, since a run may have many."""

    def __init__(self) -> None:
        self.spike = _Spike()
        self.loss = self.highest = -math.inf
        self.step = self.index = 0
        self._num_read = self._num_returns = 0

    def update(self, history: History) -> None:
        """Read the blocks that are complete, each from the step after the last one."""
        if len(history.returns) != self._num_returns:  # the steps of the peak may have been undone
            self.loss, self._num_read, self._num_returns = -math.inf, 0, len(history.returns)
            self.spike = _Spike()
        num_blocks = (history.num_steps - self._num_read) // _PEAK_STEPS
        totals = history.read_valid_totals(self._num_read, self._num_read + num_blocks * _PEAK_STEPS)
        blocks = totals.reshape(-1, _PEAK_STEPS)
        if len(blocks):
            self._update_spike(totals)
            medians = np.nan_to_num(np.median(blocks["loss"], axis=1), nan=-math.inf)  # NaN: a block without a loss
            highest = int(np.argmax(medians))
            if medians[highest] > self.loss:
                self.loss, losses = float(medians[highest]), blocks["loss"][highest]
                row = int(np.nanargmax(losses))
                self.highest, self.step = float(losses[row]), int(blocks["step"][highest, row])
                self.index = self._num_read + highest * _PEAK_STEPS + row
        self._num_read += len(totals)

    def _update_spike(self, totals: np.ndarray) -> None:
        losses = np.nan_to_num(totals["loss"], nan=-math.inf, posinf=math.inf)
        row = int(np.argmax(losses))
        if losses[row] > self.spike.loss:
            self.spike = _Spike(float(losses[row]), int(totals["step"][row]), self._num_read + row)


def _get_peak(history: History) -> _Peak:
    with _lock:
        peak = _peaks.setdefault(history, _Peak())
        peak.update(history)
        return peak


# locks: while a view or the run reads new steps
_lock = threading.Lock()
_peaks: weakref.WeakKeyDictionary[History, _Peak] = weakref.WeakKeyDictionary()
