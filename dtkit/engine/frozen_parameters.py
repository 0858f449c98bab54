"""Check that no parameter is unfrozen during a training: strategies decide at the beginning what they synchronize.

Ranks would not sum its gradients, and would end with different models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class FrozenParameters:
    """The parameters that needed no gradients at the beginning."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for name, p in model.named_parameters() if not p.requires_grad}

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if one of them needs gradients now."""
        unfrozen = [name for name, p in model.named_parameters() if p.requires_grad and name in self._names]
        if unfrozen:
            more = f" and {len(unfrozen) - 1} more" if len(unfrozen) > 1 else ""
            raise ValueError(
                f"{unfrozen[0]}{more} was frozen when the training began and needs gradients now: ranks synchronize "
                "what was trained at the beginning. Train in two runs: unfreeze parameters of run.model between them"
            )
