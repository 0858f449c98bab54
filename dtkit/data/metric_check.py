"""A trial of metrics on the model's output for a few rows: their errors, and sums in place of means.

An evaluation takes the mean of a metric over batches, weighted by their samples. A metric that is itself a sum would
be shown as a number that grows with the batch.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import return_error, run_guarded
from dtkit.data.loss_check import SUM_REMEDY, is_close
from dtkit.data.pairing import PairedRowsError, PairingDetector
from dtkit.engine.data.sources import map_tensors
from dtkit.engine.error_hints import add_general_hint
from dtkit.engine.evaluation import compute_metrics
from dtkit.engine.observe.error_report import format_message, format_traceback, list_user_frames
from dtkit.engine.stateful_metrics import is_stateful
from dtkit.errors import FirstBatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.strategies.loss import EvalOutput

_CERTAIN_ERRORS = re.compile(
    "must match the size|could not infer output dtype|Boolean value of Tensor with more than one|"
    "cannot be converted to Scalar"
)
"""Errors of torch that any number of rows causes."""
_TOLERANCE = 1e-5


def check_metrics(
    metrics: Mapping[str, Any], output: EvalOutput, num_rows: int, world_size: int, *, part: str, purpose: str
) -> None:
    """Raise FirstBatchError if a metric refuses the output or returns no number, and ValueError if it returns a sum.

    `part` is what the user calls this batch, and `purpose` what follows.
    """
    for name, metric in metrics.items():
        try_metric = functools.partial(_try_metric, name, metric, output, num_rows, world_size)
        if (error := run_guarded(try_metric, functools.partial(_explain, name, output, part, purpose))) is not None:
            raise error
        if not is_stateful(metric):
            _refuse_sum(name, metric, output, num_rows)


def _try_metric(name: str, metric: Any, output: EvalOutput, num_rows: int, world_size: int) -> None:
    if not is_stateful(metric):
        detector = PairingDetector(f"metric {name!r}", num_rows, output.target, outputs=output.output)
        compute_metrics(output, {name: metric})
        # The metric itself takes these rows, so any other error comes from the mode, which some operations refuse
        outcome = run_guarded(lambda: _watch_metric(detector, output, {name: metric}), return_error)
        if isinstance(outcome, PairedRowsError):
            raise outcome
    elif world_size > 1 and hasattr(metric, "check_batch"):  # of Keras: can ranks be added up?
        metric.check_batch(output.output, output.target)


def _watch_metric(detector: PairingDetector, output: EvalOutput, metrics: dict[str, Any]) -> None:
    with detector.watch():
        compute_metrics(output, metrics)


def _refuse_sum(name: str, metric: Any, output: EvalOutput, num_rows: int) -> None:
    """Raise ValueError for a metric that doubles when all rows are there twice."""
    # silent: the metric itself may need rows that differ, or targets of one kind
    values = run_guarded(lambda: _compute_doubled(metric, output, num_rows), lambda _: None)
    if values is not None and _is_doubled(*values):
        raise ValueError(
            f"metric {name!r} is a sum over samples: {values[0]:.4g} for {num_rows} rows, and {values[1]:.4g} if each "
            f"is there twice. An evaluation takes the mean over all samples. {SUM_REMEDY}"
        )


def _is_doubled(once: float, twice: float) -> bool:
    return math.isfinite(once) and once != 0 and is_close(2 * once, twice, _TOLERANCE)


def _compute_doubled(metric: Any, output: EvalOutput, num_rows: int) -> tuple[float, float] | None:
    """Return a metric of some rows, and of these rows twice; None for a pair of (sum, weight), or other shapes.

    An untrained model may have no label right, and then a number of right ones is 0. Targets then equal its choices.
    """
    pairs = [(output.output, output.target)]
    if _has_classes(output):
        pairs.append((output.output, output.output.argmax(1)))
    for pair in pairs:
        once = metric(*pair)
        if isinstance(once, tuple):
            return None
        if float(once):
            return float(once), float(metric(*(map_tensors(value, _Repeat(num_rows)) for value in pair)))
    return None


def _has_classes(output: EvalOutput) -> bool:
    """Return whether targets are a class for each row of outputs."""
    values, target = output.output, output.target
    are_tensors = isinstance(values, torch.Tensor) and isinstance(target, torch.Tensor)
    return are_tensors and values.dim() == 2 and target.dim() == 1 and not target.is_floating_point()


class _Repeat:
    """Function that returns all rows of a tensor twice. Raises ValueError for a tensor with other rows."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] != (self._num_rows,):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has not {self._num_rows} rows")
        return torch.cat([tensor, tensor])


def _explain(name: str, output: EvalOutput, part: str, purpose: str, error: Exception) -> FirstBatchError | None:
    """Return the error for the user; None if a larger batch may have none."""
    if isinstance(error, PairedRowsError):
        return FirstBatchError(str(error), list_user_frames(error), format_traceback(error), part, purpose)
    is_certain = isinstance(error, RuntimeError) and _CERTAIN_ERRORS.search(str(error)) is not None
    if not is_certain and not isinstance(error, (TypeError, AttributeError, NameError, IndexError)):
        return None
    if not add_general_hint(error) and (hint := _explain_shapes(str(error), output)) is not None:
        error.add_note(hint)
    message = f"{type(error).__name__}: {format_message(error)}"
    if "metric '" not in message and "metric of Keras" not in message:
        message = f"metric {name!r}: {message}"
    return FirstBatchError(message, list_user_frames(error), format_traceback(error), part, purpose)


def _explain_shapes(message: str, output: EvalOutput) -> str | None:
    """Return the remedy for outputs of all classes that are compared with one label for each sample."""
    if "must match the size" not in message or not _has_classes(output):
        return None
    values, target = tuple(output.output.shape), tuple(output.target.shape)
    return (
        f"The outputs have shape {values}, a number for each class, and the targets {target}. Choose a class first, "
        "as in (output.argmax(1) == target).float().mean()"
    )
