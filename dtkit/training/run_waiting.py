"""Waiting for the end of a run, or for a command to take effect.

A wait ends when the run has ended. It continues through a pause that the user made, and raises if the run paused
because it needs its caller. An interrupt of the kernel pauses the run at a step boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.deadline import wait_for_event
from dtkit.errors import EngineError, NonFiniteError, PausedError, RunError
from dtkit.history.divergence import find_divergence_step
from dtkit.training.callbacks import CALLBACK_THREAD_NAME
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from concurrent.futures import Future

    from dtkit.dashboard.run_view import RunView
    from dtkit.training.driver import Driver


_BUTTONS_BLOCKED_MESSAGE = "buttons act after this cell; the kernel's interrupt button pauses now"
_PAUSED_MESSAGE = "paused: this cell waits for Resume or Stop"
_AWAITED_MESSAGE = "later cells wait for the run's end"


class RunWaiter:
    """Waits for one run, and shows that in its views."""

    def __init__(
        self,
        run: RunView,
        driver: Driver,
        call_timeout_s: Callable[[], float],
        notify: Callable[[], None],
        finish_callbacks: Callable[[float], None],
        on_raise: Callable[[BaseException | None], None],
    ) -> None:
        self._message, self._num_awaiting = "", 0
        self._run, self._driver, self._notify = run, driver, notify
        self._call_timeout_s, self._finish_callbacks, self._on_raise = call_timeout_s, finish_callbacks, on_raise

    def describe(self, state: State) -> str:
        """Return what a status says besides the state: a long validation, a wait for the run, or how its loss ended."""
        from dtkit._util.notebook import in_notebook

        if state in (State.COMPLETED, State.STOPPED):
            step = find_divergence_step(self._run.history)
            return "" if step is None else f"the loss diverged at step {step:,}"
        evaluating_s = self._driver.calls.evaluating_s
        if evaluating_s >= timeouts.SHOWN_VALIDATION_S:
            return f"validating for {evaluating_s:.0f} s"
        if self._message or not self._num_awaiting:
            return self._message
        if state is State.PAUSED:
            return _PAUSED_MESSAGE
        return _AWAITED_MESSAGE if state is State.RUNNING and in_notebook() else ""

    # -- for the end ------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> None:
        """Wait until the run has ended, and raise its error if it failed."""
        if threading.current_thread().name == CALLBACK_THREAD_NAME:
            raise RunError("a callback can't wait for the run, which waits for its callbacks; return instead")
        if timeout is None:
            self._check_not_paused()
        with self._pause_on_interrupt():
            is_over = self._driver.progress.wait_for(self._is_over, timeout)
        if not is_over:
            status = self._run.status
            remedy = (
                "run.resume() continues" if status.state is State.PAUSED else "it goes on; wait again, or run.pause()"
            )
            raise TimeoutError(
                f"the run is {status.state.name} at step {status.step:,} of {status.steps:,} after {timeout} s: "
                f"{remedy}"
            )
        self._wait_for_end_of_views()
        self._raise_error()

    async def wait_async(self) -> None:
        """Wait as `wait` does, but leave the kernel free, so that buttons work. Cancelling it pauses the run.

        ipykernel turns an interrupt of the cell into a cancellation.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        unsubscribe = self._run.subscribe(wake)
        self._count_awaiting(1)
        try:
            while not self._is_over():
                changed.clear()
                await wait_for_event(changed, timeouts.STATE_POLL_S)  # a change may come without a notification
        except asyncio.CancelledError as cancelled:
            await self._pause_after_cancellation()
            cancelled._render_traceback_ = self._describe_interrupt  # type: ignore[attr-defined]
            raise
        finally:
            unsubscribe()
            self._count_awaiting(-1)
        await loop.run_in_executor(None, self._wait_for_end_of_views)
        self._raise_error()  # here, so that the traceback has no frame of the executor

    async def _pause_after_cancellation(self) -> None:
        """Pause at a step boundary. A second cancellation before that interrupts the engines."""
        with contextlib.suppress(RunError, TimeoutError):
            try:
                await _await_within_limit(self._driver.submit("pause"))
            except asyncio.CancelledError:
                await _await_within_limit(self._driver.submit("interrupt"))

    def _is_over(self) -> bool:
        """Return whether the run has ended, or needs its caller."""
        progress = self._driver.progress
        return progress.state.has_ended or (progress.state is State.PAUSED and progress.exception is not None)

    def _check_not_paused(self) -> None:
        progress = self._driver.progress
        if progress.state is State.PAUSED and progress.exception is None:
            raise PausedError(
                f"the run is paused at step {progress.step:,}, and this thread can't resume it while it waits; call "
                "run.resume() first, or wait for another thread with run.wait(timeout=60)"
            )

    def _wait_for_end_of_views(self) -> None:
        """Wait for callbacks, checkpoints and displays of an ended run."""
        from dtkit.dashboard import display

        if self._driver.progress.state.has_ended:
            self._driver.actions.callbacks.runner.finish(timeouts.STEP_CALLBACKS_TIMEOUT_S)
            self._finish_callbacks(timeouts.STEP_CALLBACKS_TIMEOUT_S)
            # waits: CheckpointManager.join has a default timeout
            self._driver.actions.checkpoint.manager.join()  # the caller may resume from the last checkpoint
            display.wait_until_replaced(self._run)

    def _raise_error(self) -> None:
        """Raise the error that failed or paused the run."""
        progress = self._driver.progress
        error = progress.exception
        self._on_raise(error)
        if progress.state is State.PAUSED and isinstance(error, EngineError) and not isinstance(error, NonFiniteError):
            raise PausedError(
                f"the run paused at step {progress.step:,}: {error}\nrun.resume() replaces what is lost and continues, "
                "run.stop() ends the run"
            ) from error
        if error is not None:
            raise error

    # -- while a cell blocks ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pause_on_interrupt(self) -> Generator[None, None, None]:
        """Show that a cell blocks. From the first moment on, an interrupt pauses the run."""
        with contextlib.ExitStack() as at_end:
            try:
                self._show_blocking(at_end)
                yield
            except KeyboardInterrupt as interrupt:
                self.pause_or_interrupt()
                # IPython's protocol: one line instead of the frames in which the cell waited.
                interrupt._render_traceback_ = self._describe_interrupt  # type: ignore[attr-defined]
                raise

    def _describe_interrupt(self) -> list[str]:
        """Return what a cell shows that was interrupted."""
        progress = self._driver.progress
        if progress.state is State.PAUSED:
            return [f"paused at step {progress.step:,}; run.resume() goes on"]
        return [f"interrupted at step {progress.step:,}; the run is {progress.state.value}"]

    def _show_blocking(self, at_end: contextlib.ExitStack) -> None:
        """Show progress as text in a terminal, and a message about the buttons in a notebook."""
        from dtkit._util.notebook import in_notebook
        from dtkit.dashboard.text import run_text

        if self._driver.progress.state.has_ended:
            return
        if in_notebook():
            at_end.callback(self._set_message, "")
            self._set_message(_BUTTONS_BLOCKED_MESSAGE)
        else:
            at_end.callback(run_text.start_text_progress(self._run))

    def _set_message(self, message: str) -> None:
        if message != self._message:
            self._message = message
            self._notify()

    def _count_awaiting(self, change: int) -> None:
        self._num_awaiting += change
        self._notify()

    def pause_or_interrupt(self) -> None:
        """Pause at a step boundary. A second interrupt before that interrupts the engines."""
        is_first = not self._driver.progress.is_pausing
        with contextlib.suppress(RunError, TimeoutError):
            try:
                _wait_within_limit(self._driver.submit("pause" if is_first else "interrupt"))
            except KeyboardInterrupt:
                _wait_within_limit(self._driver.submit("interrupt"))
            except TimeoutError:
                if is_first:
                    self._driver.progress.add_event(
                        "note",
                        f"not paused after {timeouts.INTERRUPTED_CELL_TIMEOUT_S:.0f} s: another interrupt breaks off "
                        "what is under way",
                    )
                    self._notify()

    # -- for a command ----------------------------------------------------------------------------------------

    def call(self, command: str, value: object = None, timeout: float | None = None) -> int:
        """Submit a command; return the step at which it took effect.

        Without a `timeout`, it waits as long as a collective may take, but only some seconds for a stuck rank.
        """
        started_at = time.monotonic()
        limit = self._call_timeout_s() if timeout is None else timeout
        answer = self._driver.submit(command, value)
        while not answer.done():
            waited = time.monotonic() - started_at
            gives_up = (
                timeout is None
                and waited >= timeouts.STUCK_COMMAND_TIMEOUT_S
                and self._is_stuck()
                and command != "step"
            )
            if waited >= limit or gives_up:
                raise TimeoutError(self._describe_timeout(command, waited))
            with contextlib.suppress(TimeoutError):
                answer.result(min(timeouts.SHORT_INTERRUPT_POLL_S, limit - waited))
        return answer.result(0)

    def _is_stuck(self) -> bool:
        report = self._driver.calls.stall_detector.stall_report
        return report is not None and report.kind == "stuck"

    def _describe_timeout(self, command: str, waited_s: float) -> str:
        report = self._driver.calls.stall_detector.stall_report
        reason = "the engines have not come to the end of a step" if report is None else report.text
        return (
            f"{command!r} has not taken effect after {waited_s:.0f} s: {reason.rstrip('.')}. It takes effect at the "
            "next step boundary; cluster.interrupt() ends what the engines are doing, cluster.stacks() shows it"
        )


async def _await_within_limit(answer: Future[int]) -> None:
    async with asyncio.timeout(timeouts.INTERRUPTED_CELL_TIMEOUT_S):
        await asyncio.wrap_future(answer)


def _wait_within_limit(answer: Future[int]) -> None:
    """Wait in short intervals. Python handles a signal that another thread received only between them."""
    deadline = time.monotonic() + timeouts.INTERRUPTED_CELL_TIMEOUT_S
    while not answer.done() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            answer.result(timeouts.SHORT_INTERRUPT_POLL_S)
    answer.result(0)
