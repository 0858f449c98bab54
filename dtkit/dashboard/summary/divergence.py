"""Divergence of a training: a loss that is not finite any more, or far above its start.

The start is the loss of the first samples, before updates could change it much. Single steps are noise, so the present
is the median of the last steps. A loss that is negative at times, such as that of a policy or a critic, has no scale,
and is judged only by being finite.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.comparison import FINAL_LOSS_STEPS, compute_mean_loss

if TYPE_CHECKING:
    from dtkit.history.history import History

MIN_RATIO = 10
"""Ratio of the present loss to the start from which a training has diverged."""
START_SAMPLES = 32
"""Samples of the start: whole first steps with at least as many."""
MIN_STEPS = 5
"""Steps after the start that a judgment needs."""
_EARLY_STEPS = 256  # among which a loss that can be negative is so


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A diverged loss in words, the learning rate of the last step, and the numbers behind it."""

    text: str
    lr: float
    arithmetic: tuple[str, ...]


def find_divergence(history: History) -> Divergence | None:
    """Return how the loss diverged; None if it did not, or if there are too few steps to judge."""
    last = _select_known(history.totals(history.num_steps - FINAL_LOSS_STEPS))
    if not len(last):
        return None
    lr = float(history.rows(len(history) - 1)["lr"][-1])
    loss = float(last["loss"][-1])
    if not math.isfinite(loss):
        step = int(last["step"][-1])
        return Divergence(f"the loss is {formatting.format_loss(loss)}", lr, (f"loss of step {step:,}: {loss}",))
    early = _select_known(history.totals(0, _EARLY_STEPS))
    first = early[: int(np.searchsorted(np.cumsum(early["samples"]), START_SAMPLES)) + 1]
    last = last[last["step"] > first["step"].max()]
    if len(last) < MIN_STEPS or not np.isfinite(last["loss"]).all() or min(early["loss"].min(), last["loss"].min()) < 0:
        return None
    start, present = compute_mean_loss(first), float(np.median(last["loss"]))
    if not 0 < MIN_RATIO * start < present:
        return None
    return _describe(start, present, lr, len(first), len(last))


def _describe(start: float, present: float, lr: float, num_first: int, num_last: int) -> Divergence:
    shown, ratio = formatting.format_loss(present), formatting.format_loss(present / start)
    noun = "that of the first step" if num_first == 1 else f"the mean of the first {num_first} steps"
    return Divergence(
        f"the loss is {shown}, {ratio} times {noun}",
        lr,
        (
            f"loss of the first {formatting.format_count(num_first, 'step')}: {formatting.format_loss(start)}",
            f"median of the last {num_last} steps: {shown}",
            f"{shown} / {formatting.format_loss(start)} = {ratio}, more than {MIN_RATIO}: the training diverged",
        ),
    )


def _select_known(totals: np.ndarray) -> np.ndarray:
    """Return the steps that have a loss."""
    return np.asarray(totals[totals["weight"] != 0])
