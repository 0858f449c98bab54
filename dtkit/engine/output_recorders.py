"""Outputs of inner layers that models of Hugging Face's transformers return on request, such as router logits.

transformers registers them in a model's constructor, which an unpickled model has not run. In an engine they would be
None. A mixture of experts then fails while it computes its auxiliary loss.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def register_recorders(model: torch.nn.Module) -> None:
    """Register the outputs of all models of transformers in `model`. No-op if transformers is not loaded."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(capturing, "_CAN_RECORD_REGISTRY", None)
    if not isinstance(registry, dict):
        return
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None)
        if recorders is not None:
            # its own way to set an item differs from version to version
            dict.setdefault(registry, str(type(module)), recorders)
