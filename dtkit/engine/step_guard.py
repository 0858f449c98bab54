"""All or nothing: a step that fails is either undone or complete.

A step changes parameters and optimizer, states of random numbers, and buffers and plain numbers of modules. (torch's
generators are seeded in each step, so only numpy's and Python's have states.) User code may also write to frozen
parameters. Before the update, the other parameters and the optimizer are unchanged, and copies of the rest allow
undoing the step. After the update the step counts, even if something fails later. SIGINT during the update is
delivered after it. So few errors can leave a model partially updated: one in the optimizer, the end of the process,
or one after a write to a frozen parameter that was not copied. Such a model is marked, and other ranks never get its
state.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

from dtkit.engine.frozen_backup import FrozenBackup
from dtkit.engine.host_rng_backup import HostRngBackup
from dtkit.strategies.module_backup import ModuleBackup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    import torch


class StepGuard:
    """Guard of the current step."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._host_rng = HostRngBackup()
        self._watch(model)
        self.update_started = self.update_done = False
        """Whether the optimizer's step has started; whether it has ended."""
        self._sigint_pending = False
        self._previous_handler: Any = signal.default_int_handler
        self.defers_sigint = False
        """Whether the step is ending, so that SIGINT waits. A plain attribute, because SIGINT could
        interrupt a method call before it takes effect.
        """
        for each in (optimizer, *getattr(optimizer, "optimizers", ())):
            each.register_step_pre_hook(self._on_update_start)
        optimizer.register_step_post_hook(self._on_update_end)

    def _watch(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules, self._frozen = ModuleBackup(model), FrozenBackup(model)

    def begin_dispatch(self) -> None:
        """Find out what steps change, between two of them."""
        self._host_rng.begin_dispatch()
        self._frozen.begin_dispatch()

    def _on_update_start(self, *_: object) -> None:
        self.update_started = True

    def _on_update_end(self, *_: object) -> None:
        self.update_done = True

    @property
    def partially_updated(self) -> bool:
        """Return whether the update has started and not ended."""
        return self.update_started and not self.update_done

    def begin_step(self, model: torch.nn.Module) -> None:
        """Copy the state that must be restored after a failed step. The model may be another one than before."""
        if model is not self._model:
            self._watch(model)
        self.update_started = self.update_done = self.defers_sigint = False
        self._host_rng.save()
        self._modules.save()
        self._frozen.save()

    def roll_back(self) -> bool:
        """Undo the step. Return False if that isn't possible. The update must not have started."""
        assert not self.update_started
        self._host_rng.restore()
        self._modules.restore()
        return self._frozen.restore()

    def commit_step(self) -> None:
        """Complete the step, and deliver a delayed interrupt."""
        self.update_started = self.update_done = self.defers_sigint = False
        if self._sigint_pending:
            self._sigint_pending = False
            self._previous_handler(signal.SIGINT, None)

    @contextlib.contextmanager
    def guard_sigint(self) -> Iterator[None]:
        """Delay SIGINT from the update's start to the step's end, within the context. No-op outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._sigint_pending = self.defers_sigint = False
        self._previous_handler = signal.signal(signal.SIGINT, self._handle_sigint)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._previous_handler)

    def _handle_sigint(self, signum: int, frame: FrameType | None) -> None:
        if self.update_started or self.defers_sigint:
            self._sigint_pending = True
        else:
            self._previous_handler(signum, frame)
