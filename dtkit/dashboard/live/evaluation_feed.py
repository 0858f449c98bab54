"""Evaluations for the page of a run. It forgets those of undone steps, after the run went back to a snapshot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.dashboard.live.log_lines import MAX_LOG_LINES
from dtkit.history.undone_steps import count_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dtkit.history.history import History
    from dtkit.types import Evaluation

MAX_SNAPSHOT_EVALUATIONS = 500
"""Evaluations of a snapshot; of more, an even choice."""


class EvaluationFeed:
    """Evaluations of one history, as parts of messages. Not thread-safe: one caller at a time."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._sent: list[Evaluation] = []

    def build_all(self) -> list[dict[str, Any]]:
        """Return the evaluations for a snapshot."""
        self._sent = list(self._history.evaluations)
        return _describe(self._sent[k] for k in choose_evenly(range(len(self._sent)), MAX_SNAPSHOT_EVALUATIONS))

    def build_changes(self) -> dict[str, Any]:
        """Return the part of a change: ``undone_after``, beyond which a page drops what it has, and new evaluations."""
        evaluations = list(self._history.evaluations)
        first, num_sent = count_unchanged(self._sent, evaluations), len(self._sent)
        self._sent = evaluations[: first + MAX_LOG_LINES]
        new = self._sent[first:]
        content: dict[str, Any] = {"evaluations": _describe(new)} if new else {}
        if first < num_sent:
            content["undone_after"] = self._sent[first - 1].step if first else -1
        return content

    def build_newest(self) -> list[dict[str, Any]]:
        """Return the evaluations that a page lacks, without noting that it has them; none while some were undone."""
        evaluations = list(self._history.evaluations)
        first = count_unchanged(self._sent, evaluations)
        return [] if first < len(self._sent) else _describe(evaluations[first:][-MAX_LOG_LINES:])


def choose_evenly(indices: Sequence[int], most: int) -> Sequence[int]:
    """Return at most `most` indices, evenly apart, the last one included."""
    if len(indices) <= most:
        return indices
    return [indices[round(k * (len(indices) - 1) / (most - 1))] for k in range(most)]


def replace_nonfinite(value: float | None) -> float | None:
    """Return None for a value that JSON can't hold."""
    return value if value is not None and math.isfinite(value) else None


def _describe(evaluations: Iterable[Evaluation]) -> list[dict[str, Any]]:
    return [
        {
            "step": e.step,
            "values": {formatting.sanitize_text(k, 40): replace_nonfinite(v) for k, v in e.values.items()},
        }
        for e in evaluations
    ]
