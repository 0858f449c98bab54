"""Batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from dtkit._util.torch_private import BatchNormBase
from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.reductions import Sum
from dtkit.integrations.horovod.torch.operations import allreduce


class SyncBatchNorm(BatchNormBase):
    """Batch normalization over the batches of all ranks, on CPUs and GPUs. Batches may be unequal, but not all empty.

    Parameters are those of :class:`torch.nn.BatchNorm1d`; inputs have the shape (samples, channels, ...).
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's signature
        if input.dim() < 2:
            raise ValueError(f"the input has {input.dim()} dimensions; give at least 2, samples and channels")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's signature
        """Normalize each channel; in evaluation with the running statistics."""
        self._check_input_dim(input)
        has_own_statistics = self.training or not self.track_running_stats
        if not has_own_statistics or get_context().size == 1:
            return self._normalize_locally(input, has_own_statistics)
        dims = [0, *range(2, input.dim())]
        count = input.new_tensor([input.numel() / input.size(1)])
        # Two sums are used, since a sum of squares alone loses digits where the mean is large.
        sums = allreduce(torch.cat([input.sum(dims), count]), op=Sum)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centered = input - _align(mean, input)
        variance = allreduce(centered.square().sum(dims), op=Sum) / total
        if self.training and self.track_running_stats:
            self._update_running(mean.detach(), variance.detach() * total / (total - 1))
        result = centered * _align((variance + self.eps).rsqrt(), input)
        if self.affine:
            result = result * _align(self.weight, input) + _align(self.bias, input)
        return result

    def _normalize_locally(self, values: torch.Tensor, has_own_statistics: bool) -> torch.Tensor:
        momentum = self._count_batch() if self.training and self.track_running_stats else 0.0
        return F.batch_norm(
            values,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            has_own_statistics,
            momentum,
            self.eps,
        )

    def _count_batch(self) -> float:
        """Count the batch, and return its weight in the running statistics."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        weight = self._count_batch()
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def _align(per_channel: Any, values: torch.Tensor) -> torch.Tensor:
    """Return a vector over channels in a shape that broadcasts."""
    return per_channel.view(1, -1, *[1] * (values.dim() - 2))  # type: ignore[no-any-return]
