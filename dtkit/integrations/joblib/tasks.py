"""Tasks that joblib submits one by one. A thread gives them to engines as they become free."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded_in_thread
from dtkit.errors import EngineError
from dtkit.integrations import timeouts
from dtkit.integrations.joblib.shared_arrays import ArrayShare, load_arrays
from dtkit.training.item_scheduler import ItemScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.types import Failure


class TasksAbortedError(Exception):
    """Ends the thread's work: the caller does not want the tasks' results any more."""


class TaskQueue:
    """Tasks in the order of their submission: an :class:`~dtkit.training.item_scheduler.ItemSource`."""

    def __init__(self, engine_group: EngineGroup, repair: Callable[[], object], show: Callable[[str], object]) -> None:
        self._group, self._repair, self._show = engine_group, repair, show
        self._share = ArrayShare(engine_group)
        self._waiting: collections.deque[tuple[int, Any]] = collections.deque()
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        # locks: while a task is added, or the thread decides whether to end
        self._lock = threading.Lock()
        self._scheduler: ItemScheduler | None = None
        self._thread: threading.Thread | None = None
        self._is_aborted = False
        self.num_done: collections.Counter[int] = collections.Counter()
        """Tasks that each rank has computed."""

    def begin_call(self) -> None:
        """Note that another parallel call begins, before its first task."""
        self._share.begin_call()

    def submit(self, batch: Any) -> Future[Any]:
        """Queue one of joblib's batches of calls; return the future of its results."""
        shared = copy.copy(batch)
        shared.items = [self._share.replace(call) for call in batch.items]
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._futures[number] = future
            self._waiting.append((number, shared))
            if self._scheduler is None:
                self._start()
            else:
                self._scheduler.wake()
        return future

    def _start(self) -> None:
        self._is_aborted = False
        self._scheduler = self._make_scheduler()
        self._thread = threading.Thread(target=self._run, name="dtkit-joblib", daemon=True)
        self._thread.start()

    def _make_scheduler(self) -> ItemScheduler:
        return ItemScheduler(self._group, "joblib's tasks", (run_batch, (), {}), self, self._repair)

    def _run(self) -> None:
        """Compute tasks until none is left."""
        while (scheduler := self._scheduler) is not None:
            error = run_guarded_in_thread(functools.partial(scheduler.run, None), lambda error: error)
            with self._lock:
                self.num_done.update(scheduler.num_done)
                has_more = error is None and bool(self._waiting)  # submitted while the scheduler ended
                self._scheduler = self._make_scheduler() if has_more else None
                failed = {} if has_more else self._futures
                if not has_more:
                    self._futures = {}
                    self._waiting.clear()
            for future in failed.values():  # only after an error, or an abort
                future.set_exception(error or TasksAbortedError("joblib's tasks were aborted"))

    def abort(self) -> None:
        """Interrupt the engines' tasks, and wait until they are free."""
        self._is_aborted = True
        # waits: for the thread, with a limit
        self.join()

    def join(self) -> None:
        """Wait for the thread, which ends once no task is left."""
        thread, scheduler = self._thread, self._scheduler
        if thread is not None and thread is not threading.current_thread():
            if scheduler is not None:
                scheduler.wake()
            thread.join(timeouts.JOBLIB_ABORT_TIMEOUT_S)

    def close(self) -> None:
        """End all tasks, and free the shared arrays."""
        self.abort()
        self._share.discard()

    # -- what the scheduler asks ------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether a task waits."""
        if self._is_aborted:
            raise TasksAbortedError("joblib's tasks were aborted")
        return bool(self._waiting)

    def take(self) -> tuple[int, Any]:
        """Return the next task."""
        return self._waiting.popleft()

    def on_start(self, index: int, rank: int) -> None:
        """Do nothing."""

    def on_repeat(self, index: int, item: Any) -> Any:
        """Return the task as it was."""
        del index
        return item

    def on_result(self, index: int, value: Any) -> None:
        """Pass the results on to joblib, which may submit further tasks meanwhile."""
        self._tell_progress()
        self._futures.pop(index).set_result(value)

    def on_failure(self, index: int, failure: Failure) -> None:
        """Pass the error on to joblib."""
        self._futures.pop(index).set_exception(EngineError([failure]))

    def on_poll(self) -> None:
        """Raise TasksAbortedError if the caller has aborted the tasks."""
        if self._is_aborted:
            raise TasksAbortedError("joblib's tasks were aborted")

    def _tell_progress(self) -> None:
        scheduler = self._scheduler
        if scheduler is not None:
            done = self.num_done + scheduler.num_done
            nodes = ", ".join(f"node {rank}: {count}" for rank, count in sorted(done.items()))
            self._show(f"joblib: {done.total():,} tasks ({nodes})")


def run_batch(batch: Any) -> Any:
    """Compute a batch of calls on an engine."""
    batch.items = [load_arrays(call) for call in batch.items]
    return batch()
