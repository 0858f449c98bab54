"""One rank's part of a training of boosted trees, on an engine."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from dtkit._util.files import replace_file
from dtkit.engine.observe.call_output import log
from dtkit.integrations.shards import read_shard


@dataclasses.dataclass(frozen=True)
class BoostingOrder:
    """What all ranks are to do."""

    params: dict[str, Any]
    num_rounds: int
    """Rounds that are left."""
    train_key: str
    eval_keys: dict[str, str]
    early_stopping_rounds: int | None
    options: dict[str, Any]
    """Further arguments of ``xgboost.train``."""
    model_path: str
    """File into which rank 0 writes the model after each round."""


def train_on_rank(order: BoostingOrder, tracker: dict[str, Any], start: bytes | None) -> dict[str, Any]:
    """Train with the other ranks. `start` is the model to go on with. Return the model (rank 0) and the metrics."""
    import torch.distributed as dist

    rank = dist.get_rank()
    matrices = {name: _make_matrix(key) for name, key in {"train": order.train_key, **order.eval_keys}.items()}
    history: dict[str, Any] = {}
    with xgboost.collective.CommunicatorContext(**tracker, dmlc_task_id=f"{rank:06d}"):
        booster = xgboost.train(
            {"nthread": 1, **order.params},
            matrices["train"],
            order.num_rounds,
            evals=[(matrix, name) for name, matrix in matrices.items()],
            evals_result=history,
            early_stopping_rounds=order.early_stopping_rounds,
            verbose_eval=False,
            xgb_model=None if start is None else bytearray(start),
            callbacks=[RoundLogger(order.model_path if rank == 0 else None, matrices["train"].num_row())],
            **order.options,
        )
    model = bytes(booster.save_raw("ubj")) if rank == 0 else b""
    return {"model": model, "history": history, "best": booster.attr("best_iteration")}


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
    """Shows each round in the notebook, and stores the model for the case that an engine is lost."""

    def __init__(self, model_path: str | None, num_rows: int) -> None:
        super().__init__()
        self._path = None if model_path is None else Path(model_path)
        self._num_rows, self._began = num_rows, time.perf_counter()

    def after_iteration(self, model: Any, epoch: int, evals_log: dict[str, Any]) -> bool:
        """Log a round, and never stop."""
        seconds, self._began = time.perf_counter() - self._began, time.perf_counter()
        metrics = {
            f"{data}_{name}".replace("-", "_"): values[-1]
            for data, own in evals_log.items()
            for name, values in own.items()
        }
        log(
            round=epoch,
            samples=self._num_rows,
            **{name: float(value) for name, value in metrics.items()},
            round_s=seconds,
        )
        if self._path is not None:
            replace_file(self._path, bytes(model.save_raw("ubj")))
        return False
