"""Restarts of `cluster.train_xgboost` after the loss of an engine, without engines."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit.errors import EngineError
from dtkit.integrations.xgboost.stored import pack_stored, read_stored
from dtkit.integrations.xgboost.training import Recovery, _Training, get_last_result
from dtkit.types import Failure

if TYPE_CHECKING:
    from pathlib import Path

METRICS = {"train": {"rmse": [0.5]}}
LOSS = EngineError([Failure(1, "?", "EngineLost", "its process has ended", "", kind="lost")])


class Booster:
    """A model that holds its number of rounds."""

    def __init__(self, model_file: bytearray) -> None:
        self.rounds = int(model_file)

    def num_boosted_rounds(self) -> int:
        return self.rounds


def make_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: list[bytes | None]) -> Any:
    """Return a training of which each attempt but the last loses an engine, after it has stored such a model."""
    group: Any = SimpleNamespace(folder=tmp_path, make_key=lambda kind: kind, world_size=2)
    group.membership = SimpleNamespace(find_lost_ranks=lambda: [1])
    rows = SimpleNamespace(source=SimpleNamespace(engine_group=group))
    cluster = SimpleNamespace(
        partition=lambda _: rows, repair=lambda: training.repairs.append(1), current_run=None, world_size=2
    )
    training: Any = _Training(Recovery(group, cluster, "repair"), {}, [], {}, None, {})
    training.repairs, training.attempts = [], []

    def train_once(num_rounds: int, start: bytes | None) -> list[dict[str, Any]]:
        training.attempts.append((num_rounds, start))
        if len(training.attempts) <= len(stored):
            model = stored[len(training.attempts) - 1]
            if model is not None:
                training._path.write_bytes(pack_stored(METRICS, model))
            raise LOSS
        return [{"model": b"20", "history": METRICS}]

    monkeypatch.setattr(training, "_train_once", train_once)
    return training


@pytest.mark.parametrize(
    ("start", "stored", "attempts"),
    [
        (None, [b"8"], [(20, None), (12, b"8")]),
        (None, [None, b"3"], [(20, None), (20, None), (17, b"3")]),
        (b"5", [b"9"], [(20, b"5"), (16, b"9")]),  # rounds of a first model are not counted
    ],
)
def test_a_restart_trains_only_the_remaining_rounds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start: bytes | None,
    stored: list[bytes | None],
    attempts: Any,
):
    training = make_training(tmp_path, monkeypatch, stored)
    result = training.run(20, start, SimpleNamespace(Booster=Booster))
    assert training.attempts == attempts
    assert (len(training.repairs), result.restarts) == (len(stored), len(stored))
    lines = [f"rank 1 was lost: .* goes on after {int(model or 0)} rounds" for _, model in attempts[1:]]
    assert re.search(".*\n.*".join(lines), capsys.readouterr().out)
    assert not training._path.exists()
    num_stored = sum(model is not None for model in stored)
    assert result.history == {"train": {"rmse": [0.5] * (num_stored + 1)}}  # of each attempt's stored rounds, once


def test_rows_that_an_engine_was_lost_with_are_placed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    training = make_training(tmp_path, monkeypatch, [])
    place, calls = training._cluster.partition, []

    def lose_an_engine_with_the_second(data: Any) -> Any:
        calls.append(data)
        if len(calls) == 2:
            raise LOSS
        return place(data)

    training._cluster.partition = lose_an_engine_with_the_second
    training._data |= {"validation": [1], "other": [2]}
    result = training.run(20, None, SimpleNamespace(Booster=Booster))
    assert calls == [[], [1], [1], [2]]  # the new engine has what was placed before
    assert (training.repairs, training.attempts, result.restarts) == ([1], [(20, None)], 1)
    assert "the engine of rank 1 was lost: replaced, and the training goes on after 0 rounds" in capsys.readouterr().out


def test_rows_are_placed_again_where_all_engines_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    training = make_training(tmp_path, monkeypatch, [b"8"])
    training._group.membership.find_lost_ranks = lambda: [0, 1]
    place, calls = training._cluster.partition, []
    training._cluster.partition = lambda data: calls.append(data) or place(data)
    assert training.run(20, None, SimpleNamespace(Booster=Booster)).restarts == 1
    assert calls == [[], []]


def test_the_last_stored_model_is_kept_when_the_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    training = make_training(tmp_path, monkeypatch, [b"2", b"4", b"6", b"7"])
    with pytest.raises(EngineError):
        training.run(20, None, SimpleNamespace(Booster=Booster))
    result = get_last_result()
    assert result is not None
    assert (result.num_rounds, result.restarts, result.is_complete) == (7, 3, False)
    assert result.history == {"train": {"rmse": [0.5] * 4}}


def test_a_stored_model_may_have_any_bytes(tmp_path: Path):
    path = tmp_path / "model"
    assert read_stored(path) is None
    path.write_bytes(pack_stored(METRICS, b"a\n\nb\x00"))
    assert read_stored(path) == (METRICS, b"a\n\nb\x00")


def test_each_stored_round_has_its_metrics(tmp_path: Path):
    xgboost = pytest.importorskip("xgboost")
    from dtkit.integrations.xgboost.worker import RoundLogger

    path, rows = tmp_path / "model", np.random.default_rng(0).normal(size=(50, 3))
    matrix = xgboost.DMatrix(rows, rows[:, 0])
    metrics: dict[str, Any] = {}
    xgboost.train(
        {"nthread": 1},
        matrix,
        3,
        evals=[(matrix, "train")],
        evals_result=metrics,
        verbose_eval=False,
        callbacks=[RoundLogger(str(path), 50)],
        custom_metric=lambda *_: [("one", 1.0), ("two", np.float32(2))],
    )
    stored = read_stored(path)
    assert stored is not None
    count = xgboost.Booster(model_file=bytearray(stored[1])).num_boosted_rounds()
    assert 1 <= count <= 3
    assert stored[0] == {"train": {name: values[:count] for name, values in metrics["train"].items()}}


def test_a_restarted_training_stops_early_where_an_undisturbed_one_does(tmp_path: Path):
    """The best round comes before the restart: rounds after it are worse than that one, and better than the others."""
    xgboost = pytest.importorskip("xgboost")
    from dtkit.integrations.xgboost.worker import EarlyStopping

    losses = [9.0, 1.0, 5.0, 4.0, 3.0, 2.0, 6.0]
    rows = np.random.default_rng(0).normal(size=(50, 3))
    matrix = xgboost.DMatrix(rows, rows[:, 0])

    def train(first: int, start: Any) -> Any:
        remaining = iter(losses[first:])
        return xgboost.train(
            {"nthread": 1},
            matrix,
            len(losses) - first,
            evals=[(matrix, "train")],
            verbose_eval=False,
            xgb_model=start,
            callbacks=[EarlyStopping(4, None, {"train": {"rmse": [0.0] * first, "planned": losses[:first]}})],
            custom_metric=lambda *_: ("planned", next(remaining)),
        )

    undisturbed = train(0, None)
    partial = xgboost.train({"nthread": 1}, matrix, 3)
    restarted = train(3, partial)
    assert undisturbed.num_boosted_rounds() == restarted.num_boosted_rounds() == 6
    assert undisturbed.attr("best_iteration") == restarted.attr("best_iteration") == "1"
