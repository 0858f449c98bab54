"""``cluster.train_xgboost``: XGBoost's own tracker in the notebook, its workers on the engines."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util.formatting import format_count
from dtkit.data.partition import Partition
from dtkit.errors import EngineError, format_ranks
from dtkit.integrations import timeouts
from dtkit.integrations.xgboost.checks import TRAIN, check_arguments, check_options
from dtkit.integrations.xgboost.result import BoostingResult
from dtkit.integrations.xgboost.stored import read_stored
from dtkit.rpc.replacement import replace_lost_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dtkit.rpc.engine_group import EngineGroup

FAILURE_MODES = ("repair", "shrink")
_MAX_RESTARTS = 3
_LOOPBACK = "127.0.0.1"
_last_result: list[BoostingResult] = []


def get_last_result() -> BoostingResult | None:
    """Return the result of the last training, which may be incomplete; None before the first."""
    return _last_result[0] if _last_result else None


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The engines of a training, and how it continues without one of them."""

    engine_group: EngineGroup
    cluster: Any
    on_failure: str

    def __post_init__(self) -> None:
        if self.on_failure not in FAILURE_MODES:
            raise ValueError(
                f"on_failure={self.on_failure!r}; it must be 'repair' (replace a lost engine) or 'shrink' (go on "
                "without it)"
            )

    def recover(self, error: EngineError, num_rounds: int) -> None:
        """Say in the cell which engine was lost. Replace it, or divide its rows among the others."""
        group, run = self.engine_group, self.cluster.current_run
        lost = group.membership.find_lost_ranks()
        holds_run = run is not None and not run.is_released
        shrinks = self.on_failure == "shrink" and not holds_run and len(lost) < group.world_size
        gone = [failure.rank for failure in error.failures if failure.is_engine_gone]  # other errors are consequences
        loss = f"the engine of {format_ranks(gone)} was lost" if len(gone) == 1 else f"{format_ranks(gone)} were lost"
        remedy = "the others take over the rows" if shrinks else "replaced"
        rounds = format_count(num_rounds, "round")
        print(f"{loss}: {remedy}, and the training goes on after {rounds}")  # noqa: T201 - so nothing is raised
        if shrinks:
            replace_lost_ranks(group, lost, shrink=True)
        else:
            self.cluster.repair()


def train(
    recovery: Recovery,
    params: Mapping[str, Any],
    data: Any,
    num_boost_round: int,
    evals: Mapping[str, Any] | None,
    early_stopping_rounds: int | None,
    options: dict[str, Any],
) -> BoostingResult:
    """See :meth:`dtkit.Cluster.train_xgboost`."""
    xgboost = _import_xgboost()
    check_arguments(params, num_boost_round, evals, early_stopping_rounds)
    check_options(options, xgboost)
    if not recovery.engine_group.membership.is_single_host:
        raise NotImplementedError("train_xgboost needs engines on one host: XGBoost's connections are not encrypted")
    start = options.pop("xgb_model", None)
    training = _Training(recovery, params, data, evals or {}, early_stopping_rounds, options)
    return training.run(num_boost_round, None if start is None else bytes(_get_booster(start).save_raw("ubj")), xgboost)


def _import_xgboost() -> Any:
    try:
        import xgboost
        import xgboost.tracker
    except ImportError:
        raise ImportError(
            "train_xgboost needs XGBoost, on the engines too; pip install 'dtkit-jupyter[xgboost]'"
        ) from None
    return xgboost


def _get_booster(model: Any) -> Any:
    return model.booster if isinstance(model, BoostingResult) else model


class _Training:
    """One training, with restarts after the loss of an engine."""

    def __init__(
        self,
        recovery: Recovery,
        params: Mapping[str, Any],
        data: Any,
        evals: Mapping[str, Any],
        early_stopping_rounds: int | None,
        options: dict[str, Any],
    ) -> None:
        self._group, self._cluster, self._params = recovery.engine_group, recovery.cluster, dict(params)
        self._recovery = recovery
        self._options, self._stop_rounds = options, early_stopping_rounds
        self._data = {TRAIN: data, **evals}
        self._placed: dict[str, Partition] = {}
        self._path: Path = self._group.folder / f"{self._group.make_key('xgboost')}.ubj"
        self._history: dict[str, dict[str, list[float]]] = {}

    def _place_rows(self) -> None:
        """Place the rows that are not on the engines yet. A new engine has those that were there before the loss."""
        for name, data in self._data.items():
            if name not in self._placed:
                self._placed[name] = self._place(data)

    def _place(self, data: Any) -> Partition:
        placed: Partition = data if isinstance(data, Partition) else self._cluster.partition(data)
        if placed.source is None or placed.source.engine_group is not self._group:
            raise ValueError("this partition belongs to another cluster; partition the rows with this one")
        return placed

    def run(self, num_rounds: int, start: bytes | None, xgboost: Any) -> BoostingResult:
        """Train until all rounds are complete."""
        given = start
        first = 0 if start is None else _load(xgboost, start).num_boosted_rounds()
        restarts = 0
        try:
            while True:
                done = 0 if start is None else _load(xgboost, start).num_boosted_rounds() - first
                try:
                    self._place_rows()
                    results = self._train_once(num_rounds - done, start)
                except EngineError as error:
                    start = self._take_stored() or start
                    if restarts == _MAX_RESTARTS or not any(failure.is_engine_gone for failure in error.failures):
                        self._keep_incomplete(xgboost, None if start is given else start, restarts)
                        raise
                    restarts += 1
                    if len(self._group.membership.find_lost_ranks()) == self._group.world_size:
                        self._placed.clear()  # new engines alone have no rows
                    self._recovery.recover(error, 0 if start is None else _load(xgboost, start).num_boosted_rounds())
                except KeyboardInterrupt:
                    start = self._take_stored() or start
                    self._keep_incomplete(xgboost, None if start is given else start, restarts)
                    raise
                else:
                    break
        finally:
            self._path.unlink(missing_ok=True)
        self._extend_history(results[0]["history"])
        result = BoostingResult(_load(xgboost, results[0]["model"]), self._history, restarts)
        _last_result[:] = [result]
        return result

    def _train_once(self, num_rounds: int, start: bytes | None) -> list[dict[str, Any]]:
        from dtkit.integrations.xgboost.worker import BoostingOrder, train_on_rank

        keys = {name: placed.source.key for name, placed in self._placed.items()}
        order = BoostingOrder(
            self._params,
            num_rounds,
            keys.pop(TRAIN),
            keys,
            self._stop_rounds,
            self._history,
            self._options,
            str(self._path),
        )
        with _run_tracker(self._cluster.world_size) as addresses:
            return list(self._cluster.run(train_on_rank, order, addresses, start))

    def _take_stored(self) -> bytes | None:
        """Return the model of the last stored round, if any, and keep the metrics up to there."""
        stored = read_stored(self._path)
        if stored is None:
            return None
        self._path.unlink()  # else the next attempt's metrics might be counted twice
        self._extend_history(stored[0])
        return stored[1]

    def _keep_incomplete(self, xgboost: Any, model: bytes | None, restarts: int) -> None:
        """Keep the model, unless no round was stored."""
        if model is not None:
            result = BoostingResult(_load(xgboost, model), self._history, restarts, is_complete=False)
            _last_result[:] = [result]
            print(  # noqa: T201 - the cell shows no result after an interrupt or an error
                f"ended after {format_count(result.num_rounds, 'round')}; "
                "dtkit.integrations.xgboost.get_last_result() has the model, and xgb_model= goes on with it"
            )

    def _extend_history(self, history: dict[str, dict[str, list[float]]]) -> None:
        for data, metrics in history.items():
            for name, values in metrics.items():
                self._history.setdefault(data, {}).setdefault(name, []).extend(values)


def _load(xgboost: Any, model: bytes) -> Any:
    return xgboost.Booster(model_file=bytearray(model))


@contextlib.contextmanager
def _run_tracker(world_size: int) -> Iterator[dict[str, Any]]:
    """Run XGBoost's tracker on loopback; yield the addresses that workers need."""
    from xgboost.core import XGBoostError
    from xgboost.tracker import RabitTracker

    tracker = RabitTracker(world_size, _LOOPBACK, sortby="task", timeout=int(timeouts.XGBOOST_TRACKER_TIMEOUT_S))
    tracker.start()
    try:
        yield {**tracker.worker_args(), "dmlc_timeout": int(timeouts.XGBOOST_COLLECTIVE_TIMEOUT_S), "dmlc_retry": 1}
    finally:
        with contextlib.suppress(XGBoostError):  # raised if a rank has failed, which the call has reported
            tracker.free()
