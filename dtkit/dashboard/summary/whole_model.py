"""Advice to a strategy that splits a model which would fit on each node as a whole.

Splitting a model saves memory, and costs messages in each layer. A model that needs a small part of a node's memory
gains nothing by it, so a larger batch or more micro-batches treat the wrong cause.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.summary.one_process import REPLICATED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.dashboard.summary.causes import Cause
    from dtkit.types import NodeInfo, RunSpec

_SPLITTING = ("Sharded(", "TensorParallel(", "Pipeline(")
_COSTS_OF_SPLITTING = ("communication", "overhead", "bubble", "cut", "waiting")
_BYTES_PER_PARAMETER = 16
"""Of float32: the value, its gradient, and two moments of an optimizer such as Adam."""
_MAX_SHARE = 0.01
"""Share of a node's memory up to which a model is small. The rest is for activations."""


def fits_every_node(spec: RunSpec, nodes: Sequence[NodeInfo]) -> bool:
    """Return whether the strategy splits a model that is small next to the memory of each node."""
    if spec.model is None or not nodes or not spec.strategy.startswith(_SPLITTING):
        return False
    return spec.model.parameters * _BYTES_PER_PARAMETER <= _MAX_SHARE * min(node.memory_total for node in nodes)


def advise_whole_model(cause: Cause, spec: RunSpec, nodes: Sequence[NodeInfo]) -> Cause:
    """Return a cause with another remedy if it comes from splitting a small model."""
    if cause.name not in _COSTS_OF_SPLITTING or not fits_every_node(spec, nodes):
        return cause
    assert spec.model is not None
    count, smallest = spec.model.parameters, min(node.memory_total for node in nodes)
    needed = formatting.format_bytes(count * _BYTES_PER_PARAMETER)
    line = (
        f"{count:,} parameters * {_BYTES_PER_PARAMETER} bytes (value, gradient, two moments of the optimizer) = "
        f"{needed}, and a node has {formatting.format_bytes(smallest)}: splitting saves nothing that is scarce"
    )
    return dataclasses.replace(
        cause,
        finding=f"{cause.finding}, and the model is too small to be split",
        remedy="use DataParallel() or one process",
        arithmetic=(*cause.arithmetic, line),
        larger_batch="",
        is_split_in_vain=True,
    )


def name_remedy(cause: Cause, spec: RunSpec, nodes: Sequence[NodeInfo]) -> str:
    """Return what helps nodes that are slower than one process, with the larger batch that a cause proposes."""
    if fits_every_node(spec, nodes):
        return "use a larger model, or Cluster(1)"
    batch = f" ({cause.larger_batch})" if cause.larger_batch else ""
    where = "Cluster(1)" if spec.strategy.startswith(REPLICATED) else "Cluster(1) if its memory suffices"
    return f"use a larger batch{batch} or model, or {where}"
