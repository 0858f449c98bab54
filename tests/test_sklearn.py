"""Estimators on shards, fitted in this process: scikit-learn's results and scikit-learn's own checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.cluster
import sklearn.decomposition
import sklearn.linear_model
import sklearn.naive_bayes
import sklearn.preprocessing
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.utils.estimator_checks import parametrize_with_checks

from dtkit.integrations.sklearn import (
    PCA,
    GaussianNB,
    KMeans,
    LinearRegression,
    LogisticRegression,
    Ridge,
    StandardScaler,
    Statistics,
)
from tests.support.estimators import compare_with_sklearn


def test_each_estimator_gives_scikit_learns_result():
    compare_with_sklearn(lambda rows: rows, cluster=None)


def test_partial_fit_continues():
    X, _ = load_breast_cancer(return_X_y=True)
    statistics, scaler = Statistics(), StandardScaler()
    for part in np.array_split(X, 3):
        statistics.partial_fit(part)
        scaler.partial_fit(part)
    assert statistics.n_samples_seen_ == len(X)
    np.testing.assert_allclose(statistics.var_, X.var(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(statistics.max_, X.max(axis=0))
    np.testing.assert_allclose(scaler.transform(X), sklearn.preprocessing.StandardScaler().fit_transform(X), atol=1e-12)


def test_empty_clusters_take_the_farthest_rows():
    X, _ = load_digits(return_X_y=True)
    start = np.vstack([X[:9], np.full((1, 64), 1e3)])
    expected = sklearn.cluster.KMeans(10, init=start, n_init=1).fit(X)
    found = KMeans(10, init=start).fit(X)
    assert np.abs(found.cluster_centers_ - expected.cluster_centers_).max() < 1e-10
    np.testing.assert_array_equal(found.labels_, expected.labels_)
    np.testing.assert_array_equal(found.predict(X), expected.labels_)


def test_options_give_scikit_learns_results():
    X, y = load_digits(return_X_y=True)
    scaled = sklearn.preprocessing.StandardScaler().fit_transform(X)
    free = {"C": np.inf, "fit_intercept": False, "tol": 1e-8, "max_iter": 3000}
    found = LogisticRegression(**free).fit(scaled[:, 20:40], y > 4)
    expected = sklearn.linear_model.LogisticRegression(**free).fit(scaled[:, 20:40], y > 4)
    assert np.abs(found.coef_ - expected.coef_).max() < 1e-5
    for wanted in (5, 0.9):
        ours, theirs = PCA(wanted).fit(X), sklearn.decomposition.PCA(wanted, svd_solver="full").fit(X)
        assert np.abs(ours.components_ - theirs.components_).max() < 1e-10
        assert ours.noise_variance_ == pytest.approx(theirs.noise_variance_, rel=1e-10)
    features, target = load_diabetes(return_X_y=True)
    targets = np.column_stack([target, -2 * target])
    ridge = Ridge([1.0, 0.1], fit_intercept=False).fit(features, targets)
    expected_ridge = sklearn.linear_model.Ridge([1.0, 0.1], fit_intercept=False).fit(features, targets)
    assert np.abs(ridge.coef_ - expected_ridge.coef_).max() < 1e-9
    nb = GaussianNB(priors=[0.3, 0.7]).fit(X, y > 4)
    expected_nb = sklearn.naive_bayes.GaussianNB(priors=[0.3, 0.7]).fit(X, y > 4)
    np.testing.assert_allclose(nb.predict_proba(X), expected_nb.predict_proba(X), atol=1e-10)


def test_repeated_starts_depend_on_the_random_state_only():
    X, _ = load_digits(return_X_y=True)
    first, second = (KMeans(10, init="random", n_init=3, random_state=0).fit(X) for _ in range(2))
    assert first.inertia_ == second.inertia_
    assert KMeans(10, random_state=0).fit(X).inertia_ <= 1.1 * first.inertia_


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda X: KMeans(8, init="best").fit(X), r"init='best'; it must be 'k-means\+\+', 'random' or an array"),
        (lambda X: KMeans(3, init=np.zeros((2, 2))).fit(X), r"init has shape \(2, 2\); it must be .* \(3, 2\)"),
        (lambda X: PCA(3).fit(X), r"n_components=3 must be an integer between 0 and .*=2"),
        (lambda X: KMeans(2, init=np.full((2, 2), np.nan)).fit(X), "init contains NaN or infinity"),
        (lambda X: KMeans(2, n_init=0).fit(X), "The 'n_init' parameter of KMeans must be .* Got 0 instead"),
        (lambda X: KMeans(0).fit(X), "The 'n_clusters' parameter of KMeans must be an int in the range"),
        (lambda X: Ridge("much").fit(X, X[:, 0]), "The 'alpha' parameter of Ridge must be"),
        (lambda X: GaussianNB(var_smoothing=-1).fit(X, X[:, 0] > 0.5), "The 'var_smoothing' parameter of GaussianNB"),
        (lambda X: Ridge([1.0, 2.0]).fit(X, X[:, 0]), "alpha has 2 values for 1 targets; give one for each"),
        (lambda X: PCA("mle").fit(X), "n_components='mle' must be an integer between 0 and"),
        (lambda X: KMeans(2, init=len).fit(X), "init=.*; it must be 'k-means"),
        (lambda X: LogisticRegression(C=0).fit(X, X[:, 0] > 0.5), "The 'C' parameter of LogisticRegression must be"),
    ],
)
def test_bad_options_are_refused(fit: Any, message: str):
    with pytest.raises(ValueError, match=message):
        fit(np.random.default_rng(0).random((9, 2)))


def test_clone_keeps_the_options():
    copy = clone(KMeans(3, tol=0.1))
    assert copy.get_params() == KMeans(3, tol=0.1).get_params()


ESTIMATORS = [
    LinearRegression(),
    Ridge(),
    LogisticRegression(),
    KMeans(random_state=0),
    PCA(),
    GaussianNB(),
    StandardScaler(),
    Statistics(),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    ESTIMATORS,
    expected_failed_checks=lambda estimator: (
        {"check_non_transformer_estimators_n_iter": "n_iter_ is None, as scikit-learn's own Ridge has it for SVD"}
        if isinstance(estimator, Ridge)
        else {}
    ),
)
def test_scikit_learns_own_checks(estimator: Any, check: Any):
    check(estimator)


def test_cluster_of_another_kind_is_refused():
    for cluster in (3, "c"):
        with pytest.raises(TypeError, match=r"cluster=.*; it must be a dtkit\.Cluster"):
            Ridge(cluster=cluster).fit(np.eye(3), np.ones(3))
