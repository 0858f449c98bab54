"""What strategies do alike with the gradients that lie on one rank: add up over ranks, divide, scale, measure.

Plain functions of tensors. Which ranks take part, and which of them hold the same gradients, is the caller's to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dtkit.strategies.loss import LOSS_IS_MEAN, LOSS_IS_WEIGHTED_SUM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.comm.process_group import Group


def agree_on_loss_form(loss_form: int | None, group: Group | None) -> int:
    """Whether the loss is a mean or a pair, as all ranks see it. A collective.

    None where this rank has no loss: it has no sample in the first step, or not the last stage. TypeError, on all
    ranks, where they see different forms.
    """
    votes = torch.tensor([loss_form == LOSS_IS_MEAN, loss_form == LOSS_IS_WEIGHTED_SUM], dtype=torch.float32)
    if group is not None:
        group.all_reduce(votes)
    if bool(votes.all()):
        raise TypeError("the loss is a scalar on some ranks and a (sum, weight) pair on others; return one form")
    return LOSS_IS_MEAN if votes[0] else LOSS_IS_WEIGHTED_SUM


def compute_weight_factor(total_weight: torch.Tensor) -> torch.Tensor:
    """What makes the gradients of a sum into those of the weighted mean. Of no weight at all, `total` becomes tiny."""
    return (
        1 / total_weight.clamp_(min=torch.finfo(total_weight.dtype).tiny)
    ).nan_to_num()  # a sum of nothing has a gradient of 0


def compute_clip_factor(norm: float, max_norm: float | None) -> float:
    """What to multiply a gradient of this norm by: as torch's clip_grad_norm_ does."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / (norm + 1e-6)


def scale_(gradients: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply in place: by one fused operation where they are of one kind."""
    if len({(g.dtype, g.device, g.layout) for g in gradients}) == 1 and not gradients[0].is_sparse:
        torch._foreach_mul_(gradients, torch.as_tensor(factor, dtype=torch.float64).to(gradients[0]))
    else:
        for gradient in gradients:
            gradient.mul_(float(factor))


def sum_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each one's numbers, in float64. All on one device, and at least one."""
    norms = torch._foreach_norm([get_values(g) for g in gradients])  # noqa: SLF001 - as clip_grad_norm_ does
    return torch.stack(norms).double().square()


def get_values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, which is sparse for an embedding made so."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def all_reduce_flat(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    all_reduce: Callable[[torch.Tensor], object],
) -> list[torch.Tensor | None]:
    """The sums over ranks, laid out as the parameters, in one flat all-reduce that is done in place.

    A parameter that no rank used gets no gradient, as in one process.
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
