"""A user's own function or script on every rank.

Output of ranks arrives live, in numbered messages that may be lost. The call's reply has all of it and fills the gaps.
Each rank replies for itself, so that the first failure is visible at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import threading
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting, timeouts
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.deadline import wait_for_event
from dtkit._util.formatting import name_type
from dtkit._util.guard import Subscribers, return_error, run_guarded_in_thread
from dtkit._util.notebook import name_code
from dtkit.dashboard import call_display
from dtkit.dashboard.text import call_text
from dtkit.dashboard.text.progress import show_progress
from dtkit.errors import DtkitError, EngineError, format_ranks
from dtkit.rpc.captured import warn_of_large_functions
from dtkit.rpc.protocol import FunctionOperations, make_call
from dtkit.training.call_stall import CallStallWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from concurrent.futures import Future

    import pandas as pd

    from dtkit._util.views import Figure
    from dtkit.messages import Reply
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.protocol import Call
    from dtkit.types import Failure


@suggest_attributes("task")
@explain_arguments
class Task:
    """A function that runs on all ranks. ``result()`` and ``await`` wait for it; a cell shows it live.

    ``rows`` has the values passed to `dtkit.log` (dicts with rank and index), ``output`` the printed lines (rank,
    line).
    """

    note = ""
    """What happens before its first output, if that takes long."""
    unknown_position = "was in none of your lines"
    """Position of an interrupted rank that reported no line of the user's."""
    first_grace_s: float | None = None
    """Grace for the other ranks once one has failed, before they are interrupted; None for that of all calls."""

    def __init__(self, engine_group: EngineGroup, name: str, repair: Callable[[], object] | None = None) -> None:
        """`repair` replaces engines that are gone."""
        self.name, self.world_size = name, engine_group.world_size
        self.rows: list[dict[str, Any]] = []
        self.output: list[tuple[int, str]] = []
        self.progress: dict[int, str] = {}
        """The line by rank that has no end yet, such as a progress bar."""
        self.state = "running"
        """"running", "done", "failed", or "interrupted" if no rank has failed by itself."""
        self.engine_group, self._repair = engine_group, repair
        self._num_received = [0] * engine_group.world_size  # items received from each rank
        self._num_rows = [0] * engine_group.world_size
        self._futures: Sequence[Future[Reply[Any]]] = ()
        # locks: while lines are appended
        self._lock = threading.Lock()
        self._done_event = threading.Event()
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._was_cancelled = False
        self._subscribers = Subscribers()

    # -- while it runs ----------------------------------------------------------------------------------------

    def receive(self, rank: int, first: int, items: Sequence[tuple[str, Any]]) -> None:
        """Receive a rank's items, numbered from `first`. Items behind a gap come with the call's reply."""
        with self._lock:
            known = self._num_received[rank]
            if first > known:
                return
            for kind, content in items[known - first :]:
                if kind == "row":
                    # Live messages have numbers that JSON lacks as text, such as "nan" and "inf".
                    values = {name: float(value) for name, value in content.items()}
                    self.rows.append({"rank": rank, "index": self._num_rows[rank], **values})
                    self._num_rows[rank] += 1
                elif kind == "progress":
                    self.progress[rank] = content
                else:
                    self.progress.pop(rank, None)
                    self.output.append((rank, content))
                self._num_received[rank] += 1
        self._notify()

    def start_collecting(self, futures: Sequence[Future[Reply[Any]]], payload: Payload) -> None:
        """Collect all replies on the task's own thread, even if the user never asks for the result."""
        self._futures = futures
        threading.Thread(target=self._run_collector, args=(payload,), name=f"dtkit-{self.name}", daemon=True).start()

    def _run_collector(self, payload: Payload) -> None:
        """Collect the replies. `result` raises any error."""
        self._error = run_guarded_in_thread(lambda: self._collect_replies(payload), return_error)
        self.state = "done" if self._error is None else "interrupted" if self._is_interrupt(self._error) else "failed"
        self._done_event.set()
        self._notify()

    def _collect_replies(self, payload: Payload) -> None:
        """Wait for all ranks, and collect their results."""
        watch = CallStallWatch(self.engine_group, self._tell)
        try:
            replies = self.engine_group.gather_replies(
                self._futures, timeouts.TASK_TIMEOUT_S, first_grace_s=self.first_grace_s, on_poll=watch.check
            )
        finally:
            self.engine_group.uploads.discard(payload)
        self._process_replies(replies)

    def _is_interrupt(self, error: BaseException) -> bool:
        """Return whether the user's interrupt alone ended the call."""
        has_failed = isinstance(error, EngineError) and any(f.kind == "error" and not f.victim for f in error.failures)
        return self._was_cancelled and isinstance(error, EngineError) and not has_failed

    def _tell(self, text: str) -> None:
        print(f"{self.name}: {text}")  # noqa: T201 - it may be for minutes the only sign of life

    def _process_replies(self, replies: Sequence[Reply[Any]]) -> None:
        for rank, reply in enumerate(replies):
            if isinstance(reply.value, tuple):  # (result or None, all output)
                self.receive(rank, 0, reply.value[1])
        self._load_results(replies)

    def _load_results(self, replies: Sequence[Reply[Any]]) -> None:
        """Load the results; raise the error of ranks that failed."""
        values = [reply.value for reply in replies if isinstance(reply.value, tuple)]
        results: list[Payload] = [value[0] for value in values if value[0] is not None]
        try:
            self.engine_group.unwrap(replies)
            self._results = [result.load() for result in results]
        finally:
            for result in results:  # also if another rank has failed
                result.discard()

    # -- for the user -----------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether all ranks have answered."""
        return self._done_event.is_set()

    def cancelled(self) -> bool:
        """Return whether `cancel` has ended it."""
        return self.done() and self._was_cancelled and self._error is not None

    @property
    def exception(self) -> BaseException | None:
        """The error that failed it; None while it runs, and after success."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all ranks have answered, and raise its error if it failed. After a TimeoutError, it still runs."""
        if not self._wait(timeout):
            raise TimeoutError(f"{self.name} still runs after {timeout} s; wait again, or end it with cancel()")
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait as `wait` does; return the function's results by rank."""
        self.wait(timeout)
        return list(self._results)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> list[Any]:
        """Wait as `result` does, but leave the kernel free. Cancelling the wait leaves the function running."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        unsubscribe = self.subscribe(wake)
        try:
            while not self.done():
                changed.clear()
                await wait_for_event(changed, timeouts.INTERRUPT_POLL_S)  # a change may come without a notification
        finally:
            unsubscribe()
        return self.result(0)

    def display_and_wait(self) -> list[Any]:
        """Return the result, with a live view meanwhile. An interrupt reaches the engines and is raised again."""
        with call_display.display_until_done(self):
            try:
                self._wait()
            except KeyboardInterrupt as interrupt:
                running = self._list_running_ranks()
                # If the cluster was closed meanwhile, nothing is left to interrupt.
                with contextlib.suppress(DtkitError):
                    self._interrupt()
                    # The group is formed again. A second interrupt doesn't wait for it.
                    if not self._wait(timeouts.TASK_INTERRUPT_TIMEOUT_S):
                        self.cancel()
                line = self._describe_interrupt(running)
                interrupt.args = (line,)
                # IPython's protocol: one line instead of the frames in which the cell waited.
                interrupt._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
                raise
        return self.result(0)

    def _describe_interrupt(self, running: Sequence[int]) -> str:
        """Return where each rank was that had not answered before the interrupt."""
        failures = self._error.failures if isinstance(self._error, EngineError) else ()
        by_rank = {failure.rank: failure for failure in failures}
        parts = [f"rank {rank}{self._describe_position(by_rank.get(rank))}" for rank in running]
        if returned := [rank for rank in range(self.world_size) if rank not in running]:
            parts.append(f"{format_ranks(returned)} had returned")
        return f"{self.name} was interrupted: {'; '.join(parts)}"

    def _describe_position(self, failure: Failure | None) -> str:
        """Return the user's line that an interrupt found a rank at."""
        if failure is None:
            return " answered meanwhile"
        if not failure.user_frames:
            return f" {self.unknown_position}"
        file, line, function, source = failure.user_frames[-1]
        code = source.strip() or linecache.getline(file, line).strip()
        return f" was in {function}, {name_code(file)}, line {line}{f': {code}' if code else ''}"

    def _wait(self, timeout: float | None = None) -> bool:
        """Wait until the call is over, and return whether it is. Waits in intervals, so that signals are handled."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done_event.is_set():
            remaining = timeouts.INTERRUPT_POLL_S if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                return False
            self._done_event.wait(min(remaining, timeouts.INTERRUPT_POLL_S))
        return True

    def cancel(self) -> None:
        """End the function on all engines, within ten seconds even if it ignores interrupts.

        It is interrupted, and ends with KeyboardInterrupt. An engine that ignores two interrupts is ended and replaced;
        if that takes longer, it goes on after this method has returned.
        """
        deadline = time.monotonic() + timeouts.CANCEL_TIMEOUT_S
        for patience_s in (timeouts.CANCEL_INTERRUPT_TIMEOUT_S, timeouts.CANCEL_AGAIN_TIMEOUT_S):
            self._interrupt()
            if self._wait(patience_s):
                return
        if stuck := self._list_running_ranks():
            replacing = threading.Thread(
                target=self._end_and_replace, args=(stuck,), name="dtkit-replacing", daemon=True
            )
            replacing.start()
            replacing.join(max(0.0, deadline - time.monotonic()))
            if replacing.is_alive():
                print(  # noqa: T201 - cancel() itself has succeeded
                    f"{self.name} was cancelled; its engines are still being replaced. cluster.repair() waits for that"
                )

    def _end_and_replace(self, stuck: Sequence[int]) -> None:
        """End engines, and start others in their place. What a training lost by that is said, not raised."""
        self.engine_group.transport.kill(stuck)
        self._wait(timeouts.CANCEL_KILL_TIMEOUT_S)
        if self._repair is None:
            return
        try:
            self._repair()
        except DtkitError as error:
            print(f"{self.name} was cancelled: {error}")  # noqa: T201 - as above

    def _interrupt(self) -> None:
        """Interrupt the engines that still run the function."""
        if running := self._list_running_ranks():
            self._was_cancelled = True
            self.engine_group.interrupt(running)

    def _list_running_ranks(self) -> list[int]:
        return [rank for rank, future in enumerate(self._futures) if not future.done()]

    def to_pandas(self) -> pd.DataFrame:
        """Return logged values as a DataFrame: rank, index and a column per name. Needs pandas."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def figure(self) -> Figure:
        """Return logged values as a matplotlib Figure: an axes per name, a line per rank."""
        from dtkit.dashboard.figures.call_figure import draw_call

        return draw_call(self)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change, from any thread. Return the function that unsubscribes it."""
        return self._subscribers.add(callback)

    def _notify(self) -> None:
        self._subscribers.notify(self.name)

    def __repr__(self) -> str:
        return call_text.format_text(self)

    def _ipython_display_(self) -> None:
        call_display.show(self)


def submit(
    engine_group: EngineGroup,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    repair: Callable[[], object] | None = None,
) -> Task:
    """See :meth:`dtkit.Cluster.submit`; `repair` replaces engines that are gone."""
    check_callable(engine_group, function)

    def make_function_call(payload: Payload) -> Call[Any]:
        return make_call(FunctionOperations.call_function, payload=payload)

    return start_on_all_ranks(
        Task(engine_group, get_name(function), repair), (function, args, kwargs), make_function_call
    )


def check_callable(engine_group: EngineGroup, function: Any) -> None:
    """Raise TypeError for an object that can't be called, and ClusterClosedError for a closed cluster."""
    engine_group.check_open()
    if not callable(function):
        raise TypeError(
            f"function is {name_type(function)}, which can't be called; give a function, as in cluster.run(main, x)"
        )


def get_name(function: Any) -> str:
    """Return a name for a function."""
    return str(getattr(function, "__name__", type(function).__name__))


def start_on_all_ranks(
    task: Task,
    function_call: tuple[Any, tuple[Any, ...], dict[str, Any]],
    make_engine_call: Callable[[Payload], Call[Any]],
) -> Task:
    """Send a task's call to all ranks, and return the task."""
    engine_group = task.engine_group
    engine_group.membership.ensure_formed()
    warn_of_large_functions(task.name, [function_call[0]])
    target = formatting.format_count(task.world_size, "engine")
    with show_progress(f"pickling {task.name} for {target}") as progress:
        packed = engine_group.uploads.pack(function_call, name=task.name)
        progress.update(f"sending {task.name}, {formatting.format_bytes(packed.nbytes)}, to {target}")
        payload = engine_group.uploads.upload(packed)
    try:
        futures = engine_group.fan_out(make_engine_call(payload), listen=task.receive)
    except BaseException:  # also an interrupt, after which no engine opens the upload
        engine_group.uploads.discard(payload)
        raise
    task.start_collecting(futures, payload)
    return task
