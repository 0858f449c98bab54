"""Callbacks of ``cluster.train(callbacks=[...])``, called with the run after every epoch: `EarlyStopping`, and the
thread that calls them.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dtkit._util.arguments import suggest_arguments
from dtkit._util.guard import return_error, run_guarded_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.history.history import History
    from dtkit.types import RunSpec

CALLBACK_THREAD_NAME = "dtkit-callbacks"
"""The name of the thread that callbacks run on."""


class StoppableRun(Protocol):
    """The part of a run that early stopping needs."""

    @property
    def spec(self) -> RunSpec:
        """The arguments of the training."""
        ...

    @property
    def history(self) -> History:
        """Records of every rank in every step."""
        ...

    def note(self, text: str) -> None:
        """Add a line to the run's log."""
        ...

    def stop(self) -> int:
        """End the run at a step boundary."""
        ...


class EarlyStopping:
    """Stop a run whose metric has not improved for `patience` epochs in a row.

    Parameters
    ----------
    patience
        Epochs without a better value before the run stops.
    monitor
        "loss", or a name given to ``metrics``. With `validation`, its value over the validation data is used; without,
        the mean training loss of the epoch.
    min_delta
        Smallest change that counts as better.
    mode
        "min" where smaller is better, as for a loss; "max" where larger is better, as for an accuracy.

    """

    @suggest_arguments
    def __init__(
        self,
        patience: int = 3,
        *,
        monitor: str = "loss",
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience={patience!r}; it must be a number of epochs from 1 up")
        if not (isinstance(min_delta, int | float) and min_delta >= 0):
            raise ValueError(f"min_delta={min_delta!r}; it must be a number from 0 up")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}; it must be 'min' (smaller is better) or 'max' (larger is better)")
        self.patience, self.monitor, self.min_delta, self.mode = patience, monitor, min_delta, mode
        self._is_restored = False
        self._reset(None)

    def check_monitor(self, metrics: Sequence[str], *, has_validation: bool) -> None:
        """Raise ValueError if a training with these metrics won't have the value to monitor."""
        if self.monitor == "loss":
            return
        if not has_validation:
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}) needs held-out data: cluster.train(validation=...)"
            )
        if self.monitor not in metrics and (metrics or self.monitor == "val_loss"):
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}), but what is evaluated is {', '.join(('loss', *metrics))}, "
                "all of it on the validation data"
            )

    def _reset(self, run: StoppableRun | None) -> None:
        self._run = None if run is None else weakref.ref(run)
        self.best = -math.inf if self.mode == "max" else math.inf
        """Best value so far."""
        self.best_epoch = 0
        self._epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self.best, "best_epoch": self.best_epoch, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, so that the next run that calls this callback continues the saved one."""
        self.best, self.best_epoch, self._epoch = state["best"], state["best_epoch"], state["epoch"]
        self._is_restored = True

    def __call__(self, run: StoppableRun) -> None:
        """Judge the epoch that has just ended. A different run starts with no earlier values."""
        if self._is_restored:
            self._run, self._is_restored = weakref.ref(run), False
        elif self._run is None or self._run() is not run:
            self._reset(run)
        self._epoch += 1
        value = self._get_value(run)
        gain = value - self.best if self.mode == "max" else self.best - value
        if gain > self.min_delta:
            self.best, self.best_epoch = value, self._epoch
        elif self._epoch - self.best_epoch >= self.patience:
            run.note(
                f"stopped early after epoch {self._epoch}: {self.monitor} {value:.4g}, and the best was "
                f"{self.best:.4g}, after epoch {self.best_epoch}"
            )
            run.stop()

    def _get_value(self, run: StoppableRun) -> float:
        if run.history.evaluations:
            values = run.history.evaluations[-1].values
            if self.monitor not in values:
                raise ValueError(
                    f"EarlyStopping(monitor={self.monitor!r}), but what is evaluated is {', '.join(values)}"
                )
            return values[self.monitor]
        if self.monitor != "loss":
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}) needs held-out data: cluster.train(validation=...)"
            )
        rows = run.history.totals(max(0, run.history.num_steps - run.spec.steps_per_epoch))
        return float((rows["loss"] * rows["weight"]).sum() / rows["weight"].sum())

    def __repr__(self) -> str:
        return f"EarlyStopping(patience={self.patience}, monitor={self.monitor!r}, best={self.best:.4g})"


def start_callbacks(callbacks: Sequence[Any], run: Any) -> None:
    """Call ``on_start(run)`` of the callbacks that have it, before the first step or when a run is continued."""
    for callback in callbacks:
        if hasattr(callback, "on_start"):
            callback.on_start(run)


def finish_callbacks(callbacks: Sequence[Any], timeout: float) -> None:
    """Call ``finish_writing(timeout)`` of the callbacks that have it, which waits for their own threads."""
    deadline = time.monotonic() + timeout
    for callback in callbacks:
        if hasattr(callback, "finish_writing"):
            callback.finish_writing(max(0.0, deadline - time.monotonic()))


def describe_callback_error(error: BaseException) -> str:
    """Return the line of a run's log for a callback that failed."""
    return f"a callback failed: {type(error).__name__}: {error}".partition("\n")[0]


class CallbackRunner:
    """Calls the callbacks of one run at an epoch's end, before the next one, on a thread of their own.

    They may use any method of the run, since the run's own thread continues to read commands.
    """

    def __init__(self, callbacks: Callable[[], None] | None) -> None:
        self._callbacks = callbacks
        self._token: object = None  # identifies the current call
        self.last_called_step = 0
        """The step after which callbacks were called last."""

    @property
    def has_callbacks(self) -> bool:
        """Whether there is anything to call."""
        return self._callbacks is not None

    @property
    def is_running(self) -> bool:
        """Whether callbacks are running."""
        return self._token is not None

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether to call callbacks after this step, or whether they are running. No step is sent before they
        return.
        """
        if self.is_running:
            return True
        return self._callbacks is not None and step % steps_per_epoch == 0 and step > self.last_called_step

    def start(self, step: int, on_done: Callable[[object, BaseException | None], None]) -> None:
        """Call the callbacks, unless they are running. Their thread calls `on_done` with a token for `mark_done`."""
        callbacks = self._callbacks
        if self.is_running or callbacks is None:
            return
        token = self._token = object()
        self.last_called_step = step

        def call() -> None:
            on_done(token, run_guarded_in_thread(callbacks, return_error))

        threading.Thread(target=call, name=CALLBACK_THREAD_NAME, daemon=True).start()

    def mark_done(self, token: object) -> bool:
        """Note that callbacks have returned. Return whether the run still waits for this call of them."""
        if token is not self._token:
            return False
        self._token = None
        return True

    def reset(self) -> None:
        """Stop waiting for callbacks that may still be running."""
        self._token = None
