"""Callbacks of ``cluster.train(callbacks=[...])``, called with the run after every epoch: `EarlyStopping`, and the
thread that calls them.
"""

from __future__ import annotations

import difflib
import functools
import math
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dtkit._util.arguments import suggest_options
from dtkit._util.completion import hide_from_completion
from dtkit._util.guard import return_error, run_guarded, run_guarded_in_thread
from dtkit.errors import CallbackError, DtkitError
from dtkit.history.mean_loss import compute_mean_loss
from dtkit.history.metric_direction import is_better_higher
from dtkit.training.callback_log import add_logged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.history.history import History
    from dtkit.types import RunSpec, Status

CALLBACK_THREAD_NAME = "dtkit-callbacks"
"""The name of the thread that callbacks run on."""


class WeightKeeper(Protocol):
    """The part of a run that keeps the weights of one epoch, and puts them back."""

    def keep_weights(self) -> Path:
        """Write the state of the present step to disk, in place of what was kept before. Return its folder."""
        ...

    def restore_weights(self, path: Path, text: str) -> None:
        """Put kept weights back on all engines."""
        ...


class StoppableRun(Protocol):
    """The part of a run that early stopping needs."""

    @property
    def lifecycle(self) -> WeightKeeper:
        """Access to the weights."""
        ...

    @property
    def status(self) -> Status:
        """Step and state."""
        ...

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


@suggest_options
@hide_from_completion("check_epochs", "check_evaluated", "check_monitor", "on_start")
class EarlyStopping:
    """Stop a run whose metric has not improved for `patience` epochs in a row.

    Parameters
    ----------
    patience
        Epochs without a better value before the run stops. Epochs without an evaluation count, and none ends at them.
    monitor
        "loss", or a name given to ``metrics``. With `validation`, its value over the validation data is used; without,
        the mean training loss of the epoch.
    min_delta
        Smallest change that counts as better.
    mode
        "min" where smaller is better, as for a loss; "max" where larger is better, as for an accuracy. By default, the
        metric's ``higher_is_better`` decides, then its name, and "min" if neither does.
    restore_best
        Whether a run that ends by itself or is stopped early ends with the weights of its best epoch, exactly, and with
        the optimizer's state of that epoch; steps and history stay. Each better epoch replaces the checkpoint in
        `best_checkpoint`, a folder of the run's own in ``checkpoint_dir``, by default in "checkpoints". ``run.stop()``
        and the averages of ``on_engine`` keep the last weights.

    """

    best: float
    """Best value so far."""
    best_epoch: int
    """Epoch of the best value; the first one is 1."""
    best_checkpoint: Path | None
    """Folder of the best epoch's checkpoint; None without `restore_best`."""

    def __init__(
        self,
        patience: int = 3,
        *,
        monitor: str = "loss",
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
        restore_best: bool = False,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(
                f"patience={patience!r}; it must be a number of epochs from 1 up. The name of a metric is monitor=, as "
                "in EarlyStopping(monitor='loss')"
            )
        if not (isinstance(min_delta, int | float) and min_delta >= 0):
            raise ValueError(f"min_delta={min_delta!r}; it must be a number from 0 up")
        if mode not in ("min", "max", None):
            raise ValueError(f"mode={mode!r}; it must be 'min' (smaller is better) or 'max' (larger is better)")
        if not isinstance(restore_best, bool):
            raise TypeError(f"restore_best={restore_best!r}; it must be True or False")
        self.patience, self.monitor, self.min_delta, self.mode = patience, monitor, min_delta, mode
        self.restore_best = restore_best
        self._is_restored = False
        self._reset(None)

    def check_monitor(self, metrics: Sequence[str], *, has_validation: bool, logs_further: bool) -> None:
        """Raise ValueError if a training with these metrics won't have the value to monitor.

        A step of a model, such as Lightning's ``validation_step``, logs `logs_further` names, known once it has run.
        """
        if self.monitor == "loss":
            return
        if not has_validation:
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}) needs held-out data: cluster.train(validation=...)"
            )
        if metrics or not logs_further:
            self.check_evaluated(("loss", *metrics))

    def check_evaluated(self, names: Sequence[str]) -> None:
        """Raise ValueError if the value to monitor is not among those of an evaluation."""
        if self.monitor in names:
            return
        similar = difflib.get_close_matches(self.monitor, names, n=1) or ["loss"]
        raise ValueError(
            f"EarlyStopping(monitor={self.monitor!r}), but what is evaluated is {', '.join(names)}, all of it on the "
            f"validation data. Use monitor={similar[0]!r}"
        )

    def check_epochs(self, spec: RunSpec) -> None:
        """Raise ValueError if a training ends within an epoch, where no callback can put weights back."""
        rest = spec.steps % spec.steps_per_epoch
        if self.restore_best and rest:
            whole = spec.steps - rest + spec.steps_per_epoch
            raise ValueError(
                f"EarlyStopping(restore_best=True) puts weights back at the end of an epoch, and {spec.steps:,} steps "
                f"end within one of {spec.steps_per_epoch:,} steps. Train for {whole:,} steps, or for epochs"
            )

    def _reset(self, run: StoppableRun | None) -> None:
        self._run = None if run is None else weakref.ref(run)
        self.best = -math.inf if self._seeks_highest(run) else math.inf
        self.best_epoch = self._epoch = 0
        self._judged_step: int | None = None  # of an evaluation
        self.best_checkpoint = None

    def _seeks_highest(self, run: StoppableRun | None) -> bool:
        if self.mode is None:
            return is_better_higher(self.monitor, {} if run is None else run.history.directions)
        return self.mode == "max"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        kept = None if self.best_checkpoint is None else str(self.best_checkpoint)
        return {"best": self.best, "best_epoch": self.best_epoch, "epoch": self._epoch, "checkpoint": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, so that the next run that calls this callback continues the saved one."""
        self.best, self.best_epoch, self._epoch = state["best"], state["best_epoch"], state["epoch"]
        self.best_checkpoint = None if state["checkpoint"] is None else Path(state["checkpoint"])
        self._is_restored = True

    def on_start(self, run: StoppableRun) -> None:
        """Note at once if the best weights of the run that this one continues are gone."""
        if self._is_restored:
            self._has_new_evaluation(run)  # those of the run before were judged
        is_needed, path = self._is_restored and self.restore_best, self.best_checkpoint
        if is_needed and (path is None or not path.exists()):
            run.note(f"the weights of epoch {self.best_epoch}, the best so far, are gone: {self.best_checkpoint}")
            self.best_checkpoint = None

    def __call__(self, run: StoppableRun) -> None:
        """Judge the epoch that has just ended. A different run starts with no earlier values."""
        if self._is_restored:
            self._run, self._is_restored = weakref.ref(run), False
        elif self._run is None or self._run() is not run:
            self._reset(run)
        self._epoch += 1
        if run.spec.has_validation and not self._has_new_evaluation(run):
            self._restore_at_end(run)
            return
        if self._epoch == 1 and not run.history.evaluations:
            run.note("EarlyStopping watches the training loss: there is no validation= with held-out data")
        value = self._get_value(run)
        gain = value - self.best if self._seeks_highest(run) else self.best - value
        if gain > self.min_delta:
            self.best, self.best_epoch = value, self._epoch
            if self.restore_best:
                self.best_checkpoint = run.lifecycle.keep_weights()
        elif self._epoch - self.best_epoch >= self.patience:
            watched = self.monitor if run.history.evaluations else "training loss"
            present, best = _format_apart(value, self.best)
            run.note(
                f"stopped early after epoch {self._epoch}: {watched} {present}, and the best was {best}, after epoch "
                f"{self.best_epoch}"
            )
            self._restore_best(run)  # before the end, so that nobody sees other weights after it
            run.stop()
            return
        self._restore_at_end(run)

    def _has_new_evaluation(self, run: StoppableRun) -> bool:
        """Return whether an evaluation was made since the last one that was judged: not every epoch has one."""
        before, evaluations = self._judged_step, run.history.evaluations
        self._judged_step = evaluations[-1].step if evaluations else None
        return self._judged_step != before

    def _restore_at_end(self, run: StoppableRun) -> None:
        if self.restore_best and run.status.step >= run.spec.steps:
            self._restore_best(run)

    def _restore_best(self, run: StoppableRun) -> None:
        """Put the weights of the best epoch back, unless it has just ended."""
        if not self.restore_best or self.best_epoch == self._epoch:
            return
        if self.best_checkpoint is None:
            run.note(f"the last weights stay: those of epoch {self.best_epoch} were not kept")
            return
        text = f"the weights of epoch {self.best_epoch}, the best, are back: {self.monitor} {self.best:.4g}"
        run.lifecycle.restore_weights(self.best_checkpoint, text)

    def _get_value(self, run: StoppableRun) -> float:
        if run.history.evaluations:
            values = run.history.evaluations[-1].values
            self.check_evaluated(tuple(values))
            return values[self.monitor]
        if self.monitor != "loss":
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}) needs held-out data: cluster.train(validation=...)"
            )
        return compute_mean_loss(run.history.totals(run.history.num_steps - run.spec.steps_per_epoch))

    def __repr__(self) -> str:
        return f"EarlyStopping(patience={self.patience}, monitor={self.monitor!r}, best={self.best:.4g})"


def _format_apart(value: float, other: float) -> tuple[str, str]:
    """Return two numbers with four digits, or with as many more as tell different ones apart."""
    all_digits = range(4, 18)
    digits = next((n for n in all_digits if value != other and f"{value:.{n}g}" != f"{other:.{n}g}"), all_digits[0])
    return f"{value:.{digits}g}", f"{other:.{digits}g}"


def check_epochs(callbacks: Sequence[Any], spec: RunSpec) -> None:
    """Raise ValueError if a training ends where a callback could not put weights back."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            callback.check_epochs(spec)


def check_evaluated(callbacks: Sequence[Any], names: Sequence[str]) -> None:
    """Raise ValueError if a callback monitors a value that no evaluation has."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and names:
            callback.check_evaluated(names)


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


def call_callbacks(callbacks: Sequence[Any], run: StoppableRun) -> None:
    """Call the callbacks with a run that is at the end of an epoch. Raise CallbackError for one that fails.

    What they pass to `dtkit.log` belongs to the epoch's last step.
    """
    for callback in callbacks:
        if callable(callback):
            step = run.status.step
            epoch = f"after epoch {step // run.spec.steps_per_epoch:,}, step {step:,}"
            with add_logged(run.history, step - 1):
                call_callback(
                    callback, functools.partial(callback, run), epoch, "run.resume() goes on with the next step"
                )


def call_callback(callback: Any, call: Callable[[], None], place: str, sequel: str) -> None:
    """Call a callback. If it raises, name it, its `place` in the run, and the `sequel` of the pause that follows."""
    from dtkit.engine.observe.error_report import format_traceback, list_user_frames

    def fail(error: Exception) -> None:
        if isinstance(error, DtkitError):
            raise error
        name = getattr(callback, "__name__", type(callback).__name__)
        message = f"the callback {name} failed {place}: {type(error).__name__}: {error}"
        remedy = f"The run is paused: {sequel}, run.stop() ends it."
        raise CallbackError(message, list_user_frames(error), format_traceback(error), remedy) from error

    run_guarded(call, fail)


def describe_callback_error(error: BaseException) -> str:
    """Return the line of a run's log for a callback that failed."""
    is_named = isinstance(error, CallbackError)
    return (str(error) if is_named else f"a callback failed: {type(error).__name__}: {error}").partition("\n")[0]


class CallbackRunner:
    """Calls the callbacks of one run at an epoch's end, before the next one, on a thread of their own.

    They may use any method of the run, since the run's own thread continues to read commands.
    """

    def __init__(self, callbacks: Callable[[], None] | None) -> None:
        self._callbacks = callbacks
        self._token: object = None  # identifies the current call
        self._thread: threading.Thread | None = None
        self._begun_at = 0.0
        self.last_s = 0.0
        """Seconds that the last call took."""
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
        self.last_called_step, self._begun_at = step, time.monotonic()

        def call() -> None:
            on_done(token, run_guarded_in_thread(callbacks, return_error))

        self._thread = threading.Thread(target=call, name=CALLBACK_THREAD_NAME, daemon=True)
        self._thread.start()

    def finish(self, timeout: float) -> None:
        """Wait until the callbacks have returned: one of them may have ended the run, before the others were called."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout)

    def mark_done(self, token: object) -> bool:
        """Note that callbacks have returned. Return whether the run still waits for this call of them."""
        if token is not self._token:
            return False
        self._token, self.last_s = None, time.monotonic() - self._begun_at
        return True

    def reset(self) -> None:
        """Stop waiting for callbacks that may still be running."""
        self._token = None
