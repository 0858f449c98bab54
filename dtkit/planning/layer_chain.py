"""A model's chain of layers, and their costs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """Cost of each layer and of the code around the layers, in seconds or in parameters."""

    layers: tuple[float, ...]
    before_layers: float = 0.0
    """Cost of the code before the first layer."""
    after_layers: float = 0.0
    """Cost of the code after the last layer."""

    @property
    def per_layer(self) -> list[float]:
        """Costs by layer; the first and the last include the code around the layers."""
        costs = list(self.layers)
        costs[0] += self.before_layers
        costs[-1] += self.after_layers
        return costs


@dataclasses.dataclass(frozen=True)
class LayerChain:
    """A model's chain of layers by name, with facts that are known before the model is cut."""

    names: tuple[str, ...]
    parameter_counts: LayerCosts
    """Number of parameters of each layer."""
    seconds: LayerCosts | None = None
    """Measured times; None without a step."""
    output_bytes: tuple[float, ...] = ()
    """Bytes of each layer's output for one row of a batch; empty if unknown."""
