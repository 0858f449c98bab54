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

from dtkit._util.guard import attempt
from dtkit.strategies.tensor.attention import THREE, fused, teach_attention

if TYPE_CHECKING:
    from collections.abc import Callable

_ROWS, _LENGTH = 3, 2
_TOLERANCE = 0.05
"""Relative, and much: a bfloat16 has 8 bits. What is cut where it must not be is wrong by as much as it is large."""


def objection(module: nn.Module, first: str, last: str, ways: int) -> str:
    """Why `module` can't compute in parts what lies between its layers `first` (queries, keys, values) and `last`.

    Empty where it can.
    """
    return attempt(lambda: _objection(module, first, last, ways), lambda error: _failed(error, last))


def _objection(module: nn.Module, first: str, last: str, ways: int) -> str:
    layer = module.get_submodule(first)
    assert isinstance(layer, nn.Linear)
    if layer.weight.is_meta:
        return "its parameters have no numbers, so that it can't be tried in slices"
    made = _made_up(layer, layer.out_features).requires_grad_()
    rows = _made_up(layer, layer.in_features)
    teach_attention()
    with torch.random.fork_rng(devices=[]), implicit_replication():
        whole = _between(module, first, last, rows, made)
        used = _used(module, whole)
        if used:
            return f"{', '.join(used)} would have a part of its gradient only"
        for rank, parts in enumerate(zip(*(third.chunk(ways, -1) for third in made.chunk(THREE, -1)), strict=True)):
            mesh = _alone(layer.weight.device.type, ways, rank)
            found = _between(module, first, last, rows, fused(torch.cat(parts, -1), mesh))
            if not _is_part(found, whole.chunk(ways, -1)[rank]):
                return "in slices its forward computes something else"
    return ""


def _failed(error: Exception, last: str) -> str:
    if "_dim_group" in str(error) or "process group" in str(error).lower():
        return f"its heads meet before {last}"
    text = " ".join(str(error).split())
    return f"its forward can't be tried in slices ({type(error).__name__}: {text[:120]})"


def _made_up(layer: nn.Linear, features: int) -> torch.Tensor:
    numbers = torch.randn(_ROWS, _LENGTH, features, generator=torch.Generator().manual_seed(features))
    return numbers.to(layer.weight)


def _alone(device: str, ways: int, rank: int) -> DeviceMesh:
    """Ranks that this process takes the part of one of; the name keeps torch from taking one for another."""
    names = (f"trial{rank}",)
    return DeviceMesh(device, torch.arange(ways), mesh_dim_names=names, _init_backend=False, _rank=rank)


class _Given(nn.Module):
    """Has its output already."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output: Callable[[], torch.Tensor] = lambda: output

    def forward(self, *_args: Any) -> torch.Tensor:
        return self._output()


class _Arrived(Exception):  # noqa: N818 - no error, but the way out of the user's forward
    """What the last layer would get."""


class _End(nn.Module):
    def forward(self, arrived: Any) -> None:
        raise _Arrived(arrived)


def _between(module: nn.Module, first: str, last: str, rows: torch.Tensor, made: torch.Tensor) -> Any:
    """What arrives at `last`, where `first` has made `made`."""
    alike = copy.deepcopy(module, {id(p): p for p in module.parameters()}).eval()
    setattr(alike, first, _Given(made))
    setattr(alike, last, _End())
    try:
        alike(rows)
    except _Arrived as arrived:
        return arrived.args[0]
    raise RuntimeError(f"it does not come to {last}")


def _used(module: nn.Module, whole: torch.Tensor) -> list[str]:
    """Other parameters that have a say in what arrives: each rank would have its heads' part of their gradients."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not named or not whole.requires_grad:
        return []
    found = torch.autograd.grad(whole.sum(), list(named.values()), allow_unused=True)
    return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


def _is_part(found: Any, expected: torch.Tensor) -> bool:
    """Whether this is a tensor cut by features, of which this part lies here."""
    if not isinstance(found, DTensor) or found.placements != (Shard(found.dim() - 1),):
        return False
    here = found.to_local()
    near = _TOLERANCE * float(expected.detach().abs().max())
    return here.shape == expected.shape and bool((here - expected).detach().abs().max() <= near)
