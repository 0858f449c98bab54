"""Collections of metrics, such as torchmetrics' ``MetricCollection``: the only place that looks into them."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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


def import_metric_modules(names: Sequence[str]) -> None:
    """Import these modules of metrics, but for those that can't be imported."""
    for name in names:
        # silent: a metric that is pickled by value needs no import, and any other one raises this error itself
        run_guarded(functools.partial(importlib.import_module, name), lambda _: None)
