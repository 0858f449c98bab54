"""Totals of one run next to others: loss, bytes sent, throughput, and time."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from dtkit.history.history import History

FINAL_LOSS_STEPS = 20
"""Steps over which the final loss is averaged. The loss of a single step is mostly noise."""


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One run in the table. Bytes are those that one rank sent, as the mean over the ranks; times are in seconds."""

    label: str
    strategy: str
    nodes: int
    steps: int
    loss: float
    """Weighted mean over the last ``FINAL_LOSS_STEPS`` steps; NaN before the first step."""
    sent_bytes: float
    bytes_per_step: float
    samples_per_s: float
    seconds: float
    """Sum of the steps' times, without the time between dispatches."""


def make_row(label: str, history: History, strategy: str) -> ComparisonRow:
    """Return the totals of a history."""
    totals = history.totals()
    num_ranks = int(totals["ranks"].max(initial=0))
    seconds, sent_bytes = float(totals["step_s"].sum()), float(totals["sent_bytes"].sum()) / max(1, num_ranks)
    return ComparisonRow(
        label=label,
        strategy=strategy,
        nodes=num_ranks,
        steps=len(totals),
        loss=_compute_final_loss(totals[-FINAL_LOSS_STEPS:]),
        sent_bytes=sent_bytes,
        bytes_per_step=sent_bytes / len(totals) if len(totals) else math.nan,
        samples_per_s=float(totals["samples"].sum()) / seconds if seconds > 0 else math.nan,
        seconds=seconds,
    )


def _compute_final_loss(totals: np.ndarray) -> float:
    weight = float(totals["weight"].sum())
    return float((totals["loss"] * totals["weight"]).sum() / weight) if weight else math.nan
