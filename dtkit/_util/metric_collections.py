"""Collections of metrics, such as torchmetrics' ``MetricCollection``: the only place that looks into them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def split_collections(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics by the names of their values: for a collection, each of its metrics by its own name."""
    parts: dict[str, Any] = {}
    for name, metric in metrics.items():
        parts.update(metric.items() if hasattr(metric, "items") else {name: metric})
    return parts


def list_metric_modules(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that define metrics, without the notebook's own, which other processes can't import."""
    parts = split_collections(metrics).values()
    names = [getattr(part if inspect.isroutine(part) else type(part), "__module__", None) for part in parts]
    return tuple(dict.fromkeys(name for name in names if name not in (None, "__main__", "builtins")))
