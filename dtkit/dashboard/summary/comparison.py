"""Totals of one run next to others: loss, bytes sent, throughput, and time."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit.dashboard.summary.curves import Chart, Curves
from dtkit.dashboard.summary.short_batches import compute_drawn_losses, join_short_batches
from dtkit.history.divergence import find_divergence_step
from dtkit.history.mean_loss import read_final_loss
from dtkit.history.metric_direction import is_better_lower
from dtkit.history.speed import compute_speed, split_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.dashboard.summary.curves import CurveBuckets
    from dtkit.history.history import History
    from dtkit.rpc.verification import Verification
    from dtkit.types import RunSpec

_SAME_BYTES_RATIO = 1.05
_FAR_ABOVE_START = 10.0  # a loss so many times the first one has diverged
_ROOM_ABOVE_START = 3.0
_MOST = 0.5  # share of a run's losses
NUM_LOSS_BUCKETS = 256
"""Parts in which the loss is drawn, live and in the saved picture."""
NUM_RATE_BUCKETS = 64
"""Parts in which throughput is drawn: single steps of a few milliseconds show the scheduler's noise."""
KEPT_STATE = "kept"
"""State of a history without its run."""
NOT_VERIFIED = "no"
BROKEN_STATES = frozenset({"failed", "diverged", "paused, error", "paused, not finite", "stopped, not finite"})
"""States of runs that an error ended. A stopped run is none of them: `EarlyStopping` ends a good one."""
LOSS, VALIDATION_DATA, TRAINING_DATA, DURATION = "loss function", "validation data", "training data", "epochs"
"""What runs should have in common where their numbers are compared."""
_FAR_ABOVE_OTHERS = 1000.0
"""Ratio to the other losses from which a run's first loss, or its peak, is beyond an axis."""
MEAN_LOSS = Chart("loss", None, lambda totals, _copies: compute_drawn_losses(totals))
"""The loss over all ranks as a comparison draws it."""


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One run in the table. Bytes are those that one rank sent, as the mean over the ranks; times are in seconds."""

    label: str
    strategy: str
    nodes: int
    steps: int
    """Steps that the run has taken, also those without a record."""
    loss: float
    """Weighted mean over the last ``FINAL_LOSS_STEPS`` steps; NaN before the first step."""
    sent_bytes: float
    bytes_per_step: float
    samples_per_s: float
    """Over all steps but the first, as the report has it."""
    steps_s: float
    """Seconds in all steps but the first, of which samples/s are."""
    seconds: float
    """How long the run took, without pauses; the sum of its steps where only these are known."""
    best: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Best validation of each metric, the loss included."""
    state: str = KEPT_STATE
    """The word for the run's state, as in its own views."""
    failure: str = ""
    """How the run ended badly: "failed", "diverged" or "learned nothing"; empty if it did not."""
    cause: str = ""
    """Why it did so, in one line."""
    verified: str = NOT_VERIFIED
    """The result of the last ``run.verify()``, with the difference to one process."""

    basis: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the numbers depend on, by its name, such as :data:`LOSS`; empty for a history."""
    directions: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Whether higher is better, for metrics that state it."""
    number: int = 1
    """Number of the run in the order of the call, from 1. Its color belongs to it, too."""

    @property
    def competes(self) -> bool:
        """Return whether the run may be the best: no error ended it."""
        return self.state not in BROKEN_STATES and not self.failure


def make_row(
    label: str,
    history: History,
    strategy: str,
    position: tuple[int, float] | None = None,
    state: str = KEPT_STATE,
    end: tuple[str, str] = ("", ""),
    verification: Verification | None = None,
    spec: RunSpec | None = None,
    number: int = 1,
) -> ComparisonRow:
    """Return the totals of a history. `position` has the steps and seconds of its run, unless the history has them."""
    totals, (failure, cause) = history.totals(), end
    steps, seconds = history.position if position is None else position
    num_ranks = int(totals["ranks"].max(initial=0))
    sent_bytes = float(totals["sent_bytes"].sum()) / max(1, num_ranks)
    return ComparisonRow(
        label=label,
        strategy=strategy,
        nodes=num_ranks,
        steps=steps,
        loss=read_final_loss(history),
        sent_bytes=sent_bytes,
        bytes_per_step=sent_bytes / len(totals) if len(totals) else math.nan,
        samples_per_s=compute_speed(history).samples_per_s,
        steps_s=split_time(history, seconds).steps_s,
        seconds=seconds,
        state=state,
        failure=failure,
        cause=cause,
        verified=_describe_verification(verification),
        basis={} if spec is None else _read_basis(spec),
        directions=dict(history.directions),
        number=number,
        best={name: best[1] for name in _list_names(history) if (best := find_best_evaluation(history, name))},
    )


def _read_basis(spec: RunSpec) -> dict[str, str]:
    return {
        LOSS: f"{spec.loss} {dict(spec.sources).get('loss', '')}",
        VALIDATION_DATA: dict(spec.settings).get("validation", ""),
        TRAINING_DATA: f"{spec.samples:,} rows",
        DURATION: f"{spec.epochs:.2f}",
    }


def differ_in(rows: Sequence[ComparisonRow], name: str) -> bool:
    """Return whether two runs are known to differ in a part of their `basis`."""
    return len({row.basis[name] for row in rows if name in row.basis}) > 1


def _describe_verification(verification: Verification | None) -> str:
    """Return the result with the difference to one process, such as ``PASS, 1.1e-16``."""
    if verification is None:
        return NOT_VERIFIED
    difference = verification.compared_difference
    return f"{verification.verdict}, {difference:.2g}" if math.isfinite(difference) else verification.verdict


def _list_names(history: History) -> list[str]:
    return list(dict.fromkeys(name for evaluation in history.evaluations for name in evaluation.values))


def differ_in_bytes(rows: Sequence[ComparisonRow]) -> bool:
    """Return whether the runs sent different numbers of bytes in a step, by more than a twentieth."""
    known = [row.bytes_per_step for row in rows if math.isfinite(row.bytes_per_step)]
    return bool(known) and max(known) > _SAME_BYTES_RATIO * min(known)


def find_loss_cap(lines: Sequence[np.ndarray]) -> float | None:
    """Return the largest loss that axes of these runs should show; None if they should show all.

    Each line has the losses of a run in their order. Without a cap, a run that diverges makes a flat line of each run
    that learns. Losses begin high: what is far above the beginnings is beyond an axis. The peak of a run that came back
    from it is shown.
    """
    finite = [line[np.isfinite(line)] for line in lines]
    starts = [float(line[0]) for line in finite if len(line) and line[0] > 0]
    if not starts:
        return None
    start = max(each for each in starts if each <= _FAR_ABOVE_OTHERS * min(starts))  # a run may begin with a huge loss
    largest = max(float(line.max()) for line in finite if len(line))
    if largest <= _FAR_ABOVE_START * start:
        return None
    recovered = [line for line in lines if len(line) and line[-1] <= _FAR_ABOVE_START * start]  # NaN is not
    peaks = [float(line.max(initial=0, where=np.isfinite(line))) for line in recovered]
    cap = max([_ROOM_ABOVE_START * start, *(peak for peak in peaks if peak <= _FAR_ABOVE_OTHERS * start)])
    return cap if cap < largest else None


def find_exits(histories: Sequence[History]) -> list[int | None]:
    """Return the step at which the line of each run leaves the axes of losses for good; None for one that stays.

    There its loss is above the cap, and most of its later losses are above its first. So a run that diverged has no
    zigzag along the edge of a chart, and one that came back from a peak is drawn to its end.
    """
    totals = [history.totals() for history in histories]
    losses = [compute_drawn_losses(part) for part in totals]
    cap = find_loss_cap(losses)
    places = [None if cap is None else _find_exit(line, cap) for line in losses]
    return [None if place is None else int(part["step"][place]) for place, part in zip(places, totals, strict=True)]


def _find_exit(losses: np.ndarray, cap: float) -> int | None:
    if not len(losses):
        return None
    is_high = ~(losses <= losses[0])  # NaN is
    shares = np.cumsum(is_high[::-1])[::-1] / np.arange(len(losses), 0, -1)
    exits = np.flatnonzero((losses > cap) & (shares > _MOST))
    return int(exits[0]) if len(exits) else None


def end_line(steps: np.ndarray, values: np.ndarray, last_step: int | None) -> np.ndarray:
    """Return the values of a line that ends with its first one at or after `last_step`: NaN from there on."""
    if last_step is None:
        return values
    reached = np.flatnonzero(np.isfinite(values) & (steps >= last_step))
    if not len(reached):
        return values
    return np.where(np.arange(len(values)) <= reached[0], values, np.nan)


def describe_exits(histories: Sequence[History], exits: Sequence[int | None]) -> list[str]:
    """Return the words at the end of each line that left a chart; nothing for one that did not.

    The step of a divergence is the one that the run's own views name. It may differ a little from the chart's edge.
    """
    return [_describe_exit(*pair) for pair in zip(histories, exits, strict=True)]


def _describe_exit(history: History, step: int | None) -> str:
    if step is None:
        return ""
    diverged_at = find_divergence_step(history)
    return f"diverged at step {step if diverged_at is None else diverged_at:,}"


def downsample_losses(histories: Sequence[History]) -> list[CurveBuckets]:
    """Return the mean loss of each run in buckets of one width, as a live comparison has them.

    A short run with buckets of its own would have more detail than there is room for.
    """
    all_curves = [Curves((MEAN_LOSS,), 1, NUM_LOSS_BUCKETS) for _ in histories]
    for curves, history in zip(all_curves, histories, strict=True):
        curves.update(history)
    width = max(curves.width for curves in all_curves)
    for curves in all_curves:
        curves.widen(width)
    return [curves.get_all() for curves in all_curves]


def list_shared_scalars(histories: Sequence[History]) -> list[str]:
    """Return the names of the numbers from `dtkit.log` that at least two runs have."""
    counts = collections.Counter(name for history in histories for name in history.scalar_names)
    return [name for name, count in counts.items() if count > 1]


def read_scalar(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, means over all ranks) of a number from `dtkit.log`; empty arrays for a run that has none."""
    return history.scalar(name) if name in history.scalar_names else (np.empty(0, "i8"), np.empty(0))


def read_rates(totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, samples per second of all ranks) in at most `NUM_RATE_BUCKETS` parts of a run."""
    parts = join_short_batches(totals)
    length = len(parts[0])
    if not length:
        return np.empty(0), np.empty(0)
    width = -(-length // NUM_RATE_BUCKETS)
    first = np.arange(0, length, width)
    steps, samples, seconds = (np.add.reduceat(part.astype("f8"), first) for part in parts)
    count = np.diff(np.append(first, length))
    with np.errstate(divide="ignore", invalid="ignore"):
        return steps / count, samples / seconds


def join_directions(runs: Sequence[History | ComparisonRow]) -> dict[str, bool]:
    """Return whether higher is better, by the metrics of any run that state it."""
    return {name: is_higher for run in runs for name, is_higher in run.directions.items()}


def find_metric_cap(histories: Sequence[History], name: str) -> float | None:
    """Return the largest value of a validation metric that an axis should show; None if it should show all."""
    if not is_better_lower(name, join_directions(histories)):
        return None
    lines = [
        np.array([e.values[name] for e in history.evaluations if e.values.get(name) is not None], float)
        for history in histories
    ]
    if name == "loss":  # a run may have diverged before its first validation
        starts = [compute_drawn_losses(history.read_valid_totals(0, 1)) for history in histories]
        lines = [np.concatenate(pair) if len(pair[1]) else pair[1] for pair in zip(starts, lines, strict=True)]
    return find_loss_cap(lines)


def find_best_evaluation(history: History, name: str) -> tuple[int, float] | None:
    """Return (step, value) of the best validation of a metric; None without one."""
    points = [(e.step, float(e.values[name])) for e in history.evaluations if e.values.get(name) is not None]
    points = [point for point in points if math.isfinite(point[1])]
    if not points:
        return None
    return (min if is_better_lower(name, history.directions) else max)(points, key=lambda point: point[1])
