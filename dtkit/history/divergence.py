"""Divergence of a training: a loss that is not finite any more, or that lost what the training had gained.

Single steps are noise, so the present is the median of the last steps. It is compared with two others: the start,
which is the loss of the first samples, and the best block of steps so far. A training has diverged if its loss is far
above the start, or far above the best block and back at the start. A rise that stays below the start, such as that
after a warm restart, is not one. A loss that is negative at times, such as that of a policy or a critic, has no scale,
and is judged only by being finite.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtkit._util import formatting
from dtkit.history.mean_loss import FINAL_LOSS_STEPS, compute_mean_loss, select_known
from dtkit.history.remembered import remember_last, remember_while

if TYPE_CHECKING:
    from dtkit.history.history import History

MIN_RATIO = 10
"""Ratio of the present loss to the start from which a training has diverged."""
MIN_GROWTH = 20
"""Ratio of the present loss to the best one from which a training has diverged, if it is back at the start."""
START_SAMPLES = 32
"""Samples of the start: whole first steps with at least as many."""
MIN_STEPS = 5
"""Steps after the start that a judgment needs."""
MIN_JUMP = 1000
"""Ratio of a single step's loss to the start from which it isn't noise."""
_VERY_LARGE = 1e15  # no loss of a training with usual numbers is as large
_BACK_AT_START = 0.8  # share of the start's loss; a network whose units all died is a little below it
_MIN_BLOCK_SAMPLES = 64  # of the best and of the present; with fewer samples, a few easy ones are a block of their own
_BACK_RATIO = 2  # to its best loss, below which a run is back
_ABOVE_START = 1.1  # times the first loss; a run above it has lost all that it learned
_AWAY_RATIO = 4  # to its best loss, above which a run that diverged has left it; a plateau below is no departure
_EARLY_STEPS = 256  # among which a loss that can be negative is so


class Departure(NamedTuple):
    """Where a loss left its best, and the learning rate in force there. All views name this step for a divergence."""

    step: int
    """The first step after the last one whose loss was near its best."""
    lr: float
    rate_step: int | None
    """The step at which that rate was set by hand; None if it was not."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A diverged loss in words, the learning rate of the last step, and the numbers behind it."""

    text: str
    short: str
    """The text without its numbers, for the head of a view: ``loss grew 40 times since step 120``."""
    lr: float
    since_step: int
    """The last step before the loss grew, or the first one whose loss is not finite."""
    arithmetic: tuple[str, ...]
    is_finite: bool = True
    has_finite_gradients: bool = False
    """Whether the loss is NaN by itself: the gradients of its steps are finite, and it did not grow before."""
    departure: Departure | None = None
    """Where the loss left its best; None if it is not finite."""

    @property
    def advice(self) -> str:
        """Where the loss left and what would help, without the numbers that change with each step."""
        departure = self.departure
        if departure is None:
            return f"the {self.short}: {self.remedy}"
        left = f"the loss began to grow at step {departure.step:,}"
        if departure.lr == self.lr:
            return f"{left}: {self.remedy}"
        since = "" if departure.rate_step is None else f" (set at step {departure.rate_step:,})"
        then, now = map(formatting.format_learning_rate, (departure.lr, self.lr))
        return f"{left}, with the learning rate at {then}{since}; it is {now} now: train on, or go back to a checkpoint"

    @property
    def remedy(self) -> str:
        """What would help. Updates by losses that are not finite leave nothing to continue from."""
        if self.has_finite_gradients:
            return (
                "the gradients are finite, so the learning rate is not the cause. Look at what the loss computes at "
                "that step, and at its data"
            )
        lr = formatting.format_learning_rate(self.lr)
        if self.is_finite:
            return f"lower the learning rate ({lr} now), or set the strategy's clip_grad_norm="
        if not self.since_step:
            return "no update came before it, so look for numbers in the data or the model that are too large"
        return f"train again with a lower learning rate ({lr} now), or with the strategy's clip_grad_norm="


@dataclasses.dataclass(frozen=True)
class PastDivergence:
    """The step at which a loss left its best, to which it is not back, and both losses."""

    step: int
    best: float
    now: float
    num_steps: int
    """Steps of which the present loss is the mean."""
    lr: float
    """The learning rate with which the loss diverged."""
    has_new_rate: bool
    """Whether another rate was set by hand since."""

    @property
    def text(self) -> str:
        """When the loss diverged, and its best."""
        return f"its loss diverged at step {self.step:,}; best {formatting.format_loss(self.best)}"

    @property
    def remedy(self) -> str:
        """What would help. With a rate that was lowered since, the loss may yet come back."""
        if self.has_new_rate:
            return "train on, or go back to a checkpoint"
        lr, lower = map(formatting.format_learning_rate, (self.lr, self.lr / 10))
        return f"train again with a lower learning rate than {lr}, such as {lower}"

    @property
    def advice(self) -> str:
        """The text and the remedy, as a verdict."""
        best = formatting.format_loss(self.best)
        return f"the loss diverged at step {self.step:,} and is not back at its best ({best}): {self.remedy}"

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """The losses, and their ratio."""
        best, now = map(formatting.format_loss, (self.best, self.now))
        mean = f"mean of the last {formatting.format_count(self.num_steps, 'step')}"
        return (f"best so far: {best}", f"{mean}: {now}", f"{now} / {best} = {self.now / self.best:.3g}")


@dataclasses.dataclass(frozen=True)
class _Level:
    """A loss that the present is compared with: the start, or the best block of steps."""

    loss: float
    step: int
    """The last of its steps."""
    num_steps: int


class _EarlySteps(NamedTuple):
    """What the first steps of a run say."""

    start: _Level
    least_loss: float
    block: int
    """Steps that a block has."""


@remember_last
def find_divergence(history: History) -> Divergence | None:
    """Return how the loss diverged; None if it did not, or if there are too few steps to judge."""
    early = _read_early_steps(history)
    if early is None:
        return None
    last = select_known(history.read_valid_totals(history.num_steps - early.block))
    if not len(last):
        return None
    if not math.isfinite(last["loss"][-1]):
        return _describe_nonfinite(history)
    return _find_growth(history, early, last)


def find_ruined_step(history: History) -> int | None:
    """Return the last step before the loss grew so far that the parameters are ruined.

    None if it did not grow, or if the last loss is not finite, which data alone may cause.
    """
    known = select_known(history.read_valid_totals())  # read only when a step fails
    if not len(known) or not math.isfinite(known["loss"][-1]):
        return None
    divergence = find_divergence(history)
    if divergence is not None:
        return divergence.since_step
    start = _measure_start(known)  # a loss that explodes at once leaves too few steps for a median
    is_far = known["loss"].min() >= 0 and known["loss"][-1] > MIN_JUMP * start.loss > 0
    return start.step if is_far and known["step"][-1] > start.step else None


def find_large_loss(history: History) -> tuple[int, float] | None:
    """Return the first step whose loss is not finite or very large, and its loss; None without one."""
    known = select_known(history.read_valid_totals())  # read only when a step fails
    large = np.flatnonzero(~(np.abs(known["loss"]) < _VERY_LARGE))
    return (int(known["step"][large[0]]), float(known["loss"][large[0]])) if len(large) else None


def _find_growth(history: History, early: _EarlySteps, last: np.ndarray) -> Divergence | None:
    start, block = early.start, early.block
    best = min(start, _get_best_block(history, block), key=lambda level: level.loss)
    present = last[last["step"] > best.step]
    lowest = min(early.least_loss, present["loss"].min(initial=math.inf))
    if len(present) < MIN_STEPS or not np.isfinite(present["loss"]).all() or lowest < 0:
        return None
    if present["loss"].max() <= min(MIN_RATIO * start.loss, MIN_GROWTH * best.loss):
        return None  # neither is the median larger, which takes longer to compute
    loss = float(np.median(present["loss"]))
    is_far = loss > MIN_RATIO * start.loss > 0
    is_lost = loss > MIN_GROWTH * best.loss > 0 and loss > _BACK_AT_START * start.loss and len(present) >= block // 2
    if not (is_far or is_lost):
        return None
    return _describe_growth(best, present, _get_lr(history), _find_departure(history, best))


def _find_departure(history: History, best: _Level) -> Departure:
    """Return where the loss left its best. It stays the same while that is the best, however the loss goes on."""
    key = (len(history.returns), best.step)
    with _lock:
        known = _departures.get(history)
    if known is not None and known[0] == key:
        return known[1]
    step, rows = _find_departure_step(history, best), history.read_valid_rows()
    lr = float(rows["lr"][rows["step"] == step][-1])
    set_at = max((event.step for event in history.events if event.kind == "lr" and event.step <= step), default=None)
    is_in_force = lr in rows["lr"][rows["step"] == set_at]  # a schedule may have changed it since
    departure = Departure(step, lr, set_at if is_in_force else None)
    with _lock:
        _departures[history] = (key, departure)
    return departure


def _find_departure_step(history: History, best: _Level, before: float = math.inf) -> int:
    """Return the step after the last one near the best, among those of the best and step `before`."""
    since = select_known(history.read_valid_totals())
    since = since[(since["step"] > best.step) & (since["step"] < before)]
    low = np.flatnonzero(since["loss"] <= _AWAY_RATIO * best.loss)
    return int(since["step"][min(int(low[-1]) + 1, len(since) - 1) if len(low) else 0])


def find_divergence_step(history: History) -> int | None:
    """Return the step from which on the loss diverged, or had diverged and did not come back; None if it did not."""
    divergence = find_divergence(history)
    if divergence is not None:
        return divergence.since_step if divergence.departure is None else divergence.departure.step
    past = find_past_divergence(history)
    return None if past is None else past.step


@remember_last
def find_past_divergence(history: History) -> PastDivergence | None:
    """Return how the loss had diverged, if it is not back at its best; None if it is, or if it never left."""
    kinds = [event.kind for event in history.events]
    turn = max((index for index, kind in enumerate(kinds) if kind in ("diverged", "restore")), default=None)
    if turn is None or kinds[turn] != "diverged" or find_divergence(history) is not None:
        return None
    early, last = _read_early_steps(history), history.read_valid_totals(history.num_steps - FINAL_LOSS_STEPS)
    if early is None:
        return None
    best = min(early.start, _get_best_block(history, early.block), key=lambda level: level.loss)
    now = compute_mean_loss(select_known(last))
    if not (0 < _BACK_RATIO * best.loss < now or 0 < _ABOVE_START * early.start.loss < now):
        return None
    found_at, rows = history.events[turn].step, history.read_valid_rows()
    step = _find_departure_step(history, best, found_at) if best.step < found_at - 1 else found_at
    before = rows["lr"][rows["step"] < found_at]
    lr = float(before[-1]) if len(before) else _get_lr(history)
    return PastDivergence(step, best.loss, now, len(last), lr, "lr" in kinds[turn:])


@remember_while(lambda history: (min(history.num_steps, _EARLY_STEPS), len(history.returns)))
def _read_early_steps(history: History) -> _EarlySteps | None:
    """Return what the first steps say; None without a loss. They stay the same, so a long run reads them once."""
    early = select_known(history.read_valid_totals(0, _EARLY_STEPS))
    if not len(early):
        return None
    block = max(FINAL_LOSS_STEPS, math.ceil(_MIN_BLOCK_SAMPLES / max(1, int(early["samples"][0]))))
    return _EarlySteps(_measure_start(early), float(early["loss"].min()), block)


def _measure_start(early: np.ndarray) -> _Level:
    first = early[: int(np.searchsorted(np.cumsum(early["samples"]), START_SAMPLES)) + 1]
    return _Level(compute_mean_loss(first), int(first["step"].max()), len(first))


def _describe_nonfinite(history: History) -> Divergence:
    totals = select_known(history.read_valid_totals())  # once in a run, so its length doesn't matter
    finite = np.flatnonzero(np.isfinite(totals["loss"]))
    index = int(finite[-1]) + 1 if len(finite) else 0
    first = totals[index]
    loss, step = formatting.format_loss(float(totals["loss"][-1])), int(first["step"])
    text = f"the loss is {loss} since step {step:,}"
    short, arithmetic = f"loss is {loss} since step {step:,}", [f"loss of step {step:,}: {loss}"]
    is_alone = _is_nan_alone(totals, index)
    if is_alone:
        norm = formatting.format_loss(float(first["grad_norm"]))
        arithmetic.append(f"norm of the gradients of step {step:,}: {norm}")
    lr = _get_lr(history)
    return Divergence(text, short, lr, step, tuple(arithmetic), is_finite=False, has_finite_gradients=is_alone)


def _is_nan_alone(totals: np.ndarray, first: int) -> bool:
    """Return whether the losses are NaN from row `first` on, with finite gradients, and did not grow before."""
    before, since = totals["loss"][:first], totals[first:]
    if not np.isnan(since["loss"]).all() or not np.isfinite(since["grad_norm"]).all():
        return False
    finite = np.abs(before[np.isfinite(before)])
    return not len(finite) or bool(finite[-1] <= MIN_RATIO * finite[0])


def _describe_growth(best: _Level, present: np.ndarray, lr: float, departure: Departure) -> Divergence:
    """Return the growth to the median of `present`, with its step: a log is read when the loss has grown further."""
    loss = float(np.median(present["loss"]))
    ratio = loss / best.loss
    times = f"{ratio:,.0f}" if ratio < 1e5 else formatting.format_loss(ratio)
    before, now = formatting.format_loss(best.loss), formatting.format_loss(loss)
    short = f"loss grew {times} times since step {departure.step:,}"
    median = f"median of the last {formatting.format_count(len(present), 'step')}"
    return Divergence(
        f"the {short}, from {before} to {now} at step {int(present['step'][-1]):,} ({median})",
        short,
        lr,
        best.step,
        (
            f"best so far, {formatting.format_count(best.num_steps, 'step')} up to step {best.step:,}: {before}",
            f"{median}, to step {int(present['step'][-1]):,}: {now}",
            f"{now} / {before} = {times}: the training lost what it had gained",
        ),
        departure=departure,
    )


def _get_lr(history: History) -> float:
    return float(history.rows(len(history) - 1)["lr"][-1])


class _BestBlock:
    """The best block of a history so far. Each look reads the new steps alone, since a run may have many."""

    def __init__(self) -> None:
        self.level = _Level(math.inf, -1, 0)
        self._num_read = self._num_returns = 0

    def update(self, history: History, block: int) -> None:
        """Read the blocks that are complete, each from the step after the last one."""
        num_returns = len(history.returns)
        if num_returns != self._num_returns:  # the best block may have been undone
            self._num_read, self._num_returns, self.level = 0, num_returns, _Level(math.inf, -1, 0)
        num_blocks = (history.num_steps - self._num_read) // block
        totals = history.read_valid_totals(self._num_read, self._num_read + num_blocks * block)
        self._num_read += len(totals)
        if not num_blocks:
            return
        blocks = totals.reshape(num_blocks, block)
        weight = blocks["weight"]
        with np.errstate(invalid="ignore"):  # blocks without a loss have NaN, which is never the least
            means = np.where(weight != 0, blocks["loss"] * weight, 0).sum(axis=1) / weight.sum(axis=1)
        means[np.isnan(means)] = np.inf
        least = int(np.argmin(means))
        if means[least] < self.level.loss:
            self.level = _Level(float(means[least]), int(blocks["step"][least, -1]), block)


def _get_best_block(history: History, block: int) -> _Level:
    with _lock:
        best = _best_blocks.setdefault(history, _BestBlock())
        best.update(history, block)
        return best.level


# locks: while a view or the run reads new steps
_lock = threading.Lock()
_best_blocks: weakref.WeakKeyDictionary[History, _BestBlock] = weakref.WeakKeyDictionary()
_departures: weakref.WeakKeyDictionary[History, tuple[tuple[int, int], Departure]] = weakref.WeakKeyDictionary()
