"""PowerSGD: two thin matrices instead of each wide gradient (Vogels et al., NeurIPS 2019).

A gradient of shape (n, m) is sent as factors of shapes (r, n) and (r, m) with r = `APPROXIMATION_RANK`. Their product
approximates the sum over ranks. Each rank adds the error of the approximation to its next gradient. Gradients that
would not shrink are sent whole.

torch's own hook starts collectives from callbacks. gloo runs these in several threads, so that their order may differ
between ranks, which aborts the process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.visitor import StateVisitor

APPROXIMATION_RANK = 2


class PowerSGD:
    """Sum of gradients over ranks by two collectives per step, both of them with the last bucket.

    This keeps the order of collectives equal on all ranks. Thin factors need no overlap with backward.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buckets: list[tuple[Any, torch.futures.Future[torch.Tensor]]] = []
        self._factorizations: dict[torch.Tensor, _LowRankFactorization] = {}

    def launch_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Add a bucket; its future gets the sum after the last bucket."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._buckets.append((bucket, done))
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            self._reduce_compressed(
                [pair for b, _ in buckets for pair in zip(b.parameters(), b.gradients(), strict=True)]
            )
            for ready_bucket, future in buckets:
                future.set_result(ready_bucket.buffer())
        return done

    @torch.no_grad()
    def _reduce_compressed(self, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        plain = [g for _, g in gradients if not _is_compressible(g)]
        wide = [(self._get_factorization(p, g), g.reshape(len(g), -1)) for p, g in gradients if _is_compressible(g)]
        left = [factorization.compute_left_factor(matrix) for factorization, matrix in wide]
        self._all_reduce([*plain, *left])
        left = [_orthogonalize_rows(part) for part in left]
        right = [part @ matrix for part, (_, matrix) in zip(left, wide, strict=True)]
        self._all_reduce(right)
        for (factorization, matrix), a, b in zip(wide, left, right, strict=True):
            factorization.reconstruct(matrix, a, b, self._group.world_size)

    def visit_state(self, visitor: StateVisitor, named_parameters: Mapping[str, torch.Tensor]) -> None:
        """Visit factors and errors. With a different number of ranks, each gets an equal share of the errors' sum."""
        wide = {
            name: self._get_factorization(p, p.detach())
            for name, p in named_parameters.items()
            if p.requires_grad and _is_compressible(p) and (p in self._factorizations or not visitor.is_saving)
        }
        if visitor.visit_tensors(
            "powersgd", {name: factorization.right_factor for name, factorization in wide.items()}
        ):
            errors = {name: factorization.error_feedback for name, factorization in wide.items()}
            visitor.per_rank_tensors("powersgd", errors, fraction=1 / visitor.world_size)
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
    """State of one gradient between steps. Thin matrices have few rows, which is faster in BLAS than few columns."""

    def __init__(self, matrix: torch.Tensor, seed: int) -> None:
        """Draw the first right factor; `seed` must be equal on all ranks."""
        start = torch.Generator().manual_seed(seed)
        self.right_factor = torch.randn(APPROXIMATION_RANK, matrix.shape[1], generator=start).to(matrix)
        self.error_feedback = torch.zeros_like(matrix)

    def compute_left_factor(self, matrix: torch.Tensor) -> torch.Tensor:
        """Add the last error to a gradient, and return its product with the last right factor."""
        matrix.add_(self.error_feedback)
        return _orthogonalize_rows(self.right_factor) @ matrix.T

    def reconstruct(self, matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, world_size: int) -> None:
        """Replace a gradient by the product of the summed factors, and keep this rank's error."""
        torch.addmm(matrix, left.T, right, alpha=-1 / world_size, out=self.error_feedback)
        torch.mm(left.T, right, out=matrix)
        if bool(right.isfinite().all()):
            self.right_factor = right
        else:  # the step updates nothing, and must not change later ones
            self.error_feedback.zero_()


def _orthogonalize_rows(rows: torch.Tensor) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(rows.T).Q
    return basis.T.contiguous()


def count_sent_elements(shape: Sequence[int]) -> int:
    """Return the number of elements sent for a gradient: thin factors if they have at most half of its elements."""
    count = math.prod(shape)
    thin = APPROXIMATION_RANK * (shape[0] + count // shape[0]) if len(shape) > 1 and shape[0] else count
    return thin if 2 * thin <= count else count


def _is_compressible(gradient: torch.Tensor) -> bool:
    return count_sent_elements(gradient.shape) < gradient.numel()
