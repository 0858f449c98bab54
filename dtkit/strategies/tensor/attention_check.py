"""Whether a user's attention computes by heads what it computes whole: tried before a plan says that it is cut.

Its own forward runs on a few made-up rows, up to the layer that takes what the heads found, in the process that asks
and without any other. First with queries, keys and values as a plain tensor, then as each rank would have them: a
mesh without process groups is enough for that, since heads that are cut well need nothing of other ranks, and what
does need them fails. Nothing of the module is changed: a copy runs, which shares the parameters.
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

if TYPE_CHECKING:
    from collections.abc import Callable

_TRIAL_ROWS, _TRIAL_LENGTH = 3, 2
_TOLERANCE = 0.05
"""Relative, and much: a bfloat16 has 8 bits. What is cut where it must not be is wrong by as much as it is large."""


def explain_unsplittable(module: nn.Module, qkv_layer: str, output_layer: str, tp_size: int) -> str:
    """Why `module` can't compute in parts what lies between its layers `first` (queries, keys, values) and `last`.

    Empty where it can.
    """
    return run_guarded(
        lambda: _explain_unsplittable(module, qkv_layer, output_layer, tp_size),
        lambda error: _describe_failure(error, output_layer),
    )


def _explain_unsplittable(module: nn.Module, qkv_layer: str, output_layer: str, tp_size: int) -> str:
    layer = module.get_submodule(qkv_layer)
    assert isinstance(layer, nn.Linear)
    if layer.weight.is_meta:
        return "its parameters have no numbers, so that it can't be tried in slices"
    made = _make_random_input(layer, layer.out_features).requires_grad_()
    rows = _make_random_input(layer, layer.in_features)
    register_attention_sharding()
    with torch.random.fork_rng(devices=[]), implicit_replication():
        whole = _run_between(module, qkv_layer, output_layer, rows, made)
        used = _find_used_parameters(module, whole)
        if used:
            return f"{', '.join(used)} would have a part of its gradient only"
        for rank, parts in enumerate(
            zip(*(third.chunk(tp_size, -1) for third in made.chunk(NUM_QKV, -1)), strict=True)
        ):
            mesh = _make_single_process_mesh(layer.weight.device.type, tp_size, rank)
            found = _run_between(module, qkv_layer, output_layer, rows, make_fused_qkv(torch.cat(parts, -1), mesh))
            if not _is_local_shard(found, whole.chunk(tp_size, -1)[rank]):
                return "in slices its forward computes something else"
    return ""


def _describe_failure(error: Exception, output_layer: str) -> str:
    if "_dim_group" in str(error) or "process group" in str(error).lower():
        return f"its heads meet before {output_layer}"
    text = " ".join(str(error).split())
    return f"its forward can't be tried in slices ({type(error).__name__}: {text[:120]})"


def _make_random_input(layer: nn.Linear, features: int) -> torch.Tensor:
    numbers = torch.randn(_TRIAL_ROWS, _TRIAL_LENGTH, features, generator=torch.Generator().manual_seed(features))
    return numbers.to(layer.weight)


def _make_single_process_mesh(device: str, tp_size: int, rank: int) -> DeviceMesh:
    """Ranks that this process takes the part of one of; the name keeps torch from taking one for another."""
    names = (f"trial{rank}",)
    return DeviceMesh(device, torch.arange(tp_size), mesh_dim_names=names, _init_backend=False, _rank=rank)


class _ConstantModule(nn.Module):
    """Has its output already."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output: Callable[[], torch.Tensor] = lambda: output

    def forward(self, *_args: Any) -> torch.Tensor:
        return self._output()


class _OutputLayerReached(Exception):  # noqa: N818 - no error, but the way out of the user's forward
    """What the last layer would get."""


class _StopAtOutputLayer(nn.Module):
    def forward(self, inputs: Any) -> None:
        raise _OutputLayerReached(inputs)


def _run_between(module: nn.Module, qkv_layer: str, output_layer: str, inputs: torch.Tensor, qkv: torch.Tensor) -> Any:
    """What arrives at `last`, where `first` has made `made`."""
    alike = copy.deepcopy(module, {id(p): p for p in module.parameters()}).eval()
    setattr(alike, qkv_layer, _ConstantModule(qkv))
    setattr(alike, output_layer, _StopAtOutputLayer())
    try:
        alike(inputs)
    except _OutputLayerReached as arrived:
        return arrived.args[0]
    raise RuntimeError(f"it does not come to {output_layer}")


def _find_used_parameters(module: nn.Module, whole: torch.Tensor) -> list[str]:
    """Other parameters that have a say in what arrives: each rank would have its heads' part of their gradients."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named or not whole.requires_grad:
        return []
    found = torch.autograd.grad(whole.sum(), list(named.values()), allow_unused=True)
    return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


def _is_local_shard(actual: Any, expected: torch.Tensor) -> bool:
    """Whether this is a tensor cut by features, of which this part lies here."""
    if not isinstance(actual, DTensor) or actual.placements != (Shard(actual.dim() - 1),):
        return False
    here = actual.to_local()
    near = _TOLERANCE * float(expected.detach().abs().max())
    return here.shape == expected.shape and bool((here - expected).detach().abs().max() <= near)
