"""``cluster.search``: trials on single engines as they become free, with a live table."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.arguments import suggest_arguments
from dtkit._util.notebook import UpdatableDisplay, in_notebook
from dtkit.dashboard import call_display
from dtkit.dashboard.text.progress import show_progress
from dtkit.dashboard.throttle import Throttle
from dtkit.errors import ItemError
from dtkit.integrations import timeouts as integration_timeouts
from dtkit.integrations.search.channel import NotebookEnd, TrialStart
from dtkit.integrations.search.result import SearchResult, set_last_result
from dtkit.integrations.search.studies import GridStudy, OptunaStudy
from dtkit.integrations.search.trial import run_trial
from dtkit.integrations.search.trial_record import TrialRecord
from dtkit.training.item_map import check_arguments, check_function
from dtkit.training.item_scheduler import ItemScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dtkit.integrations.search.studies import Direction, Study
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.training.item_map import OnError
    from dtkit.types import Failure


@suggest_arguments
def search(
    engine_group: EngineGroup,
    objective: Callable[..., Any],
    space: Mapping[str, Sequence[Any]] | None,
    repair: Callable[[], object],
    *,
    n_trials: int | None = None,
    study: Any = None,
    direction: Direction = "minimize",
    seed: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on_error: OnError = "return",
    timeout: float | None = None,
) -> SearchResult:
    """See :meth:`dtkit.Cluster.search`.

    n_trials : number of trials; required without a `space`. With one, by default all combinations.
    study : an Optuna study, with a sampler and a pruner of your choice; by default a new one with Optuna's defaults.
    direction : "minimize" or "maximize"; by default that of the study if there is one.
    seed : seeds the choice of parameters.
    args, kwargs : further arguments of the objective, which are sent once.
    on_error : "return" keeps failed trials in the result; if all have failed, the first error is raised. "raise" ends
        the search at the first failure.
    timeout : seconds for all trials; then the engines are interrupted, and TimeoutError is raised.
    """
    engine_group.check_open()
    check_function(objective, on_error, "cluster.search(objective, n_trials=20)")
    check_arguments(args, kwargs, timeout)
    chosen, num_trials = _choose_study(space, study, direction, n_trials, seed)
    name = str(getattr(objective, "__name__", type(objective).__name__))
    result = SearchResult(name, chosen.direction, getattr(chosen, "study", None))
    set_last_result(result)
    with tempfile.TemporaryDirectory(prefix="search-", dir=engine_group.folder) as folder:
        trials = _Trials(chosen, num_trials, result, folder, on_error)
        function_call = run_trial, (objective, *args), dict(kwargs or {})
        scheduler = ItemScheduler(engine_group, name, function_call, trials, repair)
        with call_display.display_until_done(scheduler), _show_live(result, trials):
            try:
                scheduler.run(timeout, integration_timeouts.SEARCH_POLL_S)
            except (KeyboardInterrupt, TimeoutError):
                print(  # noqa: T201 - the cell shows no result after an interrupt
                    f"ended after {result.describe()}; dtkit.integrations.search.get_last_result() has the trials"
                )
                raise
            finally:
                trials.fail_running()
    errors = [trial.error for trial in result.trials if trial.error is not None]
    if errors and len(errors) == len(result.trials):
        raise errors[0]
    return result


def _choose_study(
    space: Mapping[str, Sequence[Any]] | None, study: Any, direction: Direction, n_trials: int | None, seed: int | None
) -> tuple[Study, int]:
    """Return the study that chooses parameters, and the number of trials."""
    if n_trials is not None and (isinstance(n_trials, bool) or not isinstance(n_trials, int) or n_trials < 1):
        raise ValueError(f"n_trials={n_trials!r}; it must be a number from 1 up")
    if direction not in ("minimize", "maximize"):
        raise ValueError(f"direction={direction!r}; it must be 'minimize' or 'maximize'")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed={seed!r}; it must be an integer from 0 up, or None")
    if space is not None and study is not None:
        raise ValueError("space= and study= are given; a study chooses by itself, so leave the space out")
    if space is not None:
        grid = GridStudy(space, direction, n_trials, seed)
        return grid, len(grid)
    if n_trials is None:
        raise ValueError("n_trials= is missing: say how many trials to make, as in n_trials=20")
    return (OptunaStudy.create(direction, seed) if study is None else OptunaStudy(study)), n_trials


class _Trials:
    """The trials of a search, as items of a scheduler."""

    def __init__(self, study: Study, num_trials: int, result: SearchResult, folder: str, on_error: OnError) -> None:
        self.on_change: Callable[[], object] = bool
        self.num_trials = num_trials
        self._study, self._result, self._folder, self._on_error = study, result, folder, on_error
        self._trials: dict[int, Any] = {}
        self._starts: dict[int, TrialStart] = {}
        self._channels: dict[int, NotebookEnd] = {}
        self._started_at: dict[int, float] = {}

    # -- what the scheduler asks ------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        return len(self._trials) < self.num_trials

    def take(self) -> tuple[int, Any]:
        index = len(self._trials)
        trial = self._trials[index] = self._study.ask()
        self._result.trials.append(TrialRecord(trial.number, params=dict(trial.params)))
        start = self._starts[index] = TrialStart(trial.number, dict(trial.params), self._folder, attempt=0)
        return index, start

    def on_repeat(self, index: int, item: TrialStart) -> TrialStart:
        start = dataclasses.replace(item, params=dict(self._trials[index].params), attempt=item.attempt + 1)
        self._starts[index] = start
        return start

    def on_start(self, index: int, rank: int) -> None:
        self._channels[index] = NotebookEnd(self._starts[index], lambda *call: self._call(index, *call))
        self._started_at[index] = time.monotonic()
        self._result.trials[index].rank = rank
        self.on_change()

    def on_result(self, index: int, value: tuple[str, float | None]) -> None:
        self._channels[index].answer()  # the last report
        self._end(index, *value)

    def on_failure(self, index: int, failure: Failure) -> None:
        self._channels[index].answer()
        record = self._result.trials[index]
        record.error = ItemError(index, record.params, failure)
        self._end(index, "failed", None)
        if self._on_error == "raise":
            raise record.error

    def on_poll(self) -> None:
        for channel in list(self._channels.values()):
            if channel.answer():
                self.on_change()

    # -- one trial --------------------------------------------------------------------------------------------

    def _call(self, index: int, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of the study's trial for an engine."""
        record, trial = self._result.trials[index], self._trials[index]
        if method == "report":
            record.reports[args[1]] = args[0]
        elif method == "set_user_attr":
            record.user_attrs[args[0]] = args[1]
        value = getattr(trial, method)(*args, **kwargs)
        record.params = dict(trial.params)
        return value

    def _end(self, index: int, state: str, value: float | None) -> None:
        self._channels.pop(index)
        if value is not None and math.isnan(value):  # Optuna doesn't accept NaN
            state, value = "failed", None
        record = self._result.trials[index]
        record.state, record.value = state, value
        record.seconds = time.monotonic() - self._started_at[index]
        self._study.tell(self._trials[index], state, value)
        self.on_change()

    def fail_running(self) -> None:
        """Report the trials that did not end to the study as failed."""
        for index in list(self._channels):
            self._end(index, "failed", None)


@contextlib.contextmanager
def _show_live(result: SearchResult, trials: _Trials) -> Iterator[None]:
    """Show the trials while the block runs, as a table in a notebook, else as a line."""
    if in_notebook():
        view = _TableView(result)
        throttle = Throttle(view.update, timeouts.LIVE_INTERVAL_S)
        trials.on_change = throttle.trigger
        try:
            yield
        finally:
            throttle.close()
            view.update()
        return
    with show_progress(f"search {result.name}") as progress:
        trials.on_change = lambda: progress.update(
            f"search {result.name}: {len(result.trials)} of {trials.num_trials} trials, {result.describe()}"
        )
        yield


class _TableView:
    """The table of trials in a cell."""

    def __init__(self, result: SearchResult) -> None:
        self._result, self._display = result, UpdatableDisplay()
        # locks: while a table is made and sent
        self._lock = threading.Lock()  # the last update may overlap with a timer's

    def update(self) -> None:
        """Show the trials as of now."""
        with self._lock:
            self._display.show({"text/html": self._result.format_html(), "text/plain": self._result.format_text()})
