"""Index of a checkpoint: where each part of each tensor is, and the merged facts of all ranks."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}


def intersect(
    begin: Sequence[int], size: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of a piece at `begin` and a part at `offset`, as slices of both; None if empty."""
    piece_slices, part_slices = [], []
    for b, n, o, m in zip(begin, size, offset, shape, strict=True):
        first, last = max(b, o), min(b + n, o + m)
        if first >= last:
            return None
        piece_slices.append(slice(first - b, last - b))
        part_slices.append(slice(first - o, last - o))
    return tuple(piece_slices), tuple(part_slices)


def shift_slices(slices: tuple[slice, ...], start: Sequence[int]) -> tuple[slice, ...]:
    """Return the same part of a tensor that begins at `start`."""
    return tuple(slice(s.start + first, s.stop + first) for s, first in zip(slices, start, strict=True))


def build_index(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {tensor: dtype, shape, pieces} from the reports of all ranks.

    A piece is [file number, begin in the tensor, shape]. A fourth entry is where the piece begins in the file's tensor
    of that name, unless it is 0 everywhere.
    """
    index: dict[str, Any] = {}
    for number, report in enumerate(reports):
        for name, (dtype, shape, blocks) in report["shards"].items():
            entry = index.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
            entry["pieces"] += [
                [number, begin, size, *([start] if any(start) else [])] for begin, size, start in blocks
            ]
    return index


def is_fully_covered(entry: Mapping[str, Any], num_files: int) -> bool:
    """Return whether a tensor's pieces lie within it and have as many elements together."""
    shape, pieces = entry["shape"], entry["pieces"]
    if entry["dtype"] not in _DTYPE_BYTES or not all(file in range(num_files) for file, *_ in pieces):
        return False
    is_inside = all(
        len(begin) == len(size) == len(shape)
        and all(min(b, n) >= 0 and b + n <= whole for b, n, whole in zip(begin, size, shape, strict=True))
        and (not starts or (len(starts) == 1 and len(starts[0]) == len(shape) and min(starts[0]) >= 0))
        for _, begin, size, *starts in pieces
    )
    return bool(is_inside and sum(math.prod(size) for _, _, size, *_ in pieces) == math.prod(shape))


def merge_facts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the facts of all ranks. Plain values are equal on all of them; optimizers of parts are joined."""
    merged: dict[str, Any] = {"layout": parts[0]["layout"]} | {
        key: {} for key in ("values", "aliases", "extra", "per_rank", "frozen")
    }
    optimizers: dict[str, list[Any]] = {}
    for part in parts:
        for key in ("values", "extra", "per_rank", "frozen"):
            merged[key].update(part[key])
        for prefix, names in part["aliases"].items():
            merged["aliases"].setdefault(prefix, {}).update(names)
        for prefix, optimizer in part["optimizers"].items():
            optimizers.setdefault(prefix, []).append(optimizer)
    return merged | {"optimizers": {prefix: _merge_optimizers(parts) for prefix, parts in optimizers.items()}}


def _merge_optimizers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join optimizers of parts of a model: groups with equal options become one group."""
    state: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for part in parts:
        state.update(part["state"])
        for group in part["groups"]:
            key = json.dumps(group["options"], sort_keys=True)
            names = groups.setdefault(key, {"options": group["options"], "params": {}})["params"]
            names.update(dict.fromkeys(group["params"]))
    merged = [{"options": group["options"], "params": list(group["params"])} for group in groups.values()]
    return {"class": parts[0]["class"], "groups": merged, "state": state}
