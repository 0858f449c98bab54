"""Check that a user's attention can be sharded by heads.

The module's forward runs on a few random rows in this process, up to the layer that takes the heads' results. First
queries, keys and values are a plain tensor, then each rank's shard. A mesh without process groups suffices, since
independent heads need no communication, and any communication raises an error. A copy of the module runs, which shares
the parameters.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from dtkit._util.guard import run_guarded
from dtkit.strategies.tensor.attention import NUM_QKV, make_fused_qkv, register_attention_sharding
from dtkit.strategies.tensor.linear import count_features

if TYPE_CHECKING:
    from collections.abc import Callable

_TRIAL_ROWS, _TRIAL_LENGTH = 3, 2
_TOLERANCE = 0.05
"""Relative and large, since bfloat16 has 8 bits. Wrong shards differ by about 1."""


def explain_unsplittable(module: nn.Module, qkv_layer: str, output_layer: str, tp_size: int) -> str:
    """Return why `module` can't be sharded between its layers `qkv_layer` and `output_layer`.

    Empty if it can.
    """
    return run_guarded(
        lambda: _explain_unsplittable(module, qkv_layer, output_layer, tp_size),
        lambda error: _describe_failure(error, output_layer),
    )


def _explain_unsplittable(module: nn.Module, qkv_layer: str, output_layer: str, tp_size: int) -> str:
    layer = module.get_submodule(qkv_layer)
    weight = layer.get_parameter("weight")
    num_inputs, num_outputs = count_features(layer)
    if weight.is_meta:
        return "its parameters have no values, so its shards can't be checked"
    qkv = _make_random_input(weight, num_outputs).requires_grad_()
    rows = _make_random_input(weight, num_inputs)
    register_attention_sharding()
    with torch.random.fork_rng(devices=[]), implicit_replication():
        whole = _run_between(module, qkv_layer, output_layer, rows, qkv)
        used = _find_used_parameters(module, whole)
        if used:
            return f"{', '.join(used)} would get only a part of its gradient"
        for rank, parts in enumerate(zip(*(third.chunk(tp_size, -1) for third in qkv.chunk(NUM_QKV, -1)), strict=True)):
            mesh = _make_single_process_mesh(weight.device.type, tp_size, rank)
            shard = _run_between(module, qkv_layer, output_layer, rows, make_fused_qkv(torch.cat(parts, -1), mesh))
            if not _is_local_shard(shard, whole.chunk(tp_size, -1)[rank]):
                return "its forward computes something else with shards"
    return ""


def _describe_failure(error: Exception, output_layer: str) -> str:
    if "_dim_group" in str(error) or "process group" in str(error).lower():
        return f"its heads are not independent before {output_layer}"
    text = " ".join(str(error).split())
    return f"its forward fails with shards ({type(error).__name__}: {text[:120]})"


def _make_random_input(like: torch.Tensor, features: int) -> torch.Tensor:
    values = torch.randn(_TRIAL_ROWS, _TRIAL_LENGTH, features, generator=torch.Generator().manual_seed(features))
    return values.to(like)


def _make_single_process_mesh(device: str, tp_size: int, rank: int) -> DeviceMesh:
    """Return a mesh in which this process simulates one rank. The unique name prevents wrong caching in torch."""
    names = (f"trial{rank}",)
    return DeviceMesh(device, torch.arange(tp_size), mesh_dim_names=names, _init_backend=False, _rank=rank)


class _ConstantModule(nn.Module):
    """A module with a constant output."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output: Callable[[], torch.Tensor] = lambda: output

    def forward(self, *_args: Any) -> torch.Tensor:
        return self._output()


class _OutputLayerReached(Exception):  # noqa: N818 - not an error, but the exit of the user's forward
    """Carries the input of the output layer."""


class _StopAtOutputLayer(nn.Module):
    def forward(self, inputs: Any) -> None:
        raise _OutputLayerReached(inputs)


def _run_between(module: nn.Module, qkv_layer: str, output_layer: str, inputs: torch.Tensor, qkv: torch.Tensor) -> Any:
    """Return the input of `output_layer` if `qkv_layer` returns `qkv`."""
    copied = copy.deepcopy(module, {id(p): p for p in module.parameters()}).eval()
    setattr(copied, qkv_layer, _ConstantModule(qkv))
    setattr(copied, output_layer, _StopAtOutputLayer())
    try:
        copied(inputs)
    except _OutputLayerReached as reached:
        return reached.args[0]
    raise RuntimeError(f"it does not reach {output_layer}")


def _find_used_parameters(module: nn.Module, whole: torch.Tensor) -> list[str]:
    """Return other parameters that the result depends on: each rank would get only a part of their gradients."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named or not whole.requires_grad:
        return []
    gradients = torch.autograd.grad(whole.sum(), list(named.values()), allow_unused=True)
    return [name for name, gradient in zip(named, gradients, strict=True) if gradient is not None]


def _is_local_shard(actual: Any, expected: torch.Tensor) -> bool:
    """Return whether this is a DTensor sharded by features with the expected local part."""
    if not isinstance(actual, DTensor) or actual.placements != (Shard(actual.dim() - 1),):
        return False
    local = actual.to_local()
    tolerance = _TOLERANCE * float(expected.detach().abs().max())
    return local.shape == expected.shape and bool((local - expected).detach().abs().max() <= tolerance)
