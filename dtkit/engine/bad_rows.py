"""Rows of a batch with numbers that are not finite, or whose squares aren't.

They are looked for only after a step that was not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtkit.strategies.loss import get_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

_NUM_PARTS = 2


def describe_bad_rows(batches: Sequence[tuple[int, Any]], rows: np.ndarray | None) -> str:
    """Return which rows have NaN or infinite numbers in inputs or targets, as a clause; "" if none has.

    Without such rows, return those whose numbers have no finite square.

    `batches` are pairs of a number of samples and a batch. `rows` are their rows of the user's data, in order; None
    for a stream.
    """
    not_finite = _describe_rows(batches, rows, _is_not_finite, "{verb} not finite")
    return not_finite or _describe_rows(batches, rows, _is_too_large, "{have} numbers too large to square")


def describe_first_bad(batch: Any, rows: np.ndarray) -> str:
    """Return the first number of a batch that is not finite, as a clause; "" if all are finite."""
    for part, tensor, name in list_tensors(batch):
        if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(rows):
            for row, text in find_bad_rows(tensor, _is_not_finite(tensor)):
                return f"a number in the {part} of row {int(rows[row])} ({name}{text}) is not finite"
    return ""


def _describe_rows(
    batches: Sequence[tuple[int, Any]],
    rows: np.ndarray | None,
    find_bad: Callable[[torch.Tensor], torch.Tensor],
    problem: str,
) -> str:
    found: dict[str, list[tuple[int, str]]] = {}
    start = num_samples = 0
    for count, batch in batches:
        num_samples += count
        for part, tensor, name in list_tensors(batch):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == count:
                found.setdefault(part, []).extend(
                    (start + k, name + text) for k, text in find_bad_rows(tensor, find_bad(tensor))
                )
        start += count
    return "; ".join(_describe(part, bad, num_samples, rows, problem) for part, bad in found.items() if bad)


def list_tensors(batch: Any) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield ("inputs" or "targets", tensor, its name with a comma where there are several) of a batch."""
    labels = get_labels(batch)
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                yield "targets" if value is labels else "inputs", value, f"{key!r}, "
    elif isinstance(batch, torch.Tensor):
        yield "inputs", batch, ""
    elif isinstance(batch, Sequence):
        for k, value in enumerate(batch):
            is_target = k == len(batch) - 1 and k > 0
            if isinstance(value, torch.Tensor):
                name = f"array {k}, " if len(batch) > _NUM_PARTS and not is_target else ""
                yield "targets" if is_target else "inputs", value, name


def _is_not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(tensor)


def _is_too_large(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a squared loss would overflow. Half precision is too narrow for this to be a mistake."""
    if tensor.dtype is torch.float16:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return tensor.abs() > math.sqrt(torch.finfo(tensor.dtype).max)


def find_bad_rows(tensor: torch.Tensor, is_bad: torch.Tensor) -> Iterator[tuple[int, str]]:
    """Yield (row, first bad position and its number) for each row that has one."""
    for row in is_bad.reshape(len(tensor), -1).any(1).nonzero().flatten().tolist():
        position = is_bad[row].nonzero()[0].tolist() if tensor.dim() > 1 else []
        number = float(tensor[(row, *position)])
        shown = f"{number:g}"
        dtype = "" if math.isnan(number) else f" as {str(tensor.dtype).removeprefix('torch.')}"
        where = f"column {position[0]}" if len(position) == 1 else f"position {tuple(position)}" if position else ""
        yield row, f"{where}: {shown}{dtype}" if where else f"{shown}{dtype}"


def _describe(
    part: str, bad: Sequence[tuple[int, str]], num_samples: int, rows: np.ndarray | None, problem: str
) -> str:
    first = min(row for row, _ in bad)
    text = next(text for row, text in bad if row == first)
    num_bad = len({row for row, _ in bad})
    name = f"sample {first} of this step" if rows is None or first >= len(rows) else f"row {int(rows[first])}"
    verb, have = ("is", "has") if num_bad == 1 else ("are", "have")
    counted = f"{num_bad} of this rank's {num_samples} rows of the step {problem.format(verb=verb, have=have)}"
    return f"in the {part}, {counted}, {'namely' if num_bad == 1 else 'the first is'} {name} ({text})"
