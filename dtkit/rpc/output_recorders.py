"""Outputs of inner layers that models of Hugging Face's transformers return on request, such as router logits.

transformers registers them in a model's constructor, which an unpickled model has not run. In another process they
would be None. A mixture of experts then fails while it computes its auxiliary loss.

A model that has returned such outputs has hooks, which refer to a global variable of transformers that can't be
pickled. So it is pickled by its name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


_MODULE, _COLLECTOR = "transformers.utils.output_capturing", "_active_collector"


def reduce_collector(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduce value of the variable that hooks of transformers refer to; None for any other object."""
    module = sys.modules.get(_MODULE)
    if module is None or obj is not getattr(module, _COLLECTOR, None):
        return None
    return getattr, (module, _COLLECTOR)


def register_recorders() -> None:
    """Register the outputs of all classes of models in this process. No-op if transformers is not loaded."""
    capturing = sys.modules.get(_MODULE)
    registry = getattr(capturing, "_CAN_RECORD_REGISTRY", None)
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if not isinstance(registry, dict) or base is None:
        return
    for kind in _list_subclasses(base):
        recorders = getattr(kind, "_can_record_outputs", None)
        if recorders is not None:
            # its own way to set an item differs from version to version
            dict.setdefault(registry, str(kind), recorders)


def _list_subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _list_subclasses(each)
