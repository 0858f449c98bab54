"""Compression of gradients: hooks that replace DDP's plain all-reduce of a bucket.

"fp16" and "bf16" send half of float32's bytes, rounded to 11 and 8 bits. "powersgd" sends two thin matrices instead of
each wide one: see :mod:`dtkit.strategies.powersgd`. All of them return the *sum* over ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from dtkit.strategies import powersgd
from dtkit.strategies.powersgd import PowerSGD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.planning.cost_model import ModelProfile

    Hook = Callable[[Any], torch.futures.Future[torch.Tensor]]

COMPRESSION_METHODS = ("fp16", "bf16", "powersgd")


def make_comm_hook(method: str | None, group: Group) -> Hook:
    """Return a function that starts to sum a bucket of gradients over ranks."""
    if method is None:
        return lambda bucket: group.start_all_reduce(bucket.buffer()).then(_get_first_tensor)
    if method == "powersgd":
        return PowerSGD(group).launch_reduce
    return _make_cast_hook(group, torch.float16 if method == "fp16" else torch.bfloat16)


def visit_hook_state(comm_hook: Hook, visitor: StateVisitor, named_parameters: Mapping[str, torch.Tensor]) -> None:
    """Visit the state that a hook keeps between steps, if any."""
    compressor = getattr(comm_hook, "__self__", None)
    if isinstance(compressor, PowerSGD):
        compressor.visit_state(visitor, named_parameters)


def estimate_compression(method: str | None, profile: ModelProfile) -> tuple[int, int, int]:
    """Return one rank's bytes of (gradients to reduce, state kept between steps, temporary tensors)."""
    whole = profile.gradients
    if method is None or not whole:
        return whole, 0, 0
    item = whole // sum(math.prod(shape) for shape in profile.gradient_shapes)
    if method != "powersgd":
        half = whole * 2 // item
        return half, 0, half
    thin = sum(item * powersgd.count_sent_elements(shape) for shape in profile.gradient_shapes)
    return thin, whole + thin, 2 * thin  # error feedback and the factors


def _get_first_tensor(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _make_cast_hook(group: Group, dtype: torch.dtype) -> Hook:
    def launch(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        return group.start_all_reduce(buffer.to(dtype)).then(lambda future: buffer.copy_(future.value()[0]))

    return launch
