"""Evaluation of a model on this rank's part of held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.formatting import name_type
from dtkit.engine.data.sources import to_device
from dtkit.engine.observe.training_position import POSITION
from dtkit.engine.stateful_metrics import StatefulMetrics, is_stateful

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.strategies.base import EvalFunction
    from dtkit.strategies.loss import EvalOutput, Loss


def check_metrics(metrics: dict[str, Callable[..., Any]], loss_fn: Loss) -> None:
    """Raise ValueError if there are metrics, but no outputs from which to compute them."""
    if metrics and loss_fn.training_step is not None:
        raise ValueError(
            "metrics= need output and target, which training_step= keeps to itself. The evaluation already has the "
            "numbers that the step returns next to the loss, as in return loss, {'accuracy': accuracy}"
        )


def evaluate_batches(
    forward: EvalFunction,
    batches: Iterable[tuple[int, Any]],
    metrics: dict[str, Callable[..., Any]],
    context: WorkerContext,
) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return (samples, {name: (weighted sum, weight)}) over batches; those of 0 samples count for nothing.

    Metrics that keep state make this a collective.
    """
    stateful = StatefulMetrics(metrics, context.device)
    metrics = {name: metric for name, metric in metrics.items() if not is_stateful(metric)}
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in ("loss", *metrics)}
    samples = 0
    for POSITION.evaluation_index, (count, batch) in enumerate(batches):
        eval_output = forward(to_device(batch, context.device))
        if eval_output is None or not count:
            continue
        samples += count
        for name, (value, weight) in compute_metrics(eval_output, metrics).items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += value if weight is not None else value * count
            entry[1] += weight if weight is not None else count
        stateful.update(eval_output)
    for name, number in stateful.compute(context.group, context.shards[0]).items():
        sums[name] = [number * samples, samples]  # these values, and so their mean, are equal on all ranks
    return samples, {name: (total, weight) for name, (total, weight) in sums.items()}


def compute_metrics(
    eval_output: EvalOutput, metrics: dict[str, Callable[..., Any]]
) -> dict[str, tuple[float, float | None]]:
    """Return {name: (value, weight)}, including the loss. A value without weight is a mean over samples."""
    weight = eval_output.loss_weight
    values: dict[str, tuple[float, float | None]] = {
        **eval_output.logged,
        "loss": (float(eval_output.loss), None if weight is None else float(weight)),
    }
    for name, metric in metrics.items():
        result = metric(eval_output.output, eval_output.target)
        is_pair = isinstance(result, tuple) and len(result) == 2
        total, weight = result if is_pair else (result, None)
        for number in result if is_pair else (result,):
            _check_number(name, number)
        values[name] = (float(total), None if weight is None else float(weight))
    return values


def _check_number(name: str, value: Any) -> None:
    """Raise TypeError unless a part of a metric's result is a number. A text is not, also if it consists of digits."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return
        got = f"a tensor of shape {tuple(value.shape)}"
    elif not isinstance(value, (str, bytes)) and hasattr(value, "__float__"):
        return
    else:
        got = "None" if value is None else f"{value!r:.60} ({name_type(value)})"
    raise TypeError(
        f"metric {name!r} returned {got}; it must return one number, the mean over the samples, as in .float().mean() "
        "(or a pair (sum, weight))"
    )
