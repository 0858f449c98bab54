"""One rank's part of a training of boosted trees, on an engine."""

from __future__ import annotations

import dataclasses
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xgboost

from dtkit._util.files import replace_file
from dtkit.engine.observe.call_output import log
from dtkit.integrations.shards import read_shard
from dtkit.integrations.xgboost.checks import TRAIN
from dtkit.integrations.xgboost.stored import pack_stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dtkit.engine.data.batches import Shards
    from dtkit.integrations.xgboost.stored import Metrics

_STORE_RATIO = 19
"""Ratio of the time between two stored models to the time that storing takes."""


@dataclasses.dataclass(frozen=True)
class BoostingOrder:
    """Instructions for all ranks."""

    params: dict[str, Any]
    num_rounds: int
    """Remaining rounds."""
    train_key: str
    eval_keys: dict[str, str]
    early_stopping_rounds: int | None
    earlier: Metrics
    """Metrics of the rounds before a restart."""
    options: dict[str, Any]
    """Further arguments of ``xgboost.train``."""
    model_path: str
    """File into which rank 0 writes metrics and model after a round."""


def train_on_rank(order: BoostingOrder, tracker: dict[str, Any], start: bytes | None) -> dict[str, Any]:
    """Train with the other ranks, from the model `start` if given. Return the model (rank 0) and the metrics."""
    import torch.distributed as dist

    rank = dist.get_rank()
    matrices = _get_matrices({TRAIN: order.train_key, **order.eval_keys})
    _check_widths(matrices)
    history: dict[str, Any] = {}
    with xgboost.collective.CommunicatorContext(**tracker, dmlc_task_id=f"{rank:06d}"):
        booster = xgboost.train(
            {"nthread": 1, **order.params},
            matrices[TRAIN],
            order.num_rounds,
            evals=[(matrix, name) for name, matrix in matrices.items()],
            evals_result=history,
            verbose_eval=False,
            xgb_model=None if start is None else bytearray(start),
            callbacks=[RoundLogger(order.model_path if rank == 0 else None, matrices[TRAIN].num_row()), *_stop(order)],
            **order.options,
        )
    model = bytes(booster.save_raw("ubj")) if rank == 0 else b""
    return {"model": model, "history": history, "best": booster.attr("best_iteration")}


def _stop(order: BoostingOrder) -> list[EarlyStopping]:
    if order.early_stopping_rounds is None:
        return []
    return [EarlyStopping(order.early_stopping_rounds, order.options.get("maximize"), order.earlier)]


class EarlyStopping(xgboost.callback.EarlyStopping):  # type: ignore[misc, unused-ignore]  # as RoundLogger
    """XGBoost's early stopping, which also counts the rounds before a restart."""

    def __init__(self, rounds: int, maximize: bool | None, earlier: Metrics) -> None:  # noqa: FBT001 - XGBoost's option
        super().__init__(rounds=rounds, maximize=maximize)
        self._earlier = earlier

    def before_training(self, model: Any) -> Any:
        """Repeat the decisions of the earlier rounds, which are the model's last ones."""
        model = super().before_training(model)
        count = max((len(values) for metrics in self._earlier.values() for values in metrics.values()), default=0)
        self.starting_round -= count
        for k in range(count):
            logged: Any = {
                data: {name: [values[k]] for name, values in metrics.items()} for data, metrics in self._earlier.items()
            }
            self.after_iteration(model, k, logged)
        self.starting_round += count
        return model


_known_matrices: weakref.WeakKeyDictionary[Shards, tuple[int, xgboost.DMatrix]] = weakref.WeakKeyDictionary()
"""Matrices of the last call, with the generation of the process group. They are freed with the partition's rows."""


def _get_matrices(keys: Mapping[str, str]) -> dict[str, xgboost.DMatrix]:
    """Return matrices by name, for the partitions with these keys.

    Matrices of the last call are reused, since XGBoost keeps their bins. Ranks estimate bins together, so no rank may
    do so alone. Hence a matrix is reused only in the same generation, in which no rank was replaced or failed.
    """
    from dtkit.engine.session import get_session

    state = get_session().state
    generation, known = state.get_group().generation, dict(_known_matrices)
    _known_matrices.clear()
    matrices = {}
    for name, key in keys.items():
        _, shards = state.get_data(key)
        known_generation, matrix = known.get(shards, (None, None))
        matrices[name] = _make_matrix(key) if matrix is None or known_generation != generation else matrix
        _known_matrices[shards] = generation, matrices[name]
    return matrices


def _check_widths(matrices: Mapping[str, xgboost.DMatrix]) -> None:
    """Raise ValueError if validation rows have another width. XGBoost would treat absent features as missing values."""
    expected = matrices[TRAIN].num_col()
    for name, matrix in matrices.items():
        if matrix.num_col() != expected:
            raise ValueError(
                f"evals[{name!r}] has {matrix.num_col()} features, and the training data {expected}; give the same ones"
            )


def _make_matrix(key: str) -> xgboost.DMatrix:
    columns, _ = read_shard(key)
    if len(columns) not in (2, 3) or columns[0].ndim != 2:
        shapes = ", ".join(str(column.shape) for column in columns)
        raise ValueError(
            f"the arrays have the shapes {shapes}; give (X, y) or (X, y, weights), where X has shape (rows, features)"
        )
    weights = columns[2] if len(columns) == 3 else None
    return xgboost.DMatrix(columns[0], columns[1], weight=weights, missing=np.nan)


class RoundLogger(xgboost.callback.TrainingCallback):  # type: ignore[misc, unused-ignore]  # no types where it is not installed
    """Shows each round in the notebook, and stores metrics and model in case an engine is lost.

    Storing takes at most a twentieth of the time: a model grows with each round.
    """

    def __init__(self, model_path: str | None, num_rows: int) -> None:
        super().__init__()
        self._path = None if model_path is None else Path(model_path)
        self._num_rows, self._began = num_rows, time.perf_counter()
        self._store_at, self._first_round = 0.0, 0

    def before_training(self, model: Any) -> Any:
        """Count on from the rounds that the model has."""
        self._first_round = model.num_boosted_rounds()
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: dict[str, Any]) -> bool:
        """Log a round, and never stop."""
        seconds, self._began = time.perf_counter() - self._began, time.perf_counter()
        metrics = {
            f"{data}_{name}".replace("-", "_"): values[-1]
            for data, logged in evals_log.items()
            for name, values in logged.items()
        }
        log(
            round=self._first_round + epoch,
            samples=self._num_rows,
            **{name: float(value) for name, value in metrics.items()},
            round_s=seconds,
        )
        if self._path is not None and time.perf_counter() >= self._store_at:
            self._store(self._path, model, evals_log)
        return False

    def _store(self, path: Path, model: Any, evals_log: dict[str, Any]) -> None:
        start = time.perf_counter()
        replace_file(path, pack_stored(evals_log, bytes(model.save_raw("ubj"))))
        end = time.perf_counter()
        self._store_at = end + _STORE_RATIO * (end - start)
