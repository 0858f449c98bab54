"""Callbacks in the notebook that are called for every step when its records arrive.

They run on a thread of their own, and training doesn't wait for them. They get all steps in order.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import return_error, run_guarded_in_thread
from dtkit.errors import RunError
from dtkit.training.callbacks import CALLBACK_THREAD_NAME, call_callback, describe_callback_error, finish_callbacks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.training.driver import Driver


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """One step over all ranks, for ``callback.on_step(run, step)``."""

    step: int
    samples: int
    loss: float
    """Mean over the samples of all ranks."""
    step_s: float
    """Time of the slowest rank."""
    grad_norm: float
    logged: dict[str, float]
    """Numbers that the step passed to `dtkit.log`, means over all ranks."""


class StepCallbacks:
    """The callbacks of one run that have a method ``on_step``."""

    def __init__(self, callbacks: Sequence[Any], run: Any, driver: Driver) -> None:
        self._all_callbacks = callbacks
        self._callbacks = [callback for callback in callbacks if hasattr(callback, "on_step")]
        self._run, self._driver, self._history = run, driver, driver.progress.history
        self._num_done = 0
        # locks: while a thread is started or ends
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def notify(self) -> None:
        """Call the callbacks for the steps that have arrived, unless a thread already does so."""
        if not self._callbacks:
            return
        with self._lock:
            if self._thread is None and self._num_done < self._history.num_totals:
                self._thread = threading.Thread(target=self._process, name=CALLBACK_THREAD_NAME, daemon=True)
                self._thread.start()

    def finish(self, timeout: float) -> None:
        """Wait until the callbacks have seen all steps, and their background work is finished."""
        deadline = time.monotonic() + timeout
        self.notify()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        finish_callbacks(self._all_callbacks, max(0.0, deadline - time.monotonic()))

    def _process(self) -> None:
        while (summaries := self._take_new()) is not None:
            for summary in summaries:
                for callback in self._callbacks:
                    call = functools.partial(_call_on_step, callback, self._run, summary)
                    error = run_guarded_in_thread(call, return_error)
                    if isinstance(error, BaseException):
                        self._callbacks = []
                        self._report(error)
                        return

    def _report(self, error: BaseException) -> None:
        """Pause the run, which then raises the error. If the run has ended, log the error."""
        try:
            self._driver.submit("callback_failed", error)
        except RunError:
            self._driver.progress.add_event("error", describe_callback_error(error))

    def _take_new(self) -> list[StepSummary] | None:
        """Return the steps that have arrived; None if there are none, so that this thread ends."""
        with self._lock:
            first, stop = self._num_done, self._history.num_totals
            if first == stop:
                self._thread = None
                return None
            self._num_done = stop
        totals = self._history.read_totals(first, stop)
        logged = {name: dict(zip(*self._history.scalar(name), strict=True)) for name in self._history.scalar_names}
        return [
            StepSummary(
                int(row["step"]),
                int(row["samples"]),
                float(row["loss"]),
                float(row["step_s"]),
                float(row["grad_norm"]),
                {name: float(values[row["step"]]) for name, values in logged.items() if row["step"] in values},
            )
            for row in totals
        ]


def _call_on_step(callback: Any, run: Any, summary: StepSummary) -> None:
    call = functools.partial(callback.on_step, run, summary)
    call_callback(callback, call, f"after step {summary.step:,}", "run.resume() goes on without callbacks after steps")
