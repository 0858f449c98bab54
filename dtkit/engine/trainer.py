"""A job: a model in training on this engine, advanced k steps at a time.

Between two dispatches everything stays here: model, optimiser, where the data stands, random state. A dispatch
returns one row a step. Losses stay on the device, and clocks are read, only when the dispatch ends.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit.engine import probe
from dtkit.engine.checks import explain
from dtkit.engine.sources import to_device
from dtkit.history import ROW
from dtkit.records import Advance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dtkit.engine.comm import Group
    from dtkit.engine.data import Stream
    from dtkit.strategies.base import Outcome, Setting, Strategy, Worker
    from dtkit.strategies.objective import Objective

SLOW_S = 2.0  # a dispatch that has lasted so long ends at the next agreed step


class Job:
    """One model in training: this rank's part."""

    def __init__(
        self,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: Callable[..., Any],
        strategy: Strategy,
        stream: Stream,
        setting: Setting,
        seed: int,
    ) -> None:
        """`model` has the same parameters on every rank; `seed` starts this rank's random numbers (dropout)."""
        self.step = 0
        self.objective = objective
        self.setting = setting
        self._model, self._stream = model, stream
        self._random = _Random(seed, setting.device)
        with self._random:
            self._worker: Worker = strategy.setup(model.train(), objective, optimizer, setting)
        self.largest_gradient: dict[str, torch.Tensor] | None = None
        self._recent: list[float] = []
        self._done: list[tuple[int, int, Outcome, tuple[object, object]]] = []
        self._ended = "done"
        self._loss: float | None = None
        self._ratios = [1.0] * len(self._worker.optimizer.param_groups)

    @property
    def lr(self) -> float:
        """The first parameter group's learning rate."""
        return float(self._worker.optimizer.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Give the first group this learning rate, and the others in proportion."""
        groups = self._worker.optimizer.param_groups
        if groups[0]["lr"]:  # at 0 nothing can be read from it: the proportions stay as they were
            self._ratios = [group["lr"] / groups[0]["lr"] for group in groups]
        for group, ratio in zip(groups, self._ratios, strict=True):
            group["lr"] = lr * ratio

    def advance(self, steps: int) -> None:
        """Take up to `steps` steps. Ends early, at the same step on all ranks, when steps have become slow.

        What was done is read by :meth:`harvest`, also after an exception.
        """
        self._done.clear()
        self._ended, self._loss = "failed", None
        checks, begun = _checks(steps), time.perf_counter()
        with self._random:
            for k in range(steps):
                if k in checks and self._agree(time.perf_counter() - begun > SLOW_S):
                    self._ended = "time"
                    return
                outcome, samples, data = self._one()
                if not outcome.finite:
                    self._ended = "nonfinite"
                    # Without weight the mean is 0 / 0, which says nothing of this rank's samples.
                    self._loss = float(outcome.loss) if outcome.loss is not None and float(outcome.weight) else None
                    return
                self._done.append((self.step, samples, outcome, data))
                self.step += 1
        self._ended = "done"

    def harvest(self) -> Advance:
        """The rows of the steps that the last `advance` completed."""
        rows = self._rows(self._done)
        self._done.clear()
        self._recent = (self._recent + rows["step_s"].tolist())[-50:]
        return Advance(rows, self.step, self.lr, self._ended, self._loss)

    def _one(self) -> tuple[Outcome, int, tuple[object, object]]:
        """One step: batch, then the strategy's work on it."""
        mark = self.setting.clock.mark
        begun = mark()
        counts = self._stream.counts(self.step)
        samples = sum(counts[s] for s in self.setting.shards)
        batch = self._stream.batch(self.step)
        if batch is not None:
            batch = to_device(batch, self.setting.device)
        ready = mark()
        try:
            outcome = self._worker.step(batch, counts)
        except ValueError as error:
            explain(error)
            raise
        if self.largest_gradient is not None:
            self._note_gradients(self.largest_gradient)
        return outcome, samples, (begun, ready)

    def _agree(self, flag: bool) -> bool:  # noqa: FBT001 - the one value that is agreed upon
        group = self.setting.group
        return flag if group is None else group.any(flag)

    def _rows(self, done: list[tuple[int, int, Outcome, tuple[object, object]]]) -> np.ndarray:
        clock, memory = self.setting.clock, probe.memory_used(self.setting.device)
        clock.settle()
        rank = 0 if self.setting.group is None else self.setting.group.rank
        rows = np.zeros(len(done), ROW)
        for row, (step, samples, outcome, (begun, ready)) in zip(rows, done, strict=True):
            start, forward, backward, end = outcome.marks
            row["step"], row["epoch"], row["rank"] = step, self._stream.epoch(step), rank
            row["samples"], row["weight"], row["lr"] = samples, float(outcome.weight), self.lr
            row["loss"] = np.nan if outcome.loss is None else float(outcome.loss)
            row["data_s"] = clock.seconds(begun, ready)
            row["forward_s"] = clock.seconds(start, forward)
            row["backward_s"] = clock.seconds(forward, backward)
            row["update_s"] = clock.seconds(backward, end)
            row["step_s"] = clock.seconds(begun, end)
            row["memory_bytes"] = memory
        return rows

    def median_step_s(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    # -- between dispatches -----------------------------------------------------------------------------------

    def regroup(self, group: Group) -> None:
        """Go on in a new generation of the process group."""
        if self.setting.group is not None:
            self.setting = dataclasses.replace(self.setting, group=group)
            self._worker.regroup(group)

    def state(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict on the CPU. A collective."""
        with self._worker.whole() as model:
            return {name: _kept(value) for name, value in model.state_dict().items()}

    def evaluate(
        self, batches: Iterable[tuple[int, Any]], metrics: dict[str, Callable[..., Any]]
    ) -> tuple[int, dict[str, tuple[float, float]]]:
        """(samples, {name: (weighted sum, weight)}) of this rank's part of held-out data. A collective.

        `batches` are pairs of how many samples and the batch itself, which may be of any form.
        """
        if metrics and self.objective.step is not None:
            raise ValueError(
                "metrics need output and target, which step= keeps to itself; compute them from run.model, or train "
                "with loss="
            )
        sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in ("loss", *metrics)}
        samples = 0
        with self._worker.whole() as model, _evaluating(model), self._random:
            for count, batch in batches:
                samples += count
                found = self._measure(model, to_device(batch, self.setting.device), metrics)
                for name, (value, weight) in found.items():
                    sums[name][0] += value if weight is not None else value * count
                    sums[name][1] += weight if weight is not None else count
        return samples, {name: (total, weight) for name, (total, weight) in sums.items()}

    def _measure(
        self, model: torch.nn.Module, batch: Any, metrics: dict[str, Callable[..., Any]]
    ) -> dict[str, tuple[float, float | None]]:
        output, target, loss, weight = self.objective.predict(model, batch)
        found: dict[str, tuple[float, float | None]] = {
            "loss": (float(loss), None if weight is None else float(weight))
        }
        for name, metric in metrics.items():
            value = metric(output, target)
            total, weight = value if isinstance(value, tuple) else (value, None)
            if isinstance(total, torch.Tensor) and total.numel() != 1:
                raise TypeError(
                    f"metric {name!r} returned a tensor of shape {tuple(total.shape)}; it must return one number, the "
                    "mean over the samples (or a pair (sum, weight))"
                )
            found[name] = (float(total), None if weight is None else float(weight))
        return found

    # -- for verify -------------------------------------------------------------------------------------------

    def watch_gradients(self) -> None:
        """Keep the largest gradient of every number from now on, so that `verify` can tell true zeros from rounding."""
        self.largest_gradient = {}

    def _note_gradients(self, largest: dict[str, torch.Tensor]) -> None:
        for name, p in self._model.named_parameters():
            if p.grad is not None:
                size = p.grad.abs().cpu()
                largest[name] = torch.maximum(largest[name], size) if name in largest else size


def _kept(value: Any) -> Any:
    """A copy of an entry of a state dict, on the CPU; a module's extra state may be anything."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _checks(steps: int) -> set[int]:
    """Where in a dispatch all ranks ask each other for the time: at most three times, the first one early."""
    return {k for k in (steps // 64, steps // 8, steps // 2) if k}


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


class _Random:
    """A job's own random state, so that jobs and cells do not disturb each other's numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        with self._forked():
            torch.manual_seed(seed)
            self._keep()

    def _forked(self) -> contextlib.AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[self._device] if self._device else [])

    def _keep(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._device else None

    def __enter__(self) -> None:
        self._fork = self._forked()
        self._fork.__enter__()
        torch.set_rng_state(self._cpu)
        if self._device and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def __exit__(self, *exception: object) -> None:
        self._keep()
        self._fork.__exit__(None, None, None)
