"""Torch's parallel styles for the names of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from dtkit.strategies.tensor.attention import FusedQKVParallel, MultiheadAttentionParallel
from dtkit.strategies.tensor.linear import is_conv1d, make_conv1d_style

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dtkit.strategies.tensor.plan import Style


def make_parallel_style(module: nn.Module, style: Style) -> ParallelStyle:
    """Return torch's style for a name of :mod:`dtkit.strategies.tensor.plan`."""
    if isinstance(style, ParallelStyle):
        return style
    if is_conv1d(module):
        return FusedQKVParallel(make_conv1d_style("colwise")) if style == "fused" else make_conv1d_style(style)
    whole = isinstance(module, nn.Embedding) or style == "scattered"
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "gathered": ColwiseParallel(output_layouts=Replicate()),
        "heads": MultiheadAttentionParallel()
        if isinstance(module, nn.MultiheadAttention)
        else ColwiseParallel(use_local_output=False),
        "fused": FusedQKVParallel(ColwiseParallel()),
        "loss": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        "rowwise": RowwiseParallel(input_layouts=Replicate() if whole else None),
        "scattered": RowwiseParallel(input_layouts=Replicate()),
        "sequence": _SequenceParallelNorm(),
    }
    return styles[style]


class _SequenceParallelNorm(ParallelStyle):
    """A normalization over features of this rank's part of the sequence. (torch's style expects a sharded input.)"""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module, device_mesh, self._replicate_parameters, self._shard_input, self._gather_output
        )

    @staticmethod
    def _replicate_parameters(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            copied = distribute_tensor(p, mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(copied, p.requires_grad))

    @staticmethod
    def _shard_input(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        first, *rest = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [Replicate()], run_check=False)
        return (first.redistribute(mesh, [Shard(1 if first.dim() > 2 else 0)]), *rest)

    @staticmethod
    def _gather_output(_module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(mesh, [Replicate()]).to_local()
