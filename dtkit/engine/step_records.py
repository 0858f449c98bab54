"""Records of the steps of a dispatch, and the rows that they become when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dtkit.history.comm_time import MESSAGE_PHASES
from dtkit.history.history import ROW_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.engine.observe.phase_timer import PhaseEvents
    from dtkit.strategies.base import StepResult

_COMM_PHASES = ("sync", *MESSAGE_PHASES)
_OWN_COLUMNS = ("data", "forward", "update", "step")


class CompletedStep(NamedTuple):
    """Record of a step. Losses are still on the device, and clocks unread."""

    step: int
    samples: int
    lr: float
    step_result: StepResult
    events: PhaseEvents
    sent_bytes: int


def build_rows(
    completed_steps: Sequence[CompletedStep],
    durations: Mapping[str, np.ndarray],
    rank: int,
    get_epoch: Callable[[int], int],
    memory: int,
) -> np.ndarray:
    """Return one row for each step, column by column. `durations` are the steps' seconds by phase.

    The waiting part of `comm_s` is computed later, from the times of all ranks.
    """
    rows = np.zeros(len(completed_steps), ROW_DTYPE)
    results = [done.step_result for done in completed_steps]
    rows["step"] = [done.step for done in completed_steps]
    rows["epoch"] = [get_epoch(done.step) for done in completed_steps]
    rows["samples"] = [done.samples for done in completed_steps]
    rows["lr"] = [done.lr for done in completed_steps]
    rows["sent_bytes"] = [done.sent_bytes for done in completed_steps]
    rows["weight"] = _read_numbers([result.loss_weight for result in results])
    rows["loss"] = _read_numbers([np.nan if result.loss is None else result.loss for result in results])
    rows["grad_norm"] = [result.grad_norm for result in results]
    rows["rank"], rows["memory_bytes"] = rank, memory
    for phase in _OWN_COLUMNS:
        rows[f"{phase}_s"] = durations.get(phase, 0.0)
    rows["backward_s"] = sum(seconds for phase, seconds in durations.items() if phase.startswith("backward"))
    rows["comm_s"] = sum(durations.get(phase, 0.0) for phase in _COMM_PHASES)
    return rows


def _read_numbers(values: Sequence[Any]) -> list[float]:
    """Return the numbers of tensors of one element, with one copy for all that are on a GPU."""
    on_gpu = [value.detach().double() for value in values if isinstance(value, torch.Tensor) and value.is_cuda]
    copied = iter(torch.stack(on_gpu).tolist() if on_gpu else ())
    return [next(copied) if isinstance(value, torch.Tensor) and value.is_cuda else float(value) for value in values]
