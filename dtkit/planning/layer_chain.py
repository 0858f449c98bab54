"""A model's chain of layers, and what each of them costs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """What each layer costs, and what runs around them: seconds, or numbers of parameters."""

    layers: tuple[float, ...]
    before_layers: float = 0.0
    """Of what runs before the first layer."""
    after_layers: float = 0.0
    """Of what runs after the last one."""

    @property
    def per_layer(self) -> list[float]:
        """By layer, with what can't be cut off from the first and the last one."""
        found = list(self.layers)
        found[0] += self.before_layers
        found[-1] += self.after_layers
        return found


@dataclasses.dataclass(frozen=True)
class LayerChain:
    """A model's chain of layers, by name, and what is known of them before it is cut."""

    names: tuple[str, ...]
    parameter_counts: LayerCosts
    """In their parameters."""
    seconds: LayerCosts | None = None
    """As measured; None where no step was taken."""
    output_bytes: tuple[float, ...] = ()
    """Bytes that come out of each, for one row of a batch; none where that is not known."""

