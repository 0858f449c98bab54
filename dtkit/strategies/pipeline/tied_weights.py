"""Parameters of several stages, such as the embedding of a language model that is its head as well.

Such a parameter has several names, or one name in the code of several stages, as in ``F.linear(x, embedding.weight)``.

Each rank that needs such a parameter has a copy. The copies' gradients are summed in each step, so that equal updates
keep the copies equal. Megatron-LM does so with embeddings (Shoeybi et al., 2019). Stages of one rank share one copy.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dtkit.strategies import gradients
from dtkit.strategies.meta_copy import META_DEVICE, make_empty_like

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn


@dataclasses.dataclass(frozen=True)
class TiedParameter:
    """A parameter with several names, or in several stages."""

    names: tuple[str, ...]
    """All of its names in the model, in the model's order."""
    like: torch.Tensor
    """A tensor of its shape and type, without values."""
    ranks: tuple[int, ...]
    """The ranks of the pipeline with a copy, in order."""

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have a copy."""
        return len(self.ranks) > 1

    def __str__(self) -> str:
        if len(self.names) == 1:
            return f"{self.names[0]} is a parameter of several stages"
        return f"{' and '.join(self.names)} are one parameter"


def find_tied_parameters(
    model: nn.Module, stage_names: Sequence[set[str]], stage_ranks: Sequence[int]
) -> tuple[TiedParameter, ...]:
    """Return the parameters with several names or on several ranks.

    `stage_names` are the parameter names that each stage has.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    tied = []
    for p, known_as in names.items():
        ranks = {rank for rank, here in zip(stage_ranks, stage_names, strict=True) if here.intersection(known_as)}
        if ranks and (len(known_as) > 1 or len(ranks) > 1):
            tied.append(TiedParameter(tuple(known_as), make_empty_like(p, META_DEVICE), tuple(sorted(ranks))))
    return tuple(tied)


class TiedCopies:
    """One rank's copies of tied parameters."""

    def __init__(self, tied: Sequence[TiedParameter], named: Mapping[str, torch.Tensor], rank: int) -> None:
        """`named` are this rank's parameters by their names in the model; `rank` is its rank in the pipeline."""
        self._tied = [(each, next((named[name] for name in each.names if name in named), None)) for each in tied]
        self._uncounted = [p for each, p in self._tied if p is not None and rank != each.ranks[0]]

    def add_names(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's parameters by all names of the whole model, of which a stage may know only one."""
        all_names = {name: each.names for each, p in self._tied if p is not None for name in each.names}
        return {alias: p for name, p in named.items() for alias in all_names.get(name, (name,))}

    def sum_gradients(self, all_reduce: Callable[[torch.Tensor], object], device: torch.device) -> None:
        """Sum the gradients of all copies, by one all-reduce among the ranks of the pipeline. A collective."""
        trained = [(each, p) for each, p in self._tied if each.is_shared and each.like.requires_grad]
        if not trained:
            return
        copies = [torch.empty_like(each.like, device=device) if p is None else p for each, p in trained]
        local = [None if p is None else p.grad for _, p in trained]
        for (_, p), total in zip(trained, gradients.all_reduce_flat(copies, local, all_reduce), strict=True):
            if p is not None:
                p.grad = total

    def is_counted(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank counts a parameter in the whole model's norm: each tied one counts on one rank."""
        return all(parameter is not p for p in self._uncounted)
