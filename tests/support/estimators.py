"""Comparison of estimators on shards with scikit-learn's on all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import sklearn.cluster
import sklearn.decomposition
import sklearn.linear_model
import sklearn.naive_bayes
import sklearn.preprocessing
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

from dtkit.integrations import sklearn as sharded

if TYPE_CHECKING:
    from collections.abc import Callable

BOUND = 1e-10
LOGISTIC_BOUND = 1e-5


def compare_with_sklearn(place: Callable[[tuple[np.ndarray, ...]], Any], cluster: Any) -> None:
    """Fit each estimator to what `place` makes of the rows, and compare its attributes."""

    def fit(estimator: Any, *rows: np.ndarray) -> Any:
        placed = place(rows)
        return estimator.fit(*placed) if isinstance(placed, tuple) else estimator.fit(placed)

    digits, labels = load_digits(return_X_y=True)
    features, target = load_diabetes(return_X_y=True)
    start = digits[:10]
    pairs = [
        (sharded.StandardScaler, sklearn.preprocessing.StandardScaler, {}, (digits,), ["mean_", "var_", "scale_"]),
        (sharded.PCA, sklearn.decomposition.PCA, {"n_components": 20}, (digits,), ["components_", "singular_values_"]),
        (
            sharded.LinearRegression,
            sklearn.linear_model.LinearRegression,
            {},
            (features, target),
            ["coef_", "intercept_"],
        ),
        (sharded.Ridge, sklearn.linear_model.Ridge, {"alpha": 0.5}, (features, target), ["coef_", "intercept_"]),
        (sharded.GaussianNB, sklearn.naive_bayes.GaussianNB, {}, (digits, labels), ["theta_", "var_", "class_prior_"]),
        (sharded.KMeans, sklearn.cluster.KMeans, {"n_clusters": 10, "init": start, "n_init": 1}, (digits,), _OF_KMEANS),
    ]
    for ours, theirs, options, rows, names in pairs:
        found, expected = fit(ours(**options, cluster=cluster), *rows), theirs(**options).fit(*rows)
        for name in names:
            check_close(getattr(found, name), getattr(expected, name), BOUND, f"{ours.__name__}.{name}")
    _compare_logistic(fit, cluster)
    statistics = fit(sharded.Statistics(cluster=cluster), digits)
    check_close(statistics.mean_, digits.mean(axis=0), BOUND, "mean_")
    np.testing.assert_array_equal(statistics.min_, digits.min(axis=0))


_OF_KMEANS = ["cluster_centers_", "inertia_", "labels_", "n_iter_"]


def _compare_logistic(fit: Callable[..., Any], cluster: Any) -> None:
    options: dict[str, Any] = {"tol": 1e-7, "max_iter": 2000}
    for load in (load_breast_cancer, load_digits):
        rows, labels = load(return_X_y=True)
        rows = sklearn.preprocessing.StandardScaler().fit_transform(rows)
        found = fit(sharded.LogisticRegression(**options, cluster=cluster), rows, labels)
        expected = sklearn.linear_model.LogisticRegression(**options).fit(rows, labels)
        check_close(found.coef_, expected.coef_, LOGISTIC_BOUND, f"coef_ of {load.__name__}")
        assert found.score(rows, labels) == expected.score(rows, labels)


def check_close(found: Any, expected: Any, bound: float, name: str) -> None:
    """Check that arrays differ by at most `bound`, relative to the largest value."""
    found, expected = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    difference = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
    assert difference <= bound, f"{name} differs by {difference:.2e}"
