"""Metrics over the rows of all ranks, in a loop of one's own.

Ranks exchange the state of their metrics and add it up. That is right only for variables that are sums over rows. Those
of Keras's own metrics are. A metric with an `update_state` of its own is tried on an example batch.
"""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch.distributed as dist

from dtkit._util.guard import run_guarded
from dtkit.integrations.keras.compile_checks import is_overridden
from dtkit.integrations.keras.metrics import is_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

_Example = tuple[Any, Any] | None


@dataclasses.dataclass(frozen=True)
class _State:
    """State of one rank's metric."""

    name: str
    initial: list[np.ndarray]
    values: list[np.ndarray]
    problem: str | None
    """Why it can't be merged."""


def merge_metrics(metrics: Sequence[keras.metrics.Metric], example: tuple[Any, Any] | None = None) -> None:
    """Add up the state of metrics over the ranks, so that each rank has the result for all rows. A collective.

    Call it at the end of an epoch, and ``metric.reset_state()`` before the next one: TensorFlow's own averages of means
    are wrong for unequal batches.

    example : (targets, outputs) of a batch. Metrics with an ``update_state`` of your own need it: the batch twice must
        change each variable by twice as much. A rank without any batch builds its variables from it.

    Raises TypeError on all ranks for a variable that is not a sum, such as a maximum, and ValueError for metrics that
    were merged already or have no state on some rank.
    """
    listed = _list_metrics(metrics)
    own = [_read_state(metric, example) for metric in listed]
    by_rank: list[Any] = [None] * dist.get_world_size()
    # unpickles: sent by another rank of the same function
    dist.all_gather_object(by_rank, own)
    _check_states(by_rank)
    for metric, states in zip(listed, zip(*by_rank, strict=True), strict=True):
        initial = states[0].initial
        for k, variable in enumerate(metric.variables):
            variable.assign(initial[k] + sum(state.values[k] - state.initial[k] for state in states))
        metric.reset_state = types.MethodType(reset_state, metric)  # marks it, until then


def reset_state(metric: Any) -> None:
    """Reset a merged metric, which can then be merged again."""
    del metric.reset_state  # the class has its own
    metric.reset_state()


def _list_metrics(metrics: Any) -> list[keras.metrics.Metric]:
    """Return single metrics, those of a compiled model one by one. Raises TypeError for anything else."""
    listed = list(metrics) if isinstance(metrics, (list, tuple)) else [None]
    if not all(isinstance(metric, keras.metrics.Metric) for metric in listed):
        raise TypeError("metrics must be a list of Keras's metrics, as in [metric]")
    return [part for metric in listed for part in (getattr(metric, "metrics", None) or [metric])]


def _read_state(metric: keras.metrics.Metric, example: _Example) -> _State:
    """Return a metric's state, which stays as it is. It includes a problem here, since other ranks wait for it."""
    problem: list[str] = []
    if isinstance(vars(metric).get("reset_state"), types.MethodType):
        problem.append(
            "was merged before and not reset since, so all rows but the last ones would count once a rank. Read its "
            "result and call reset_state() after each merge"
        )
    values = _read(metric)

    def read() -> list[np.ndarray]:
        type(metric).reset_state(metric)
        initial = _read(metric)
        if example is not None:
            initial = _try_example(metric, example, initial, problem)
        elif _needs_example(metric):
            problem.append(
                "has an update_state of its own. Give merge_metrics a batch, by which it checks whether the variables "
                "are sums: example=(targets, outputs)"
            )
        return initial

    def report(error: BaseException) -> list[np.ndarray]:
        problem.append(f"raised {type(error).__name__}: {error}")
        return []

    initial = run_guarded(read, report)
    if len(values) < len(initial):  # the example has made the others
        values = initial
    for variable, value in zip(metric.variables, values, strict=False):
        variable.assign(value)
    return _State(metric.name, initial, values, problem[0] if problem else None)


def _try_example(
    metric: keras.metrics.Metric, example: tuple[Any, Any], initial: list[np.ndarray], problem: list[str]
) -> list[np.ndarray]:
    """Note a variable that is not a sum. Return the variables before any batch."""
    metric.update_state(*example)
    if len(initial) < len(metric.variables):  # Keras makes some at the first batch
        type(metric).reset_state(metric)
        initial = _read(metric)
        metric.update_state(*example)
    once = _read(metric)
    metric.update_state(*example)
    for variable, *found in zip(metric.variables, initial, once, _read(metric), strict=True):
        if not is_sum(*found):
            problem.append(
                f"has the variable {variable.name!r}, which is not a sum over batches: the same batch twice didn't "
                "change it twice as much. So ranks can't be added up. Keep sums in its variables"
            )
    return initial


def _needs_example(metric: keras.metrics.Metric) -> bool:
    """Return whether a metric may keep anything but sums. Means and sums of numbers keep just these."""
    is_reduction = isinstance(metric, (keras.metrics.Mean, keras.metrics.Sum))
    if is_reduction and len(metric.variables) <= 2:
        return False
    return is_overridden(metric, "update_state")


def _read(metric: keras.metrics.Metric) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in metric.variables]


def _check_states(by_rank: Sequence[Sequence[_State]]) -> None:
    """Raise the first problem of any rank, on each rank alike."""
    if len({len(states) for states in by_rank}) > 1:
        raise ValueError(f"ranks have {[len(states) for states in by_rank]} metrics; give the same ones on each rank")
    for states in zip(*by_rank, strict=True):
        for rank, state in enumerate(states):
            if state.problem is not None:
                kind: type[Exception] = ValueError if "reset_state" in state.problem else TypeError
                raise kind(f"rank {rank}: the metric {state.name!r} {state.problem}")
        shapes = [[value.shape for value in state.values] for state in states]
        most = max(map(len, shapes))
        for rank, found in enumerate(shapes):
            if not most or len(found) < most:
                raise ValueError(
                    f"rank {rank}: the metric {states[rank].name!r} lacks variables, as it has seen no batch. Update "
                    "it on each rank, or give example=(targets, outputs)"
                )
            if found != shapes[0]:
                raise ValueError(
                    f"the metric {states[rank].name!r} has shapes {found} on rank {rank}, and {shapes[0]} on rank 0"
                )
