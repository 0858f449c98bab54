"""A rank's part of a tensor in a state dict."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """One of the equal parts of a tensor, as state dicts have it."""

    tensor: Any
    dim: int
    """The sharded dimension."""
    index: int
    """Index of the part, from 0."""
    fused_blocks: int = 1
    """Number of equal blocks of the whole tensor, of each of which this is the concatenated part."""
