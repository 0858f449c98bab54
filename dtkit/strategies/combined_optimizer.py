"""Several optimizers as one, each for its own parameters, such as Muon for matrices next to AdamW for the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from dtkit.strategies.update import run_update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizer whose groups and state are those of several optimizers, and whose step is theirs in order."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ValueError if a parameter is in two of them."""
        self.optimizers = tuple(optimizers)
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if len({id(p) for p in parameters}) < len(parameters):
            raise ValueError(
                "a parameter is in two of the optimizers that optimizer= returned, so it would be updated twice. Give "
                "each parameter to one of them"
            )
        super().__init__([{"params": parameters}], {})
        self.param_groups = list(itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers))

    @property  # type: ignore[override]  # a view of several
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """State of all parameters."""
        return _CombinedState(self.optimizers)

    @state.setter
    def state(self, _value: Any) -> None:
        """Do nothing: each optimizer has its own."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of each optimizer."""
        assert closure is None
        for optimizer in self.optimizers:
            run_update(optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        """Clear the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class _CombinedState(MutableMapping[torch.Tensor, Any]):
    """View of the states of several optimizers."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, p: torch.Tensor) -> Any:
        for optimizer in self._optimizers:
            if p in optimizer.state:
                return optimizer.state[p]
        raise KeyError(p)

    def __setitem__(self, p: torch.Tensor, value: Any) -> None:
        for optimizer in self._optimizers:
            if any(p is parameter for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.state[p] = value
                return
        raise KeyError(p)

    def __delitem__(self, p: torch.Tensor) -> None:
        for optimizer in self._optimizers:
            if p in optimizer.state:
                del optimizer.state[p]
                return
        raise KeyError(p)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.chain.from_iterable(optimizer.state for optimizer in self._optimizers)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
