"""Largest absolute gradients of every number over the steps of `verify`'s reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dtkit._util.torch_private import foreach_maximum_, foreach_minimum_

if TYPE_CHECKING:
    from collections.abc import Iterable


class LargestGradients:
    """Largest absolute gradients so far, on the CPU.

    Absolute values of large gradients would need new memory in each step, which takes ten times as long as comparing.
    So dense gradients on the CPU are compared in place, for their highest and lowest values.
    """

    def __init__(self) -> None:
        self._highest: dict[str, torch.Tensor] = {}
        self._lowest: dict[str, torch.Tensor] = {}
        self._other_sizes: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Compare the parameters' present gradients."""
        gradients = dict[str, torch.Tensor]()
        for name, p in named_parameters:
            if p.grad is None:
                continue
            if not _can_compare_in_place(p.grad):
                self._update_other(name, p.grad)
            elif name in self._highest:
                gradients[name] = p.grad
            else:
                self._highest[name], self._lowest[name] = p.grad.clone(), p.grad.clone()
        if gradients:
            values = list(gradients.values())
            foreach_maximum_([self._highest[name] for name in gradients], values)
            foreach_minimum_([self._lowest[name] for name in gradients], values)

    def _update_other(self, name: str, gradient: torch.Tensor) -> None:
        size = (gradient.to_dense() if gradient.is_sparse else gradient).abs().cpu()
        previous = self._other_sizes.get(name)
        self._other_sizes[name] = size if previous is None else torch.maximum(previous, size)

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the largest absolute gradients by parameter."""
        sizes = {name: torch.maximum(highest, -self._lowest[name]) for name, highest in self._highest.items()}
        for name, size in self._other_sizes.items():
            sizes[name] = torch.maximum(sizes[name], size) if name in sizes else size
        return sizes


def _can_compare_in_place(gradient: torch.Tensor) -> bool:
    return (
        type(gradient) is torch.Tensor
        and gradient.device.type == "cpu"
        and gradient.layout is torch.strided
        and not gradient.is_complex()
    )
