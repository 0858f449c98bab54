"""Restarts of `cluster.train_xgboost` after the loss of an engine, without engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dtkit.errors import EngineError
from dtkit.integrations.xgboost.training import _Training
from dtkit.types import Failure

if TYPE_CHECKING:
    from pathlib import Path

LOSS = EngineError([Failure(1, "?", "EngineLost", "its process has ended", "", kind="lost")])


class Booster:
    """A model that holds its number of rounds."""

    def __init__(self, model_file: bytearray) -> None:
        self.rounds = int(model_file)

    def num_boosted_rounds(self) -> int:
        return self.rounds


def make_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: list[bytes | None]) -> Any:
    """Return a training of which each attempt but the last loses an engine, after it has stored such a model."""
    group: Any = SimpleNamespace(folder=tmp_path, make_key=lambda kind: kind)
    rows = SimpleNamespace(source=SimpleNamespace(engine_group=group))
    cluster = SimpleNamespace(partition=lambda _: rows, repair=lambda: training.repairs.append(1))
    training: Any = _Training(group, cluster, {}, [], {}, None, {})
    training.repairs, training.attempts = [], []

    def train_once(num_rounds: int, start: bytes | None) -> list[dict[str, Any]]:
        training.attempts.append((num_rounds, start))
        if len(training.attempts) <= len(stored):
            model = stored[len(training.attempts) - 1]
            if model is not None:
                training._path.write_bytes(model)
            raise LOSS
        return [{"model": b"20", "history": {}}]

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes | None, stored: list[bytes | None], attempts: Any
):
    training = make_training(tmp_path, monkeypatch, stored)
    result = training.run(20, start, SimpleNamespace(Booster=Booster))
    assert training.attempts == attempts
    assert (len(training.repairs), result.restarts) == (len(stored), len(stored))
    assert not training._path.exists()
