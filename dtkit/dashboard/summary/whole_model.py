"""Advice to a strategy that splits a model which would fit on each node as a whole.

Splitting a model saves memory, and costs messages in each layer. A model that needs a small part of a node's memory
gains nothing by it, so a larger batch or more micro-batches treat the wrong cause.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.dashboard.summary.one_process import REPLICATED

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def advise_whole_model(
    cause: str, text: str, arithmetic: tuple[str, ...], spec: RunSpec, nodes: Sequence[NodeInfo]
) -> dict[str, Any]:
    """Return text and arithmetic of a verdict, with another remedy if its cause is that a small model is split."""
    if cause not in _COSTS_OF_SPLITTING or not fits_every_node(spec, nodes):
        return {"text": text, "arithmetic": arithmetic}
    assert spec.model is not None
    count, smallest = spec.model.parameters, min(node.memory_total for node in nodes)
    needed = formatting.format_bytes(count * _BYTES_PER_PARAMETER)
    finding = text.partition(":")[0].removesuffix(", and grows with the batch")
    advice = "the model is too small to be split: use DataParallel() or one process"
    line = (
        f"{count:,} parameters * {_BYTES_PER_PARAMETER} bytes (value, gradient, two moments of the optimizer) = "
        f"{needed}, and a node has {formatting.format_bytes(smallest)}: splitting saves nothing that is scarce"
    )
    return {"text": f"{finding}, and {advice}", "arithmetic": (*arithmetic, line)}


def name_remedy(text: str, spec: RunSpec, nodes: Sequence[NodeInfo]) -> str:
    """Return what helps nodes that are slower than one process, with the batch that a verdict's `text` proposes."""
    if fits_every_node(spec, nodes):
        return "use a larger model, or Cluster(1)"
    batch = re.search(r"batch_size=\d+ for [\d.]+ times the samples/s", text)
    where = "Cluster(1)" if spec.strategy.startswith(REPLICATED) else "Cluster(1) if its memory suffices"
    return f"use a larger batch{f' ({batch[0]})' if batch else ''} or model, or {where}"
