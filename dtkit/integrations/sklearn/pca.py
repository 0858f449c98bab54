"""Principal components."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import sklearn.decomposition

from dtkit.integrations.sklearn.mixin import ShardedMixin
from dtkit.integrations.sklearn.triangular import compute_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.sklearn.ranks import Ranks


class PCA(ShardedMixin, sklearn.decomposition.PCA):  # type: ignore[misc]  # as Statistics
    """Scikit-learn's PCA with the full decomposition, fitted on shards.

    n_components : number of components, the share of variance that they explain (between 0 and 1), or None for all.
    """

    def __init__(self, n_components: float | None = None, *, whiten: bool = False, cluster: Any = None) -> None:
        super().__init__(n_components, whiten=whiten, svd_solver="full")
        self.cluster = cluster

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to an array or a partition."""
        del y
        self._check_parameters()
        result = self._fit_shards(_fit, self._check(X, ensure_min_samples=2))[0]
        _, values, directions = np.linalg.svd(result["factor"], full_matrices=False)
        count = result["count"]
        most = min(count, len(values))
        values, directions = values[:most], _choose_signs(directions[:most])
        variances = values**2 / (count - 1)
        kept = self._count_components(variances, most)
        self.mean_, self.n_samples_, self.n_components_ = result["mean"], count, kept
        self.components_, self.singular_values_ = directions[:kept], values[:kept]
        self.explained_variance_ = variances[:kept]
        self.explained_variance_ratio_ = variances[:kept] / variances.sum()
        self.noise_variance_ = variances[kept:].mean() if kept < most else 0.0
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Fit to an array, and return it in the components' space."""
        transformed: np.ndarray = self.fit(X, y).transform(X)
        return transformed

    def _count_components(self, variances: np.ndarray, most: int) -> int:
        wanted = self.n_components
        if wanted is None:
            return most
        if isinstance(wanted, float) and 0 < wanted < 1:
            shares = np.cumsum(variances) / variances.sum()
            return int(np.searchsorted(shares, wanted, side="right") + 1)
        if not isinstance(wanted, numbers.Integral) or not 0 <= int(wanted) <= most:
            raise ValueError(
                f"n_components={wanted!r} must be an integer between 0 and min(n_samples, n_features)={most}, or a "
                "share of the variance between 0 and 1"
            )
        return int(wanted)


def _choose_signs(directions: np.ndarray) -> np.ndarray:
    """Make each component's largest coefficient positive, as scikit-learn does."""
    largest = np.argmax(np.abs(directions), axis=1)
    signs = np.sign(directions[np.arange(len(directions)), largest])
    return directions * np.where(signs == 0, 1.0, signs)[:, None]


def _fit(ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    del rows
    X = np.asarray(columns[0], dtype=np.float64)
    count, total = ranks.sum(len(X), X.sum(axis=0))
    mean = total / count
    factor = compute_factor(ranks, X - mean)
    return {"n_features": X.shape[1], "count": int(count), "mean": mean, "factor": factor}
