"""Gaussian naive Bayes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import sklearn.naive_bayes

from dtkit.integrations.sklearn.classes import ClassifierMixin
from dtkit.integrations.sklearn.moments import compute_moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.data.partition import Partition
    from dtkit.integrations.sklearn.ranks import Ranks


class GaussianNB(ClassifierMixin, sklearn.naive_bayes.GaussianNB):  # type: ignore[misc]  # as Statistics
    """Scikit-learn's GaussianNB, fitted on shards."""

    def __init__(self, *, priors: Any = None, var_smoothing: float = 1e-9, cluster: Any = None) -> None:
        super().__init__(priors=priors, var_smoothing=var_smoothing)
        self.cluster = cluster

    def fit(self, X: np.ndarray | Partition, y: Any = None) -> Self:
        """Fit to arrays, or to a partition of ``(X, y)``."""
        self._check_parameters()
        result = self._fit_classes(_fit, X, y)
        counts = result["counts"]
        self.epsilon_ = self.var_smoothing * result["moments"].variance.max()
        self.class_count_, self.theta_ = counts, result["sums"] / counts[:, None]
        self.var_ = result["deviations"] / counts[:, None] + self.epsilon_
        self.class_prior_ = counts / counts.sum() if self.priors is None else self._check_priors()
        return self

    def _check_priors(self) -> np.ndarray:
        priors = np.asarray(self.priors)
        if len(priors) != len(self.classes_):
            raise ValueError("Number of priors must match number of classes.")
        if not np.isclose(priors.sum(), 1.0):
            raise ValueError("The sum of the priors should be 1.")
        if (priors < 0).any():
            raise ValueError("Priors must be non-negative.")
        return priors


def _fit(ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray, *, classes: np.ndarray) -> dict[str, Any]:
    del rows
    X = np.asarray(columns[0], dtype=np.float64)
    member = (np.asarray(columns[1])[:, None] == classes).astype(np.float64)
    counts, sums = ranks.sum(member.sum(axis=0), member.T @ X)
    means = sums / counts[:, None]
    centered = X - member @ means
    residuals, deviations = ranks.sum(member.T @ centered, member.T @ centered**2)
    return {
        "n_features": X.shape[1],
        "counts": counts,
        "sums": sums,
        "deviations": deviations - residuals**2 / counts[:, None],
        "moments": compute_moments(ranks, X),
    }
