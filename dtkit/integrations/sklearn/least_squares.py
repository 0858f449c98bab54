"""Linear and ridge regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import scipy.linalg
import sklearn.linear_model

from dtkit.data.partition import Partition
from dtkit.integrations.sklearn.mixin import ShardedMixin, require_targets
from dtkit.integrations.sklearn.triangular import compute_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.sklearn.ranks import Ranks


class _LeastSquares(ShardedMixin):
    """Common base of both regressions."""

    fit_intercept: bool

    def _reduce(self, X: Any, y: Any) -> dict[str, Any]:
        """Return the means and the triangular factor of the centered columns."""
        if isinstance(X, Partition):
            return dict(self._fit_shards(_fit, X, y, center=self.fit_intercept)[0])
        require_targets(self, y)
        X, y = self._check(X, y, multi_output=True, y_numeric=True)
        return dict(self._fit_shards(_fit, X, np.asarray(y, dtype=np.float64), center=self.fit_intercept)[0])

    def _set_result(self, coefficients: np.ndarray, reduced: dict[str, Any]) -> None:
        """Set `coef_` and `intercept_` from coefficients of shape (features, targets)."""
        intercept = reduced["y_mean"] - reduced["X_mean"] @ coefficients
        is_vector = reduced["is_vector"]
        self.coef_ = coefficients[:, 0] if is_vector else coefficients.T
        self.intercept_ = (intercept[0] if is_vector else intercept) if self.fit_intercept else 0.0


class LinearRegression(_LeastSquares, sklearn.linear_model.LinearRegression):  # type: ignore[misc]  # as Statistics
    """Scikit-learn's LinearRegression (ordinary least squares), fitted on shards."""

    def __init__(self, *, fit_intercept: bool = True, cluster: Any = None) -> None:
        super().__init__(fit_intercept=fit_intercept)
        self.cluster = cluster

    def fit(self, X: np.ndarray | Partition, y: Any = None) -> Self:
        """Fit to arrays, or to a partition of ``(X, y)``."""
        self._check_parameters()
        reduced = self._reduce(X, y)
        left, right = _split(reduced)
        coefficients, _, self.rank_, self.singular_ = scipy.linalg.lstsq(left, right)
        self._set_result(coefficients, reduced)
        return self


class Ridge(_LeastSquares, sklearn.linear_model.Ridge):  # type: ignore[misc]  # as Statistics
    """Scikit-learn's Ridge (least squares with an l2 penalty), fitted on shards.

    alpha : weight of the penalty, at least 0; one for each target if it is an array.
    """

    def __init__(self, alpha: Any = 1.0, *, fit_intercept: bool = True, cluster: Any = None) -> None:
        super().__init__(alpha, fit_intercept=fit_intercept)
        self.cluster = cluster

    def fit(self, X: np.ndarray | Partition, y: Any = None) -> Self:
        """Fit to arrays, or to a partition of ``(X, y)``."""
        self._check_parameters()
        if np.min(self.alpha) < 0:
            raise ValueError(f"alpha == {self.alpha}, must be >= 0")
        reduced = self._reduce(X, y)
        left, right = _split(reduced)
        rotation, values, directions = np.linalg.svd(left, full_matrices=False)
        if np.size(self.alpha) not in (1, right.shape[1]):
            raise ValueError(f"alpha has {np.size(self.alpha)} values for {right.shape[1]} targets; give one for each")
        penalties = np.broadcast_to(np.asarray(self.alpha, dtype=np.float64), right.shape[1])
        denominators = values[:, None] ** 2 + penalties
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(values[:, None] > 1e-15, values[:, None] / denominators, 0.0)
        self._set_result(directions.T @ (weights * (rotation.T @ right)), reduced)
        self.n_iter_, self.solver_ = None, "svd"
        return self


def _split(reduced: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the factor's columns of features and of targets."""
    factor, n_features = reduced["factor"], reduced["n_features"]
    return factor[:, :n_features], factor[:, n_features:]


def _fit(ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray, *, center: bool) -> dict[str, Any]:
    del rows
    X, y = (np.asarray(column, dtype=np.float64) for column in _check_pair(columns))
    targets = y[:, None] if y.ndim == 1 else y
    count, X_sum, y_sum = ranks.sum(len(X), X.sum(axis=0), targets.sum(axis=0))
    X_mean, y_mean = (X_sum / count, y_sum / count) if center else (np.zeros_like(X_sum), np.zeros_like(y_sum))
    return {
        "n_features": X.shape[1],
        "X_mean": X_mean,
        "y_mean": y_mean,
        "factor": compute_factor(ranks, np.hstack([X - X_mean, targets - y_mean])),
        "is_vector": y.ndim == 1,
    }


def _check_pair(columns: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    if len(columns) != 2:
        raise ValueError(f"the partition has {len(columns)} arrays; give features and targets, as in partition((X, y))")
    return columns
