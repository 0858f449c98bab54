"""Two thin matrices in place of each wide gradient: PowerSGD (Vogels et al., NeurIPS 2019).

A gradient of shape (n, m) is sent as (RANK, n) and (RANK, m), whose product stands for its sum over ranks. What the
product leaves out stays on each rank and is added to its next gradient. Gradients that would not shrink are sent whole.

torch has a hook for it too. It starts collectives from callbacks, and gloo runs those in threads of its own: with more
than one bucket the order differs between ranks, which ends the process (seen with 10 MB of gradients).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.capture import StateVisitor

APPROXIMATION_RANK = 2


class PowerSGD:
    """Sums gradients over ranks in two collectives a step, both of them with the last bucket.

    Collectives must start in the same order on all ranks, which those that callbacks of several buckets start do not
    (gloo then aborts the process); and what is thin need not be hidden behind the backward pass.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buckets: list[tuple[Any, torch.futures.Future[torch.Tensor]]] = []
        self._factorizations: dict[torch.Tensor, _LowRankFactorization] = {}

    def launch_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Take in a bucket; its future has the sum once the last bucket has come."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._buckets.append((bucket, done))
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            self._reduce_compressed(
                [pair for b, _ in buckets for pair in zip(b.parameters(), b.gradients(), strict=True)]
            )
            for each, future in buckets:
                future.set_result(each.buffer())
        return done

    @torch.no_grad()
    def _reduce_compressed(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        plain = [g for _, g in gradients if not _is_compressible(g)]
        wide = [(self._get_factorization(p, g), g.reshape(len(g), -1)) for p, g in gradients if _is_compressible(g)]
        left = [kept.compute_left_factor(matrix) for kept, matrix in wide]
        self._all_reduce([*plain, *left])
        left = [_orthogonalize_rows(part) for part in left]
        right = [part @ matrix for part, (_, matrix) in zip(left, wide, strict=True)]
        self._all_reduce(right)
        for (kept, matrix), a, b in zip(wide, left, right, strict=True):
            kept.reconstruct(matrix, a, b, self._group.world_size)

    def visit_state(self, visitor: StateVisitor, named_parameters: Mapping[str, torch.Tensor]) -> None:
        """Show what is kept. On another number of ranks what all have left out is dealt out: its sum stays."""
        wide = {
            name: self._get_factorization(p, p.detach())
            for name, p in named_parameters.items()
            if p.requires_grad and _is_compressible(p) and (p in self._factorizations or not visitor.is_saving)
        }
        if visitor.visit_tensors("powersgd", {name: one.right_factor for name, one in wide.items()}):
            left_out = {name: one.error_feedback for name, one in wide.items()}
            visitor.per_rank_tensors("powersgd", left_out, fraction=1 / visitor.world_size)
        else:
            self._factorizations.clear()

    def _get_factorization(self, parameter: torch.Tensor, gradient: torch.Tensor) -> _LowRankFactorization:
        if parameter not in self._factorizations:
            self._factorizations[parameter] = _LowRankFactorization(
                gradient.reshape(len(gradient), -1), seed=len(self._factorizations)
            )
        return self._factorizations[parameter]

    def _all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            flat = self._group.all_reduce(torch.cat([t.reshape(-1) for t in tensors]))
            for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))


class _LowRankFactorization:
    """What is kept of one gradient from step to step. Thin matrices lie: BLAS is several times faster at them so."""

    def __init__(self, matrix: torch.Tensor, seed: int) -> None:
        """`seed` is the same on all ranks."""
        start = torch.Generator().manual_seed(seed)
        self.right_factor = torch.randn(APPROXIMATION_RANK, matrix.shape[1], generator=start).to(matrix)
        self.error_feedback = torch.zeros_like(matrix)

    def compute_left_factor(self, matrix: torch.Tensor) -> torch.Tensor:
        """Add what was left out to a gradient; its rows, seen from the last step's right factor."""
        matrix.add_(self.error_feedback)
        return _orthogonalize_rows(self.right_factor) @ matrix.T

    def reconstruct(self, matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, world_size: int) -> None:
        """Put the product of the summed factors in place of a gradient, and keep what this rank's part of it lacks."""
        torch.addmm(matrix, left.T, right, alpha=-1 / world_size, out=self.error_feedback)
        torch.mm(left.T, right, out=matrix)
        if bool(right.isfinite().all()):
            self.right_factor = right
        else:  # the step will be refused, and must leave no trace
            self.error_feedback.zero_()


def _orthogonalize_rows(rows: torch.Tensor) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(rows.T).Q
    return basis.T.contiguous()


def count_sent_elements(shape: Sequence[int]) -> int:
    """How many numbers are sent for a gradient: two thin matrices where those have at most half of its own."""
    count = math.prod(shape)
    thin = APPROXIMATION_RANK * (shape[0] + count // shape[0]) if len(shape) > 1 and shape[0] else count
    return thin if 2 * thin <= count else count


def _is_compressible(gradient: torch.Tensor) -> bool:
    return count_sent_elements(gradient.shape) < gradient.numel()
