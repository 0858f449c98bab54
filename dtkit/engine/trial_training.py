"""A few real training steps of a copy of the model, which are timed and measured."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit._util import timeouts
from dtkit.engine import dry_run
from dtkit.engine.data.sources import to_device
from dtkit.engine.observe.clock import make_clock, take_fast_quartile, time_repeatedly
from dtkit.strategies.base import make_optimizer
from dtkit.strategies.meta_copy import count_bytes
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.data.sources import RowSource
    from dtkit.planning.cost_model import ActivationPeak
    from dtkit.strategies.loss import Loss

MIN_ROWS = 2  # batch normalization can't take one
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1024**2, 25 * 1024**2
"""Sizes of DDP's buckets."""
_NUM_WARMUP_STEPS = 4


class TrialTraining:
    """A training of a copy of the model, for measurements only.

    As with DDP, a hook moves each gradient into a flat bucket, since this shapes the heap. DDP forms its buckets again
    after the first step, and so does this class.
    """

    def __init__(
        self,
        device: torch.device,
        model: torch.nn.Module,
        loss_fn: Loss,
        factory: Callable[..., Any],
        source: RowSource,
        precision: str | None,
    ) -> None:
        self._device, self._loss_fn, self._source = device, loss_fn, source
        self._model = enter_training(copy.deepcopy(model).to(device))
        self._optimizer = make_optimizer(factory, self._model)
        self._make_autocast = functools.partial(make_autocast, device, precision)
        self._dense_parameters = dry_run.find_dense_gradient_parameters(self._model)
        self._bucket_views = _make_bucket_views(self._dense_parameters)
        self._hooks = [dry_run.add_gradient_hook(p, self._move_to_bucket) for p in self._dense_parameters]

    def _move_to_bucket(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = self._bucket_views[parameter].copy_(parameter.grad)

    def close(self) -> None:
        """Remove the hooks. Their references to the model are invisible to Python's garbage collector."""
        for hook in self._hooks:
            hook.remove()

    def find_affordable_rows(self, rows: int) -> int:
        """Return the largest number up to `rows` with which a step stays within the time limit."""
        count, seconds = MIN_ROWS, sum(self._time_step(MIN_ROWS))
        while count < rows:
            next_count = min(rows, 4 * count)
            upper_bound_s = seconds * next_count / count  # a part of a step doesn't grow with the rows
            if upper_bound_s > timeouts.MAX_MEASURED_STEP_S:
                return count
            count, seconds = next_count, sum(self._time_step(next_count))
        return count

    def run_warmup_steps(self, rows: int) -> None:
        """Run a few whole steps, until the process has stopped growing."""
        for k in range(_NUM_WARMUP_STEPS):
            if k == 1:
                self._optimizer.zero_grad()
                self._bucket_views = _make_bucket_views(self._dense_parameters)
            self._time_step(rows)
            self._optimizer.step()

    def measure_step_seconds(self, rows: int) -> tuple[float, float]:
        """Return the seconds of (forward, backward): fast quartiles of as many steps as the time limit allows."""
        self._time_step(rows)
        steps: list[tuple[float, float]] = []
        while len(steps) < 2 or sum(map(sum, steps)) < timeouts.STEPS_BUDGET_S:
            steps.append(self._time_step(rows))
        forward, backward = zip(*steps, strict=True)
        return take_fast_quartile(forward), take_fast_quartile(backward)

    def measure_update_seconds(self) -> float:
        """Return the seconds of an update with the gradients of the last step."""
        return take_fast_quartile(time_repeatedly(self._device, self._optimizer.step, timeouts.UPDATES_BUDGET_S))

    def count_optimizer_bytes(self) -> int:
        """Return the bytes of the optimizer's state, after an update."""
        return dry_run.count_optimizer_bytes(self._optimizer)

    def measure_activation_peak(self, rows: int) -> ActivationPeak:
        """Return the memory that a step on these rows allocates temporarily."""
        self._optimizer.zero_grad()
        self.close()
        batch = take_batch(self._source, rows, self._device)
        return dry_run.measure_peak(self._model, self._loss_fn, batch, rows, self._make_autocast)

    def _time_step(self, rows: int) -> tuple[float, float]:
        batch = take_batch(self._source, rows, self._device)
        self._optimizer.zero_grad()
        clock = make_clock(self._device)
        marks = [clock.record_mark()]
        with self._make_autocast():
            loss, _ = self._loss_fn(self._model, batch)
        marks.append(clock.record_mark())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(clock.record_mark())
        clock.synchronize()
        return clock.compute_elapsed(marks[0], marks[1]), clock.compute_elapsed(marks[1], marks[2])


def _make_bucket_views(parameters: Sequence[torch.nn.Parameter]) -> dict[torch.Tensor, torch.Tensor]:
    """Return a view into a flat bucket for each gradient, from the last parameter to the first."""
    buckets: list[list[torch.nn.Parameter]] = []
    for p in reversed(parameters):
        max_bytes = FIRST_BUCKET_BYTES if len(buckets) == 1 else BUCKET_BYTES
        if not buckets or count_bytes(buckets[-1]) >= max_bytes or buckets[-1][0].dtype != p.dtype:
            buckets.append([])
        buckets[-1].append(p)
    views: dict[torch.Tensor, torch.Tensor] = {}
    for bucket in buckets:
        sizes = [p.numel() for p in bucket]
        flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
        views.update({p: part.view(p.shape) for p, part in zip(bucket, torch.split(flat, sizes), strict=True)})
    return views


def take_batch(source: RowSource, num_rows: int, device: torch.device) -> Any:
    """Return a batch of this size on the device; a source with fewer rows repeats them."""
    return to_device(source.take(np.arange(num_rows) % len(source)), device)


def make_autocast(device: torch.device, precision: str | None = None) -> contextlib.AbstractContextManager[Any]:
    """Return the context for mixed precision, such as "bf16"."""
    from dtkit.strategies.replicated import AUTOCAST_DTYPES

    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[precision])
