"""A rank's part of a tensor in a state dict."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    pass


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """A part of a tensor."""

    tensor: Any
    dim: int
    """The dimension along which it was cut."""
    index: int
    """The how-manieth part it is, from 0."""
    fused_blocks: int = 1
    """Of how many equal blocks of the whole it has a part each, one after another."""

