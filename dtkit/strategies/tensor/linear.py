"""Linear layers: torch's, and the Conv1D of Hugging Face's GPT2, which stores its weight the other way around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module multiplies by a matrix, and adds a bias."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module | None) -> bool:
    """Return whether this is transformers' Conv1D, whose weight has the shape (inputs, outputs)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def count_features(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of (inputs, outputs) of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = module.get_parameter("weight").shape
    return inputs, outputs


class Conv1DParallel(ParallelStyle):
    """Style for a Conv1D with sharded outputs, or with sharded inputs."""

    def __init__(self, *, shards_outputs: bool, input_layout: Placement, output_layout: Placement) -> None:
        """`input_layout` is that of the given input, and `output_layout` that of the result, which is local."""
        self._shards_outputs = shards_outputs
        self._input_layout, self._output_layout = input_layout, output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._shard_parameters, self._prepare_input, self._prepare_output)

    def _shard_parameters(self, _name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
        for name, p in list(layer.named_parameters(recurse=False)):
            if name == "weight":
                placement: Placement = Shard(1) if self._shards_outputs else Shard(0)
            else:
                placement = Shard(0) if self._shards_outputs else Replicate()
            sharded = distribute_tensor(p, mesh, [placement], src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(sharded, p.requires_grad))

    def _prepare_input(self, _module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        first, *rest = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [self._input_layout], run_check=False)
        needed = Replicate() if self._shards_outputs else Shard(first.dim() - 1)
        return (first.redistribute(mesh, [needed]), *rest)

    def _prepare_output(self, _module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(mesh, [self._output_layout]).to_local()


def make_conv1d_style(style: str) -> Conv1DParallel:
    """Return the style for a name of :mod:`dtkit.strategies.tensor.plan`."""
    sharded, whole = Shard(-1), Replicate()
    styles: dict[str, tuple[bool, Placement, Placement]] = {
        "colwise": (True, whole, sharded),
        "gathered": (True, whole, whole),
        "rowwise": (False, sharded, whole),
        "scattered": (False, whole, whole),
    }
    shards_outputs, input_layout, returned = styles[style]
    return Conv1DParallel(shards_outputs=shards_outputs, input_layout=input_layout, output_layout=returned)
