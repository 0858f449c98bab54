"""Copy of the frozen parameters that a user's step writes to, such as those of a momentum teacher.

A copy of all would take too much memory for a large model with a small adapter. So a step copies only those parameters
that an earlier step has written. torch counts most writes. Writes to ``.data`` show only in the values, which are
compared in the first two steps, if all frozen parameters together are small.
"""

from __future__ import annotations

import torch

from dtkit._util.torch_private import count_inplace_writes, foreach_copy_
from dtkit.engine.state.dtensor_shards import get_local_tensor

_MAX_BYTES, _MAX_TOTAL_BYTES = 16 * 2**20, 64 * 2**20
_WATCHED_STEPS = 2


class FrozenBackup:
    """Copy of the frozen parameters that steps write to, at the beginning of a step.

    Parameters of more than 16 MiB are left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if not p.requires_grad]
        self._is_small = sum(p.nbytes for p in self._parameters) <= _MAX_TOTAL_BYTES
        self._num_watched = 0
        self._marks: list[tuple[int, int]] = []
        self._written: set[int] = set()
        self._copies: dict[int, torch.Tensor] = {}

    def begin_dispatch(self) -> None:
        """Find the parameters that have been written since the last time."""
        if not self._parameters:
            return
        marks = [_mark(p) for p in self._parameters]
        changed = {k for k, (now, before) in enumerate(zip(marks, self._marks, strict=False)) if now != before}
        if self._num_watched <= _WATCHED_STEPS:
            changed |= {k for k, saved in self._copies.items() if not torch.equal(saved, self._get_values(k))}
        self._written |= {k for k in changed if self._parameters[k].nbytes <= _MAX_BYTES}
        self._marks = marks

    def save(self) -> None:
        """Copy the parameters."""
        if not self._parameters:
            return
        is_watched = self._num_watched <= _WATCHED_STEPS
        if is_watched:
            self.begin_dispatch()
            self._num_watched += 1
        indices = range(len(self._parameters)) if is_watched and self._is_small else sorted(self._written)
        values = {k: self._get_values(k) for k in indices}
        self._copies = {k: self._copies.get(k, torch.empty_like(value)) for k, value in values.items()}
        if values:
            foreach_copy_(list(self._copies.values()), list(values.values()))

    def restore(self) -> bool:
        """Undo all writes since the last copy. Return False if a parameter was written that wasn't copied."""
        for k, saved in self._copies.items():
            if not torch.equal(saved, self._get_values(k)):
                self._get_values(k).copy_(saved)
        rest = set(range(len(self._marks))) - self._copies.keys()
        return all(_mark(self._parameters[k]) == self._marks[k] for k in rest)

    def _get_values(self, index: int) -> torch.Tensor:
        return get_local_tensor(self._parameters[index].detach())


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Return numbers of which one changes with a write, except with one to ``.data``."""
    return count_inplace_writes(parameter), get_local_tensor(parameter.detach()).data_ptr()
