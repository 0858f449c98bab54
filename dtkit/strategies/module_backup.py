"""Copy of what a step's forward passes write into modules: buffers, and plain numbers such as counts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from dtkit._util.torch_private import NormBase, foreach_copy_
from dtkit.engine.state.dtensor_shards import get_local_tensor
from dtkit.strategies.module_numbers import assign_numbers, find_changes, list_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.strategies.module_numbers import Number

_MAX_BYTES = 16 * 2**20
_WATCHED_STEPS = 2  # a list of all numbers takes longer than many a step


class ModuleBackup:
    """Copy of a model's buffers and numbers at the beginning of a step.

    Two things are left out. One is a buffer of more than 16 MiB outside of norm layers. The other is a number that
    changes for the first time after the first two steps.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._slots = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if isinstance(module, NormBase) or buffer.nbytes <= _MAX_BYTES
        ]
        self._buffers: list[torch.Tensor | None] = []
        self._live: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._numbers: dict[str, Number] = {}
        self._num_watched = 0
        self._counts: set[str] = set()  # names of the numbers that changed in a watched step

    def save(self) -> None:
        """Copy the buffers and numbers."""
        if self._slots:
            self._save_buffers()
        if self._num_watched <= _WATCHED_STEPS:
            self._counts |= find_changes(self._model, self._numbers).keys() if self._num_watched else set()
            self._numbers = list_numbers(self._model)
            self._num_watched += 1
        elif self._counts:
            numbers = list_numbers(self._model)
            self._numbers = {name: numbers[name] for name in self._counts & numbers.keys()}
        else:
            self._numbers = {}

    def _save_buffers(self) -> None:
        buffers = [getattr(owner, name, None) for owner, name in self._slots]
        if len(buffers) != len(self._buffers) or any(b is not a for a, b in zip(self._buffers, buffers, strict=True)):
            self._buffers = buffers
            self._live = [get_local_tensor(b.detach()) for b in buffers if b is not None]
            self._copies = [torch.empty_like(tensor) for tensor in self._live]
        foreach_copy_(self._copies, self._live)

    def restore(self) -> None:
        """Undo all changes since the last copy. Buffers that were replaced are in the model again."""
        for (owner, name), buffer in zip(self._slots, self._buffers, strict=True):
            if getattr(owner, name, None) is not buffer:
                setattr(owner, name, buffer)
        for saved, live in zip(self._copies, self._live, strict=True):
            if not torch.equal(saved, live):  # some buffers can't be written, such as expanded ones
                live.copy_(saved)
        assign_numbers(self._model, self._numbers)


@contextlib.contextmanager
def undo_module_writes(model: torch.nn.Module) -> Iterator[None]:
    """Undo what forward passes within the context write into modules, so that a trial doesn't change the training.

    Some mixtures of experts store in evaluation how many tokens an expert takes, and use that number in training.
    """
    backup = ModuleBackup(model)
    backup.save()
    try:
        yield
    finally:
        backup.restore()
