"""A backend of joblib whose workers are the engines of a cluster."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import joblib
from joblib.parallel import AutoBatchingMixin, ParallelBackendBase

from dtkit.dashboard.text.progress import show_progress
from dtkit.integrations.joblib.tasks import TaskQueue
from dtkit.rpc.protocol import FunctionOperations, make_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from dtkit.rpc.engine_group import EngineGroup


class EnginesBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
    """See :meth:`dtkit.Cluster.joblib`. Parallel calls within a task run one after another."""

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(self, tasks: TaskQueue, num_engines: int) -> None:
        super().__init__()
        self._tasks, self._num_engines = tasks, num_engines

    def __reduce__(self) -> Any:
        """Raise TypeError: tasks on engines have no engines of their own."""
        raise TypeError("engines can't be used from within a task")

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many engines work: all for -1, all but one for -2, and so on."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        wanted = self._num_engines if n_jobs is None else n_jobs
        return max(1, self._num_engines + 1 + wanted) if wanted < 0 else min(wanted, self._num_engines)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        """Prepare for a call of joblib's `Parallel`; return the number of engines."""
        del options
        self.parallel = parallel
        return self.effective_n_jobs(n_jobs)

    def start_call(self) -> None:
        """Begin a call, before its first task."""
        self._tasks.begin_call()

    def submit(self, func: Any, callback: Callable[[Future[Any]], object] | None = None) -> Future[Any]:
        """Queue a batch of calls."""
        future = self._tasks.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the results of a batch that has ended, or raise its error."""
        # waits: already done here
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:  # noqa: FBT001, FBT002 - joblib's signature
        """Interrupt all tasks. Engines work again when the next one is submitted."""
        del ensure_ready
        self._tasks.abort()


@contextlib.contextmanager
def use_engines(engine_group: EngineGroup, repair: Callable[[], object]) -> Iterator[None]:
    """See :meth:`dtkit.Cluster.joblib`; `repair` replaces engines that are gone."""
    with show_progress("joblib") as progress:
        tasks = TaskQueue(engine_group, repair, progress.update)
        _load_libraries(engine_group)
        try:
            with joblib.parallel_config(EnginesBackend(tasks, engine_group.world_size), n_jobs=-1):
                yield
        finally:
            tasks.close()


def _load_libraries(engine_group: EngineGroup) -> None:
    """Let all engines import scikit-learn at the same time, instead of each in its first task."""
    payload = engine_group.uploads.upload(engine_group.uploads.pack((import_libraries, (), {})))
    try:
        engine_group.call_all(make_call(FunctionOperations.call_function, payload=payload))
    finally:
        engine_group.uploads.discard(payload)


def import_libraries() -> None:
    """Import the modules that most tasks need."""
    with contextlib.suppress(ImportError):
        import sklearn.ensemble
        import sklearn.linear_model
        import sklearn.model_selection
        import sklearn.pipeline
        import sklearn.svm  # noqa: F401
