"""All or nothing: what is left of a step that failed on the way.

A step changes parameters and optimiser, random numbers, and the statistics of batch normalisation. Until the optimiser
begins, all that was done can be undone, since it is random numbers and statistics only: both are kept from before.
Once the optimiser has ended, the step counts, whatever fails after it. Between the two an interrupt is held back, so
that only an optimiser that fails by itself, or the end of the process, can leave a model torn between two steps; such a
model is marked, and is never the one that others are repaired from.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Attempt:
    """The step that is being taken."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        modules = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._statistics = [b for module in modules for b in module.buffers(recurse=False)]
        self._kept = [torch.empty_like(b) for b in self._statistics]
        self.updating = self.updated = False
        """Whether the optimiser has begun; whether it has ended."""
        self._interrupted = False
        self._before: Any = signal.default_int_handler
        self.over = False
        """Whether it ends now, well or not: an interrupt waits too. Set without a call, before which one would come."""
        optimizer.register_step_pre_hook(self._enter)
        optimizer.register_step_post_hook(self._leave)

    def _enter(self, *_: object) -> None:
        self.updating = True

    def _leave(self, *_: object) -> None:
        self.updated = True

    @property
    def torn(self) -> bool:
        """Whether the optimiser has begun and not ended."""
        return self.updating and not self.updated

    def begin(self) -> None:
        """Keep what can be undone."""
        self.updating = self.updated = self.over = False
        self._random = torch.get_rng_state()
        self._cuda = None if self._device is None else torch.cuda.get_rng_state(self._device)
        for kept, own in zip(self._kept, self._statistics, strict=True):
            kept.copy_(own)

    def undo(self) -> None:
        """As if the step had not been begun. Only before the optimiser has begun."""
        assert not self.updating
        torch.set_rng_state(self._random)
        if self._cuda is not None and self._device is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        for kept, own in zip(self._kept, self._statistics, strict=True):
            own.detach().copy_(kept)

    def end(self) -> None:
        """The step counts from here on. An interrupt that was held back comes now."""
        self.updating = self.updated = self.over = False
        if self._interrupted:
            self._interrupted = False
            self._before(signal.SIGINT, None)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """While it lasts, SIGINT waits from the optimiser's beginning to the step's end. In the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._interrupted = self.over = False
        self._before = signal.signal(signal.SIGINT, self._hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._before)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.updating or self.over:
            self._interrupted = True
        else:
            self._before(number, frame)
