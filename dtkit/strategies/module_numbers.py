"""Plain numbers that modules have as attributes, such as a count of forward passes or a temperature.

A module's state dict lacks them. A rank with fewer forward passes than others would have another count, and so compute
with another model. A number may also come from a rank's samples, such as the mean of its last batch. It is left alone:
ranks with as many passes have others then.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from dtkit.engine.comm.process_group import Group

Number = bool | int | float
_OWN_ATTRIBUTES = ("training",)  # of torch's modules


def list_numbers(model: torch.nn.Module) -> dict[str, Number]:
    """Return the numbers by name, such as ``encoder.num_forwards``."""
    return {
        f"{name}.{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if type(value) in (bool, int, float) and attribute not in _OWN_ATTRIBUTES
    }


def compute_number_checksum(model: torch.nn.Module) -> int:
    """Return the CRC-32 of all numbers."""
    return zlib.crc32(repr(list_numbers(model)).encode())


def find_changes(model: torch.nn.Module, before: Mapping[str, Number]) -> dict[str, Number]:
    """Return the numbers that differ from earlier ones."""
    return {name: value for name, value in list_numbers(model).items() if before.get(name) != value}


def assign_numbers(model: torch.nn.Module, numbers: Mapping[str, Number]) -> None:
    """Set numbers by name. Modules that don't exist here are left out."""
    modules = dict(model.named_modules())
    for name, value in numbers.items():
        module, _, attribute = name.rpartition(".")
        if module in modules:
            modules[module].__dict__[attribute] = value


def follow_numbers(
    model: torch.nn.Module,
    before: Mapping[str, Number],
    source: int,
    *,
    has_most: bool,
    group: Group,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Give all ranks the changes of rank `source`, one of those with most forward passes. A collective.

    A number follows from the passes alone if all ranks had the same `before`, and all with most passes have the same
    now. `has_most` says whether this rank is one of these.
    """
    now = list_numbers(model)
    changed = {name: (before.get(name), value) for name, value in find_changes(model, before).items()}
    changed = group.broadcast_json(changed, source, process_group)
    differs = [
        before.get(name) != earlier or (has_most and now.get(name) != later)
        for name, (earlier, later) in changed.items()
    ]
    votes = group.all_reduce(torch.tensor(differs, dtype=torch.int64), process_group).tolist() if differs else []
    assign_numbers(
        model, {name: later for (name, (_, later)), vote in zip(changed.items(), votes, strict=True) if not vote}
    )
