"""Modules whose training differs by nature between one process and several, for `verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from dtkit._util.torch_private import BatchNormBase, DropoutBase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_NAMES = 2  # modules named in one line


def summarize_modules(model: nn.Module, *, num_replicas: int = 2, is_pipeline: bool = False) -> tuple[str, ...]:
    """Return a line for each kind of module whose training differs between one process and several by nature."""
    names_by_kind: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in find_incomparable_modules(model, num_replicas=num_replicas, is_pipeline=is_pipeline):
        names_by_kind.setdefault((kind, reason), []).append(name or "the model")
    return tuple(f"{_format_names(names)} ({kind}): {reason}" for (kind, reason), names in names_by_kind.items())


def _format_names(names: Sequence[str]) -> str:
    others = len(names) - _MAX_NAMES
    return ", ".join(names) if others <= 0 else f"{', '.join(names[:_MAX_NAMES])} and {others} more"


def find_incomparable_modules(
    model: nn.Module, *, num_replicas: int = 2, is_pipeline: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, kind, reason) of the modules whose training differs between one process and several by nature.

    BatchNorm is none of them if the ranks of one replica normalize the whole batch together.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, BatchNormBase) and not isinstance(module, nn.SyncBatchNorm):
            if num_replicas > 1:
                yield name, kind, "each rank normalizes with the statistics of its own part of the batch"
            elif is_pipeline:
                yield name, kind, "its statistics include the copies that fill up a micro-batch with fewer samples"
        elif isinstance(module, DropoutBase) and module.p > 0:
            yield name, kind, "each rank draws its own random numbers"
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0:
            yield name, kind, f"dropout={module.dropout}, for which each rank draws its own random numbers"
        elif isinstance(module, nn.RReLU):
            yield name, kind, "each rank draws its own random slopes"
