"""Fewer bytes for the same gradients: what DDP does with a bucket in place of a plain all-reduce.

"fp16" and "bf16" send half of float32's bytes, rounded to 11 and 8 bits. "powersgd" sends two thin matrices in place
of each wide one (Vogels et al., NeurIPS 2019), and gives what it left out to the next step. All of them end in the
*sum* over ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.comm import Group
    from dtkit.plan import Facts

    Hook = Callable[[Any], torch.futures.Future[torch.Tensor]]

_RANK, _LEAST_RATE = 2, 2
METHODS = ("fp16", "bf16", "powersgd")


def hook(method: str | None, group: Group) -> Hook:
    """What to do with a bucket of gradients: start to sum it over ranks."""
    if method is None:
        return lambda bucket: group.start_all_reduce(bucket.buffer()).then(_first)
    if method == "powersgd":
        return _powersgd(group)
    return _rounded(group, torch.float16 if method == "fp16" else torch.bfloat16)


def costs(method: str | None, facts: Facts) -> tuple[int, int, int]:
    """(bytes of gradients to reduce, bytes kept from step to step, bytes held besides) on one rank."""
    whole = facts.gradients
    if method is None or not whole:
        return whole, 0, 0
    item = whole // sum(math.prod(shape) for shape in facts.shapes)
    if method != "powersgd":
        half = whole * 2 // item
        return half, 0, half
    thin = sum(item * _thin(shape) for shape in facts.shapes)
    return thin, whole + thin, whole  # what was left out, and warm starts; a copy of the bucket


def _thin(shape: Sequence[int]) -> int:
    """Numbers that PowerSGD sends for a gradient: two matrices of `_RANK` columns where that is far less."""
    count = math.prod(shape)
    if len(shape) < 2:
        return count
    rows = shape[0]
    both = (rows + count // rows) * _RANK
    return both if both * _LEAST_RATE < count else count


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _rounded(group: Group, dtype: torch.dtype) -> Hook:
    def launch(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        return group.start_all_reduce(buffer.to(dtype)).then(lambda future: buffer.copy_(future.value()[0]))

    return launch


def _powersgd(group: Group) -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    # Two plain steps come first, as warm start and error feedback ask; matrices that would not shrink go plain.
    state = power.PowerSGDState(
        None, matrix_approximation_rank=_RANK, start_powerSGD_iter=2, min_compression_rate=_LEAST_RATE
    )

    def launch(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        mean: Any = power.powerSGD_hook(state, bucket)
        return mean.then(lambda future: future.value().mul_(group.world_size))  # type: ignore[no-any-return]

    return launch
