"""The cache of keys and values in Hugging Face's models, which only generation needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def disable_kv_cache(model: nn.Module) -> None:
    """Let a copy of a user's model return no cache.

    A cache can't be traced, grows twice where a block computes twice, and joins plain tensors with sharded ones.
    """
    for module in model.modules():  # encoder and decoder may have configs of their own
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False
