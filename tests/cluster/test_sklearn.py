"""Estimators on engines, compared with scikit-learn on all rows."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import cross_val_score

import dtkit
from dtkit.errors import EngineError
from dtkit.integrations.sklearn import PCA, GaussianNB, KMeans, LogisticRegression, Ridge, StandardScaler
from tests.support.estimators import BOUND, check_close, compare_with_sklearn
from tests.support.marks import slow
from tests.support.small import check_usable
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("cluster", [slow(1), 2, slow(3), slow(4)], indirect=True)
def test_each_estimator_gives_scikit_learns_result(cluster: dtkit.Cluster):
    compare_with_sklearn(lambda rows: rows, cluster)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the classes of rank:UserWarning")
@pytest.mark.parametrize("options", [{"by": "strided"}, {"weights": [1, 5]}, {"seed": 3}], ids=str)
def test_shards_may_have_any_rows(cluster2: dtkit.Cluster, options: dict[str, Any]):
    compare_with_sklearn(lambda rows: cluster2.partition(rows, **options), cluster2)


@pytest.mark.filterwarnings("ignore:the classes of rank:UserWarning")
def test_partition_is_fitted_where_it_lies(cluster2: dtkit.Cluster):
    X, y = load_breast_cancer(return_X_y=True)
    part = cluster2.partition((X, y))
    ridge = Ridge(cluster=cluster2).fit(part)
    assert repr(cluster2.last_task).startswith("Ridge.fit on 2 nodes: done")
    expected = sklearn.linear_model.Ridge().fit(X, y)
    check_close(ridge.coef_, expected.coef_, BOUND, "coef_")
    assert ridge.n_features_in_ == 30
    assert GaussianNB(cluster=cluster2).fit(part).classes_.tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_shards_may_have_fewer_rows_than_features(cluster: dtkit.Cluster):
    X, y = np.random.default_rng(0).normal(size=(5, 3)), np.array([0, 1, 1, 0, 1])
    scaler = StandardScaler(cluster=cluster).fit(X)
    check_close(scaler.mean_, X.mean(axis=0), BOUND, "mean_")
    ridge = Ridge(cluster=cluster).fit(X, y)
    check_close(ridge.coef_, sklearn.linear_model.Ridge().fit(X, y).coef_, BOUND, "coef_")
    assert KMeans(2, random_state=0, cluster=cluster).fit(X).inertia_ >= 0
    assert PCA(cluster=cluster).fit(X).components_.shape == (3, 3)
    LogisticRegression(cluster=cluster).fit(X, y)
    with pytest.raises(ValueError, match="3 samples don't suffice for 4 ranks"):
        PCA(cluster=cluster).fit(X[:3])


def test_labels_may_be_text_and_estimators_compose(cluster2: dtkit.Cluster):
    X, y = load_digits(return_X_y=True)
    names = np.array(["even", "odd"])[y % 2]
    model = clone(GaussianNB(cluster=cluster2))
    assert model.cluster is cluster2
    scores = cross_val_score(model, X, names, cv=2)
    assert scores.tolist() == cross_val_score(GaussianNB(), X, names, cv=2).tolist()


def test_iterations_are_logged_by_node(cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    X, _ = load_digits(return_X_y=True)
    KMeans(10, init=X[:10], cluster=cluster2).fit(X)
    assert "loss" in capsys.readouterr().out


def test_bad_input_raises_and_leaves_the_engines_usable(cluster2: dtkit.Cluster):
    X, y = load_digits(return_X_y=True)
    X[7, 3] = np.nan
    with pytest.raises(EngineError, match="X contains NaN or infinity; remove these rows"):
        StandardScaler(cluster=cluster2).fit(cluster2.partition((X,)))
    with pytest.raises(ValueError, match="contains NaN"):
        KMeans(cluster=cluster2).fit(X)
    with pytest.raises(EngineError, match=r"X has shape \(\d+, 8, 8\); it must be \(rows, features\)"):
        PCA(cluster=cluster2).fit(cluster2.partition((X.reshape(-1, 8, 8),)))
    features, targets = np.random.default_rng(0).normal(size=(9, 2)), np.array([0.5, 1.0, np.nan] * 3)
    for estimator in (Ridge(cluster=cluster2), LogisticRegression(cluster=cluster2)):
        with pytest.raises(EngineError, match="y contains NaN or infinity; remove these rows"):
            estimator.fit(cluster2.partition((features, targets)))
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        GaussianNB(cluster=cluster2).fit(cluster2.partition((features, np.arange(9) / 2)))
    with pytest.raises(EngineError, match=r"y has shape \(\d, 2\); it must be one label for each row"):
        GaussianNB(cluster=cluster2).fit(cluster2.partition((features, np.ones((9, 2), dtype=int))))
    part = cluster2.partition((features,))
    scaler = StandardScaler(cluster=cluster2).fit(part)
    with pytest.raises(ValueError, match="the new rows have 3 features, and the earlier ones 2"):
        scaler.partial_fit(cluster2.partition((np.ones((9, 3)),)))
    for use in (
        scaler.transform,
        KMeans(1, cluster=cluster2).fit(part).predict,
        PCA(cluster=cluster2).fit(part).transform,
    ):
        with pytest.raises(TypeError, match="the rows of a partition are on engines; give the arrays"):
            use(part)
    with pytest.raises(EngineError, match=r"the partition has 1 arrays; give features and targets"):
        Ridge(cluster=cluster2).fit(cluster2.partition((X[:5],)))
    with pytest.raises(ValueError, match=r"name them, as in PCA\(cluster=cluster\)"):
        PCA().fit(cluster2.partition((X,)))
    with pytest.raises(ValueError, match="y is part of the partition"):
        Ridge(cluster=cluster2).fit(cluster2.partition((X, y)), y)
    check_usable(cluster2)


def plant(what: str, flag: str) -> None:
    """Let k-means wait at its third iteration, or end the engine of rank 1 there."""
    import torch.distributed as dist

    from dtkit.integrations.sklearn import kmeans

    move, calls = kmeans._move_centers, []

    def move_centers(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            kmeans._move_centers = move
            Path(flag).touch()
            if what == "wait":
                # sleeps: under test: an iteration that an interrupt must end
                time.sleep(60)
            elif dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return move(*args)

    kmeans._move_centers = move_centers


@pytest.mark.slow
def test_an_engine_killed_in_k_means_is_named_and_the_fit_can_be_repeated(tmp_path: Path):
    X, _ = load_digits(return_X_y=True)
    with dtkit.Cluster(2, threads=1) as cluster:
        expected = KMeans(10, init=X[:10], cluster=cluster).fit(X)
        cluster.run(plant, "kill", str(tmp_path / "flag"))
        with pytest.raises(EngineError, match=r"rank 1"):
            KMeans(10, init=X[:10], cluster=cluster).fit(X)
        cluster.repair()
        again = KMeans(10, init=X[:10], cluster=cluster).fit(X)
        np.testing.assert_array_equal(again.cluster_centers_, expected.cluster_centers_)
        check_usable(cluster)


@pytest.mark.slow
def test_an_interrupt_ends_the_iterations_and_leaves_the_engines_usable(tmp_path: Path):
    X, _ = load_digits(return_X_y=True)
    flag = tmp_path / "flag"

    def interrupt() -> None:
        wait_until(flag.exists)
        os.kill(os.getpid(), signal.SIGINT)

    with dtkit.Cluster(2, threads=1) as cluster:
        cluster.run(plant, "wait", str(flag))
        thread = threading.Thread(target=interrupt)
        thread.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            KMeans(10, init=X[:10], cluster=cluster).fit(X)
        thread.join(10)
        assert time.monotonic() - start < 30
        KMeans(10, init=X[:10], cluster=cluster).fit(X)
        check_usable(cluster)
