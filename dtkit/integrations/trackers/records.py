"""New records of a history, as points for a tracker.

====================== ======================================================================================
name                   number
====================== ======================================================================================
train/loss             mean over the samples of all ranks
train/samples_per_s    samples of all ranks over the time of the slowest
train/step_s           time of the slowest rank
train/grad_norm        norm of the gradient, where a rank knows it
train/learning_rate    of the first parameter group
node_0/loss, ...       mean over the samples of rank 0
node_0/samples_per_s   speed of rank 0; also ``step_s``, ``wait_s`` (for other ranks) and ``memory_mb``
validation/<name>      evaluations: the loss and metrics
logged/<name>          numbers from `dtkit.log`, means over all ranks
====================== ======================================================================================

A number that is NaN, such as the loss of a rank without samples, is left out.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from dtkit.history.undone_steps import count_unchanged
from dtkit.integrations.trackers.tracked import Point

if TYPE_CHECKING:
    from dtkit.history.history import History

_TOTAL_FIELDS = ("step", "loss", "samples", "step_s", "grad_norm")
_ROW_FIELDS = ("rank", "loss", "samples", "step_s", "wait_s", "memory_bytes", "lr")


@dataclasses.dataclass(frozen=True)
class Position:
    """How much of a history was read."""

    totals: int = 0
    rows: int = 0
    evaluations: int = 0

    @classmethod
    def at_end(cls, history: History) -> Position:
        """Return the position after the steps of a history. Evaluations after these are read again."""
        last = history.read_totals(history.num_totals - 1)
        step = int(last["step"][-1]) + 1 if len(last) else 0
        num_evaluations = sum(evaluation.step < step for evaluation in history.evaluations)
        return cls(history.num_totals, len(history), num_evaluations)


class RecordReader:
    """Reads each record of a history once."""

    def __init__(self, history: History, position: Position, *, per_node: bool) -> None:
        self.position = position
        self._history, self._per_node = history, per_node
        self._read_evaluations = history.evaluations[: position.evaluations]
        self._last_logged = dict.fromkeys(history.scalar_names, self.next_step - 1) if position.totals else {}

    @property
    def num_new_steps(self) -> int:
        """Number of steps to read."""
        return self._history.num_totals - self.position.totals

    @property
    def has_new(self) -> bool:
        """Whether there is anything to read."""
        evaluations = self._history.evaluations
        return self.num_new_steps > 0 or count_unchanged(self._read_evaluations, evaluations) < len(evaluations)

    @property
    def next_step(self) -> int:
        """The step after the last one that was read."""
        last = self._history.read_totals(self.position.totals - 1, self.position.totals)
        return int(last["step"][-1]) + 1 if len(last) else 0

    def read(self, max_steps: int, every: int | None = None) -> list[Point]:
        """Read all new records. Return points of at most `max_steps` steps, or of every `every`-th step."""
        history, position = self._history, self.position
        totals = history.read_totals(position.totals)
        rows = history.rows(position.rows, position.rows + int(totals["ranks"].sum()))
        evaluations = list(history.evaluations)
        new_evaluations = evaluations[count_unchanged(self._read_evaluations, evaluations) :]
        self._read_evaluations = evaluations
        chosen = _choose_steps(totals["step"], max_steps, every)
        values = _collect_totals(totals[chosen])
        starts = np.cumsum(totals["ranks"]) - totals["ranks"]
        for k in chosen:
            part = rows[starts[k] : starts[k] + totals["ranks"][k]]
            _add_rows(values.setdefault(int(totals["step"][k]), {}), part, per_node=self._per_node)
        self._add_logged(values, totals["step"], chosen)
        for evaluation in new_evaluations:
            named = {f"validation/{name}": float(value) for name, value in evaluation.values.items()}
            values.setdefault(evaluation.step, {}).update(named)
        self.position = Position(position.totals + len(totals), position.rows + len(rows), len(evaluations))
        return _make_points(values, totals)

    def _add_logged(self, values: dict[int, dict[str, float]], steps: np.ndarray, chosen: np.ndarray) -> None:
        """Add numbers from `dtkit.log`. They may arrive after the rows of their step, and not every step has them."""
        if not len(steps):
            return
        first, last = int(steps.min()), int(steps.max())
        for name in self._history.scalar_names:
            since = min(self._last_logged.get(name, -1) + 1, first)
            logged_steps, logged = self._history.scalar(name, since=since)
            known = logged_steps <= last
            if not known.any():
                continue
            self._last_logged[name] = int(logged_steps[known][-1])
            if len(chosen) < min(len(steps), known.sum()):  # steps are left out, so some numbers lack their step
                known &= np.isin(logged_steps, steps[chosen])
            for step, value in zip(logged_steps[known].tolist(), logged[known].tolist(), strict=True):
                values.setdefault(step, {})[f"logged/{name}"] = value


def _choose_steps(steps: np.ndarray, max_steps: int, every: int | None) -> np.ndarray:
    """Return indices of every `every`-th step, or of at most `max_steps`, evenly, with the last one."""
    if every is not None:
        return np.flatnonzero(steps % every == 0)
    stride = math.ceil(len(steps) / max(1, max_steps))
    return np.arange(len(steps))[::-1][:: max(1, stride)][::-1]


def _collect_totals(totals: np.ndarray) -> dict[int, dict[str, float]]:
    values: dict[int, dict[str, float]] = {}
    for step, loss, samples, step_s, grad_norm in totals[list(_TOTAL_FIELDS)].tolist():
        values[step] = {
            "train/loss": loss,
            "train/samples_per_s": samples / step_s if step_s else math.nan,
            "train/step_s": step_s,
            "train/grad_norm": grad_norm,
        }
    return values


def _add_rows(values: dict[str, float], rows: np.ndarray, *, per_node: bool) -> None:
    """Add the numbers of each rank in one step."""
    for rank, loss, samples, step_s, wait_s, memory_bytes, lr in rows[list(_ROW_FIELDS)].tolist():
        values.setdefault("train/learning_rate", lr)
        if per_node:
            node = f"node_{rank}"
            values[f"{node}/loss"] = loss
            values[f"{node}/samples_per_s"] = samples / step_s if step_s else math.nan
            values[f"{node}/step_s"] = step_s
            values[f"{node}/wait_s"] = wait_s
            values[f"{node}/memory_mb"] = memory_bytes / 1e6


def _make_points(values: dict[int, dict[str, float]], totals: np.ndarray) -> list[Point]:
    """Return points by step. The time of a step is now, minus the durations of later steps."""
    later_s = np.cumsum(totals["step_s"][::-1])[::-1] - totals["step_s"]
    ages = dict(zip(totals["step"].tolist(), later_s.tolist(), strict=True))
    now = time.time()
    points = []
    for step, numbers in sorted(values.items()):
        known = {name: value for name, value in numbers.items() if not math.isnan(value)}
        if known:
            points.append(Point(step, now - ages.get(step, 0.0), known))
    return points
