"""Records of the steps of a dispatch, and the rows that they become when it ends."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dtkit.engine.observe.phase_timer import compute_durations
from dtkit.history.comm_time import MESSAGE_PHASES
from dtkit.history.history import ROW_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.observe.clock import Clock
    from dtkit.engine.observe.phase_timer import PhaseEvents
    from dtkit.strategies.base import StepResult


@dataclasses.dataclass(frozen=True)
class CompletedStep:
    """Record of a step. Losses are still on the device, and clocks unread."""

    step: int
    samples: int
    lr: float
    step_result: StepResult
    events: PhaseEvents
    sent_bytes: int


def build_rows(
    completed_steps: Sequence[CompletedStep], rank: int, get_epoch: Callable[[int], int], clock: Clock, memory: int
) -> np.ndarray:
    """Return one row for each step. Which part of `comm_s` was waiting follows from the times of all ranks."""
    rows = np.zeros(len(completed_steps), ROW_DTYPE)
    for row, completed in zip(rows, completed_steps, strict=True):
        seconds, result = compute_durations(completed.events, clock), completed.step_result
        row["step"], row["epoch"], row["rank"] = completed.step, get_epoch(completed.step), rank
        row["samples"], row["weight"], row["lr"] = completed.samples, float(result.loss_weight), completed.lr
        row["loss"] = np.nan if result.loss is None else float(result.loss)
        for phase in ("data", "forward", "update", "step"):
            row[f"{phase}_s"] = seconds.get(phase, 0.0)
        row["backward_s"] = sum(s for phase, s in seconds.items() if phase.startswith("backward"))
        row["comm_s"] = sum(seconds.get(phase, 0.0) for phase in ("sync", *MESSAGE_PHASES))
        row["memory_bytes"], row["sent_bytes"], row["grad_norm"] = memory, completed.sent_bytes, result.grad_norm
    return rows
