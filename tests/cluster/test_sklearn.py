"""Estimators on engines, compared with scikit-learn on all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sklearn.linear_model
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import cross_val_score

from dtkit.errors import EngineError
from dtkit.integrations.sklearn import PCA, GaussianNB, KMeans, LogisticRegression, Ridge, StandardScaler
from tests.support.estimators import BOUND, check_close, compare_with_sklearn
from tests.support.marks import slow
from tests.support.small import check_usable

if TYPE_CHECKING:
    import dtkit

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
    with pytest.raises(EngineError, match=r"the partition has 1 arrays; give features and targets"):
        Ridge(cluster=cluster2).fit(cluster2.partition((X[:5],)))
    with pytest.raises(ValueError, match=r"name them, as in PCA\(cluster=cluster\)"):
        PCA().fit(cluster2.partition((X,)))
    with pytest.raises(ValueError, match="y is part of the partition"):
        Ridge(cluster=cluster2).fit(cluster2.partition((X, y)), y)
    check_usable(cluster2)
