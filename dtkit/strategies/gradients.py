"""Functions that all strategies use on one rank's gradients: all-reduce, divide, scale, measure.

The caller knows which ranks take part, and which of them hold the same gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dtkit._util.torch_private import foreach_mul_, foreach_norm
from dtkit.strategies.loss import LOSS_IS_MEAN, LOSS_IS_WEIGHTED_SUM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.comm.process_group import Group


def agree_on_loss_form(loss_form: int | None, group: Group | None) -> int:
    """Return the form of the loss, a mean or a pair, that all ranks agree on. A collective.

    `loss_form` is None on a rank without a loss: one without samples in the first step, or without the last stage.
    Raises TypeError on all ranks if the forms differ.
    """
    votes = torch.tensor([loss_form == LOSS_IS_MEAN, loss_form == LOSS_IS_WEIGHTED_SUM], dtype=torch.float32)
    if group is not None:
        group.all_reduce(votes)
    if bool(votes.all()):
        raise TypeError("the loss is a scalar on some ranks and a (sum, weight) pair on others; return one form")
    return LOSS_IS_MEAN if votes[0] else LOSS_IS_WEIGHTED_SUM


def compute_weight_factor(total_weight: torch.Tensor) -> torch.Tensor:
    """Return the factor from the gradients of a sum to those of the weighted mean. Changes a zero weight in place."""
    smallest = torch.finfo(total_weight.dtype).tiny
    return (1 / total_weight.clamp_(min=smallest)).nan_to_num()  # an empty sum has a gradient of 0


def compute_clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor for a gradient of this norm, as in torch's clip_grad_norm_."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / (norm + 1e-6)


def scale_(gradients: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply in place, by one fused operation if all gradients have the same type."""
    if len({(g.dtype, g.device, g.layout) for g in gradients}) == 1 and not gradients[0].is_sparse:
        foreach_mul_(gradients, torch.as_tensor(factor, dtype=torch.float64).to(gradients[0]))
    else:
        for gradient in gradients:
            gradient.mul_(float(factor))


def sum_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each gradient, in float64. There must be at least one, all on one device."""
    norms = foreach_norm([get_values(g) for g in gradients])
    return torch.stack(norms).double().square()


def add_optional(
    totals: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the sums, pair by pair, where None counts as 0."""
    return [b if a is None else a if b is None else a + b for a, b in zip(totals, gradients, strict=True)]


def get_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values; sparse embeddings have sparse gradients."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def all_reduce_flat(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    all_reduce: Callable[[torch.Tensor], object],
) -> list[torch.Tensor | None]:
    """Return the gradients' sums over ranks, by one flat all-reduce in place.

    A parameter that no rank used gets None, as in one process.
    """
    used = parameters[0].new_tensor([g is not None for g in gradients])
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    flat = torch.cat([used, *(part.reshape(-1) for part in parts)])
    all_reduce(flat)
    used, *sums = torch.split(flat, [len(parts), *(p.numel() for p in parameters)])
    return [
        total.view_as(p).to(p.dtype) if count else None
        for p, total, count in zip(parameters, sums, used.tolist(), strict=True)
    ]
