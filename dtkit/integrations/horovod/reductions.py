"""Reduction operations, and their scaling by factors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# These are Horovod's numbers, which scripts may have stored.
Average, Sum, Adasum, Min, Max, Product = range(6)

_NAMES = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}
_TORCH_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_FUNCTIONS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Average: torch.add,
    Sum: torch.add,
    Min: torch.minimum,
    Max: torch.maximum,
    Product: torch.mul,
}


def resolve_op(op: int | None, average: bool | None = None) -> int:
    """Return the operation for `op` or the old flag `average`, Average by default. Raise ValueError for both."""
    if op is not None and average is not None:
        raise ValueError("give either op or average, not both; average is the old name for op=Average or op=Sum")
    if op is None:
        op = Average if average or average is None else Sum
    if op == Adasum:
        raise NotImplementedError("Adasum is not supported; use op=hvd.Average with a scaled learning rate")
    if op not in _NAMES:
        raise ValueError(f"op is {op!r}; use Average, Sum, Min, Max or Product of this module")
    return op


def get_name(op: int) -> str:
    """Return the name of an operation."""
    return _NAMES[op]


def get_torch_op(op: int) -> dist.ReduceOp.RedOpType:
    """Return torch's operation. An average is a sum, which `finish` divides."""
    return _TORCH_OPS[op]


def reduce_parts(op: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce tensors of this process in their order. An average is a sum, which `finish` divides."""
    return functools.reduce(_FUNCTIONS[op], parts)


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place. Integers are multiplied in float64 and truncated; half precision on CPUs is multiplied in
    float32.
    """
    if factor == 1.0:
        return
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.copy_(tensor.double() * factor)
    elif tensor.dtype == torch.float16 and not tensor.is_cuda:
        tensor.copy_(tensor.float() * factor)
    else:
        tensor.mul_(factor)


def finish(tensor: torch.Tensor, op: int, world_size: int, factor: float) -> None:
    """Divide an average by the number of ranks, and scale. Integers are truncated."""
    if op == Average:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(world_size)
        else:
            tensor.div_(world_size, rounding_mode="trunc")
    scale(tensor, factor)
