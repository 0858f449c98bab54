"""Messages with the user's own numbers and the machines' load: short curves, sent whole when they grow.

Each message has the names that grew, up to a size; the rest follows with the next one. Reading takes a hundredth of a
core at most. Time in which other processes have the core doesn't count, or charts would stand still on a busy machine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dtkit.dashboard.live.messages import Message
from dtkit.dashboard.summary.curves import MAX_NODE_LINES
from dtkit.dashboard.summary.series_names import is_system_name, split_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_NAMES = 12
"""Names that a page shows."""
MAX_POINTS = 96
MAX_BYTES = 8000
"""Size of a message beyond its first curve."""
_MAX_SHARE = 0.01


class LoggedNumbers(Protocol):
    """The part of a history that has numbers by name, rank and step."""

    @property
    def scalar_names(self) -> Sequence[str]:
        """Names of the user's own numbers."""
        ...

    @property
    def system_names(self) -> Sequence[str]:
        """Names of the machines' numbers."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks that have numbers."""
        ...

    def count_scalar_records(self, name: str) -> int:
        """Return how often numbers of this name were added."""
        ...

    def scalar(self, name: str, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of one rank, or the mean over all ranks."""
        ...

    def find_lost_steps(self, rank: int | None = None, /) -> Sequence[tuple[int, int]]:
        """Return (first, last) of each range of steps that lacks the rows of one rank, or of all ranks."""
        ...


class SeriesFeed:
    """Messages about the numbers of one history. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        history: LoggedNumbers,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._history, self._clock, self._cpu_clock = history, clock, cpu_clock
        self._sent_counts: dict[str, int] = {}
        self._next_at = float("-inf")

    @property
    def is_outdated(self) -> bool:
        """Whether a page lacks numbers."""
        return bool(self._list_grown())

    def reset(self) -> None:
        """Send all numbers again, for a page that was opened now."""
        self._sent_counts.clear()
        self._next_at = float("-inf")

    def build_message(self, *, is_last: bool = False) -> Message | None:
        """Return the curves that grew; None if there are none, or if reading took much just now, before the last."""
        if self._clock() < self._next_at and not is_last:
            return None
        began = self._cpu_clock()
        entries: list[dict[str, Any]] = []
        parts: list[np.ndarray] = []
        ranks = self._history.ranks
        shown_ranks = ranks if 1 < len(ranks) <= MAX_NODE_LINES else []
        lost_steps = [self._history.find_lost_steps(rank) for rank in [*shown_ranks, None]]
        for name in self._list_grown():
            if sum(part.nbytes for part in parts) > MAX_BYTES:
                break
            was_sent = name in self._sent_counts
            self._sent_counts[name] = self._history.count_scalar_records(name)
            points, merged, last = self._read_points(name, shown_ranks, lost_steps)
            if len(points) or was_sent:  # all that a page has may have been undone
                place = {"points": len(points), "lines": points.shape[1] - 1, "first": sum(part.size for part in parts)}
                entries.append(_describe(name) | place | {"merged": merged, "last": last})
                parts.append(points)
        self._next_at = self._clock() + (self._cpu_clock() - began) / _MAX_SHARE
        if not parts:
            return None
        values = np.concatenate([part.reshape(-1) for part in parts])
        return Message({"kind": "series", "series": entries}, [values.astype("<f4").tobytes()])

    def _list_grown(self) -> list[str]:
        history = self._history
        names = [*history.scalar_names[: MAX_NAMES // 2], *history.system_names[: MAX_NAMES // 2]]
        grown = [name for name in names if history.count_scalar_records(name) != self._sent_counts.get(name)]
        return sorted(grown, key=lambda name: self._sent_counts.get(name, 0))

    def _read_points(
        self, name: str, ranks: Sequence[int], lost_steps: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[np.ndarray, tuple[int, int, int], float | None]:
        """Return rows of a step and its values, of each of a few ranks and over all; (width, first, last step); and the
        last value over all, None without one.

        A row has the means of `width` steps, counted from the first one; its step is in their middle.

        NaN where a value is unknown, and infinity where a line must end: its numbers were lost, by `lost_steps`.
        """
        history = self._history
        steps, overall = history.scalar(name)
        if not len(steps):
            return np.empty((0, 2), "f4"), (1, 0, 0), None
        lines = [_cut_to(history.scalar(name, rank), steps) for rank in ranks]  # rows may arrive between two reads
        width = -(-(int(steps[-1]) - int(steps[0]) + 1) // MAX_POINTS)
        buckets = (steps - steps[0]) // width
        table = np.full((int(buckets[-1]) + 1, 2 + len(lines)), np.nan)
        table[:, 0] = np.minimum(steps[0] + width * np.arange(len(table)) + (width - 1) / 2, steps[-1])
        for column, (line_steps, values) in enumerate([*lines, (steps, overall)], 1):
            table[:, column] = _compute_means((line_steps - steps[0]) // width, values, len(table))
        points = np.asarray(_break_lines(table[np.isfinite(table[:, -1])], lost_steps, width), "f4")
        known = overall[np.isfinite(overall)]
        return points, (width, int(steps[0]), int(steps[-1])), float(known[-1]) if len(known) else None


def _cut_to(line: tuple[np.ndarray, np.ndarray], steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (steps, values) of a line within the range of some sorted steps."""
    own, values = line
    is_inside = (steps[0] <= own) & (own <= steps[-1])
    return own[is_inside], values[is_inside]


def _break_lines(points: np.ndarray, lost_steps: Sequence[Sequence[tuple[int, int]]], width: int) -> np.ndarray:
    """Return the points with infinity where steps were lost whose numbers would be at least one point."""
    for column, ranges in enumerate(lost_steps, 1):
        for first, last in ranges:
            steps = points[:, 0]
            if last - first + 1 < width or not len(steps) or not steps[0] < first <= last < steps[-1]:
                continue
            is_inside = (first <= steps) & (steps <= last)
            if not is_inside.any():
                at = int(np.searchsorted(steps, first))
                points = np.insert(points, at, np.nan, axis=0)
                points[at, 0] = (first + last) / 2
                is_inside = np.arange(len(points)) == at
            points[is_inside & np.isnan(points[:, column]), column] = np.inf
    return points


def _compute_means(buckets: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    known = np.isfinite(values)
    sums = np.bincount(buckets[known], values[known], count)
    counts = np.bincount(buckets[known], minlength=count)
    means: np.ndarray = np.divide(sums, counts, out=np.full(count, np.nan), where=counts > 0)
    return means


def _describe(name: str) -> dict[str, Any]:
    """Return what a page shows of a name."""
    title, unit = split_unit(name)
    return {"name": name, "title": title, "unit": unit, "system": is_system_name(name)}
