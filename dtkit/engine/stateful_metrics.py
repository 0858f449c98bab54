"""Metrics that keep state, such as those of torchmetrics: updated by batch, merged over ranks, computed once.

For F1, AUROC and many others, a mean over batches is not the metric of all rows. So ranks exchange their states, and
every rank computes the metric from the merged state.
"""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.metric_collections import split_collections
from dtkit.engine.state.capture import all_gather_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.engine.comm.process_group import Group
    from dtkit.strategies.loss import EvalOutput


def is_stateful(metric: Any) -> bool:
    """Return whether a metric keeps state: it has the methods of torchmetrics' Metric."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset", "clone"))


class StatefulMetrics:
    """One rank's copies of a user's metrics with state, by name."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        stateful = {name: metric for name, metric in metrics.items() if is_stateful(metric)}
        self._metrics = {name: metric.clone() for name, metric in split_collections(stateful).items()}
        for metric in self._metrics.values():
            metric.reset()
            metric.to(device)
        self._is_updated = False

    def update(self, evaluated: EvalOutput) -> None:
        """Add a batch."""
        self._is_updated = True
        for metric in self._metrics.values():
            metric.update(evaluated.output, evaluated.target)

    def compute(self, group: Group | None, replica: int) -> dict[str, float]:
        """Return the values over the rows of all ranks. A collective, if there are metrics."""
        if not self._metrics:
            return {}
        if group is not None:
            self._merge(group, replica)
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            value = metric.compute()
            several = value if isinstance(value, dict) else {name: value}
            values |= {key: _to_number(key, number) for key, number in several.items()}
        return values

    def _merge(self, group: Group, replica: int) -> None:
        """Replace each metric by the merged one of all replicas; of ranks with the same rows, the first counts."""
        state = _encode({name: metric.cpu() for name, metric in self._metrics.items()}) if self._is_updated else None
        first: dict[int, str] = {}
        for other_replica, encoded in all_gather_json(group, [replica, state]):
            if encoded is not None:
                first.setdefault(other_replica, encoded)
        merged, *others = [_decode(encoded) for _, encoded in sorted(first.items())]
        for name, metric in merged.items():
            for other in others:
                metric.merge_state(other[name])
        self._metrics = merged


def _encode(metrics: dict[str, Any]) -> str:
    return base64.b64encode(pickle.dumps(metrics)).decode()


def _decode(text: str) -> dict[str, Any]:
    # unpickles: sent by another engine of this process group
    metrics: dict[str, Any] = pickle.loads(base64.b64decode(text))
    return metrics


def _to_number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise TypeError(
            f"metric {name!r} computed a tensor of shape {tuple(value.shape)}; it must be one number. Average it, as "
            "in MulticlassF1Score(..., average='macro')"
        )
    return float(value)
