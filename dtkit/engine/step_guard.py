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


class StepGuard:
    """The step that is being taken."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._cuda_device = device if device.type == "cuda" else None
        modules = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._norm_buffers = [b for module in modules for b in module.buffers(recurse=False)]
        self._saved_statistics = [torch.empty_like(b) for b in self._norm_buffers]
        self.update_started = self.update_done = False
        """Whether the optimiser has begun; whether it has ended."""
        self._sigint_pending = False
        self._previous_handler: Any = signal.default_int_handler
        self.is_ending = False
        """Whether it ends now, well or not: an interrupt waits too. Set without a call, before which one would come."""
        optimizer.register_step_pre_hook(self._on_update_start)
        optimizer.register_step_post_hook(self._on_update_end)

    def _on_update_start(self, *_: object) -> None:
        self.update_started = True

    def _on_update_end(self, *_: object) -> None:
        self.update_done = True

    @property
    def partially_updated(self) -> bool:
        """Whether the optimiser has begun and not ended."""
        return self.update_started and not self.update_done

    def begin_step(self) -> None:
        """Keep what can be undone."""
        self.update_started = self.update_done = self.is_ending = False
        self._cpu_rng_state = torch.get_rng_state()
        self._cuda_rng_state = None if self._cuda_device is None else torch.cuda.get_rng_state(self._cuda_device)
        for kept, own in zip(self._saved_statistics, self._norm_buffers, strict=True):
            kept.copy_(own)

    def roll_back(self) -> None:
        """As if the step had not been begun. Only before the optimiser has begun."""
        assert not self.update_started
        torch.set_rng_state(self._cpu_rng_state)
        if self._cuda_rng_state is not None and self._cuda_device is not None:
            torch.cuda.set_rng_state(self._cuda_rng_state, self._cuda_device)
        for kept, own in zip(self._saved_statistics, self._norm_buffers, strict=True):
            own.detach().copy_(kept)

    def commit_step(self) -> None:
        """The step counts from here on. An interrupt that was held back comes now."""
        self.update_started = self.update_done = self.is_ending = False
        if self._sigint_pending:
            self._sigint_pending = False
            self._previous_handler(signal.SIGINT, None)

    @contextlib.contextmanager
    def guard_sigint(self) -> Iterator[None]:
        """While it lasts, SIGINT waits from the optimiser's beginning to the step's end. In the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._sigint_pending = self.is_ending = False
        self._previous_handler = signal.signal(signal.SIGINT, self._handle_sigint)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._previous_handler)

    def _handle_sigint(self, signum: int, frame: FrameType | None) -> None:
        if self.update_started or self.is_ending:
            self._sigint_pending = True
        else:
            self._previous_handler(signum, frame)
