"""Boosted trees on engines: equal to one process, rounds live, lost engines, interrupts."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_digits

import dtkit
from tests.support.marks import slow
from tests.support.small import check_usable
from tests.support.waiting import wait_until

xgboost = pytest.importorskip("xgboost")
from dtkit.integrations.xgboost import get_last_result  # noqa: E402 - it needs xgboost

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:the classes of rank:UserWarning")]

PARAMS = {"objective": "multi:softprob", "num_class": 10, "max_depth": 4, "tree_method": "hist", "max_bin": 64}


@pytest.mark.parametrize("cluster", [slow(1), 2, slow(3)], indirect=True)
def test_trees_equal_those_of_one_process(cluster: dtkit.Cluster):
    """The digits' features have 17 values, so that the bins of all ranks are the same."""
    X, y = load_digits(return_X_y=True)
    found = cluster.train_xgboost(PARAMS, (X, y), 5, evals={"again": (X[:300], y[:300])})
    history: dict[str, Any] = {}
    matrix = xgboost.DMatrix(X, y)
    evals = [(matrix, "train"), (xgboost.DMatrix(X[:300], y[:300]), "again")]
    local = xgboost.train(PARAMS, matrix, 5, evals=evals, evals_result=history, verbose_eval=False)
    assert np.abs(found.predict(X) - local.predict(matrix)).max() < 1e-5
    assert found.num_rounds == 5
    for name, metrics in history.items():
        np.testing.assert_allclose(found.history[name]["mlogloss"], metrics["mlogloss"], atol=1e-5)
    check_usable(cluster)


def test_rounds_are_shown_and_early_stopping_keeps_the_best(
    cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    X, y = load_breast_cancer(return_X_y=True)
    params = {"objective": "binary:logistic", "eta": 1.0, "max_depth": 6}
    part = cluster2.partition((X[:400], y[:400]), seed=0)
    result = cluster2.train_xgboost(
        params, part, 200, evals={"validation": (X[400:], y[400:])}, early_stopping_rounds=5
    )
    losses = result.history["validation"]["logloss"]
    assert result.best_iteration == int(np.argmin(losses))
    assert len(losses) == result.best_iteration + 6 < 200
    assert "validation_logloss" in capsys.readouterr().out
    assert list(result.to_pandas().columns) == ["train-logloss", "validation-logloss"]
    assert len(result.figure().axes) == 1
    assert f"best round {result.best_iteration}" in repr(result)
    more = cluster2.train_xgboost(params, part, 3, xgb_model=result)
    assert more.num_rounds == result.num_rounds + 3


def list_matrices() -> list[int]:
    from dtkit.integrations.xgboost import worker

    return [id(matrix) for _, matrix in worker._known_matrices.values()]


def test_second_training_uses_the_matrix_and_its_bins_again(cluster2: dtkit.Cluster):
    X, y = load_digits(return_X_y=True)
    part, other = cluster2.partition((X, y)), cluster2.partition((X, y), seed=1)
    first = cluster2.train_xgboost(PARAMS, part, 3)
    known = cluster2.run(list_matrices)
    second = cluster2.train_xgboost(PARAMS, part, 3)
    assert cluster2.run(list_matrices) == known
    np.testing.assert_array_equal(first.predict(X), second.predict(X))
    with pytest.raises(dtkit.errors.EngineError):  # the group is formed again, maybe with another engine
        cluster2.run(lambda: 1 / 0)
    third = cluster2.train_xgboost(PARAMS, part, 3)
    assert cluster2.run(list_matrices) != known
    np.testing.assert_array_equal(first.predict(X), third.predict(X))
    cluster2.train_xgboost(PARAMS, other, 1)
    del part
    assert [len(matrices) for matrices in cluster2.run(list_matrices)] == [1, 1]


@pytest.mark.slow
def test_training_goes_on_after_the_loss_of_an_engine(tmp_path: Path):
    X, y = load_digits(return_X_y=True)
    with dtkit.Cluster(2, threads=1) as cluster:
        undisturbed = cluster.train_xgboost(PARAMS, (X, y), 8)
        start = time.monotonic()
        found = cluster.train_xgboost(PARAMS, (X, y), 8, custom_metric=make_killing_metric(tmp_path / "flag"))
        assert time.monotonic() - start < 60
        assert found.restarts == 1
        assert found.num_rounds == 8
        for name in ("mlogloss", "calls"):  # each round once, also those before the loss
            assert len(found.history["train"][name]) == 8
        assert found.history["train"]["calls"][-1] < 8  # stored rounds are not trained again
        assert np.abs(found.predict(X) - undisturbed.predict(X)).max() < 1e-5
        check_usable(cluster)


@pytest.mark.parametrize("on_failure", ["repair", slow("shrink")])
def test_engine_lost_while_rows_are_placed_does_not_end_the_training(tmp_path: Path, on_failure: str):
    flag = tmp_path / "flag"

    def load_and_die() -> Any:
        import torch.distributed as dist

        if dist.get_rank() == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return load_digits(return_X_y=True)

    X, y = load_digits(return_X_y=True)
    with dtkit.Cluster(2, threads=1) as cluster:
        found = cluster.train_xgboost(
            PARAMS, (X, y), 3, evals={"again": load_and_die}, on_failure=cast("Any", on_failure)
        )
        assert (found.restarts, found.num_rounds) == (1, 3)
        assert found.history["again"] == found.history["train"]
        assert cluster.world_size == (1 if on_failure == "shrink" else 2)
        gc.collect()  # the error that was caught held both partitions
        part = cluster.partition((X, y))  # frees the others, also what the survivor had of the lost call
        assert cluster.run(count_partitions) == [1] * cluster.world_size
        del part
        check_usable(cluster)


def count_partitions() -> int:
    from dtkit.engine.session import get_session

    return len(get_session().state.data)


@pytest.mark.slow
def test_others_take_over_the_rows_of_a_lost_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    X, y = load_digits(return_X_y=True)
    with dtkit.Cluster(3, threads=1) as cluster:
        part = cluster.partition((X, y), seed=0)
        undisturbed = cluster.train_xgboost(PARAMS, part, 8)
        metric = make_killing_metric(tmp_path / "flag")
        found = cluster.train_xgboost(PARAMS, part, 8, custom_metric=metric, on_failure="shrink")
        assert "the engine of rank 1 was lost: the others take over the rows" in capsys.readouterr().out
        assert (found.restarts, found.num_rounds, cluster.world_size) == (1, 8, 2)
        # 64 features of 17 values have the same bins on any ranks
        assert np.abs(found.predict(X) - undisturbed.predict(X)).max() < 1e-5
        check_usable(cluster)


def make_killing_metric(flag: Path) -> Any:
    calls: list[int] = []

    def metric(predictions: np.ndarray, matrix: Any) -> tuple[str, float]:
        import torch.distributed as dist

        calls.append(1)
        if len(calls) == 5 and dist.get_rank() == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "calls", float(len(calls))

    return metric


@pytest.mark.slow
def test_interrupt_keeps_the_model(cluster2: dtkit.Cluster, tmp_path: Path):
    X, y = load_digits(return_X_y=True)
    flag = tmp_path / "flag"

    def metric(predictions: np.ndarray, matrix: Any) -> tuple[str, float]:
        flag.touch()
        # sleeps: so that a thousand rounds take longer than the interrupt
        time.sleep(0.05)
        return "one", 1.0

    def interrupt() -> None:
        wait_until(flag.exists)
        wait_until(lambda: any(cluster2.folder.glob("*.ubj")))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cluster2.train_xgboost(PARAMS, (X, y), 1000, custom_metric=metric)
    thread.join(10)
    result = get_last_result()
    assert result is not None
    assert not result.is_complete
    assert 1 <= result.num_rounds < 1000
    assert len(result.history["train"]["one"]) == result.num_rounds
    check_usable(cluster2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_boost_round": 0}, "num_boost_round=0; it must be a number of rounds, at least 1"),
        ({"early_stopping_rounds": 3}, "early_stopping_rounds needs evals"),
        ({"on_failure": "pause"}, r"on_failure='pause'; it must be 'repair' .* or 'shrink'"),
        ({"num_rounds": 3}, r"no argument num_rounds=; did you mean num_boost_round=\?"),
    ],
)
def test_bad_arguments_are_refused(cluster2: dtkit.Cluster, arguments: dict[str, Any], message: str):
    X, y = load_digits(return_X_y=True)
    with pytest.raises((TypeError, ValueError), match=message):
        cluster2.train_xgboost(PARAMS, (X, y), **arguments)


def test_errors_of_xgboost_leave_the_engines_usable(cluster2: dtkit.Cluster):
    X, y = load_digits(return_X_y=True)
    with pytest.raises(dtkit.errors.EngineError, match="nonsense"):
        cluster2.train_xgboost({"objective": "nonsense"}, (X, y), 2)
    with pytest.raises(dtkit.errors.EngineError, match=r"give \(X, y\) or \(X, y, weights\)"):
        cluster2.train_xgboost(PARAMS, (X,), 2)
    with pytest.raises(dtkit.errors.EngineError, match=r"evals\['fewer'\] has 3 features, and the training data 64"):
        cluster2.train_xgboost(PARAMS, (X, y), 2, evals={"fewer": (X[:, :3], y)})
    check_usable(cluster2)
