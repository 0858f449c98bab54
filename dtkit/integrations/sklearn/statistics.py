"""Statistics of columns. Further rows can be added later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator

from dtkit.integrations.sklearn.mixin import ShardedMixin
from dtkit.integrations.sklearn.moments import Moments, compute_moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.sklearn.ranks import Ranks


class Statistics(ShardedMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Mean, variance, minimum and maximum of each feature, exact over ranks and calls.

    After `fit` or `partial_fit`: `n_samples_seen_`, `mean_`, `var_` (divided by the number of rows), `min_`, `max_`.
    """

    def __init__(self, *, cluster: Any = None) -> None:
        self.cluster = cluster

    def fit(self, X: Any, y: Any = None) -> Self:
        """Describe rows, and forget earlier ones. `X` is an array or a partition."""
        del y
        if hasattr(self, "_moments"):
            del self._moments
        return self.partial_fit(X)

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Add rows."""
        del y
        is_first = not hasattr(self, "_moments")
        result = self._fit_shards(_fit, self._check(X, reset=is_first))[0]
        moments, low, high = result["moments"], result["min"], result["max"]
        if not is_first:
            moments = self._moments.merge(moments)
            low, high = np.minimum(self.min_, low), np.maximum(self.max_, high)
        self._moments: Moments = moments
        self.min_: np.ndarray = low
        self.max_: np.ndarray = high
        self.n_samples_seen_, self.mean_, self.var_ = moments.count, moments.mean, moments.variance
        return self


def _fit(ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    del rows
    X = np.asarray(columns[0], dtype=np.float64)
    empty = np.full((1, X.shape[1]), np.inf)  # a rank may have no rows
    extremes = np.stack([np.vstack([X, empty]).min(axis=0), np.vstack([X, -empty]).max(axis=0)])
    gathered = np.stack(ranks.gather(extremes))
    return {
        "n_features": X.shape[1],
        "moments": compute_moments(ranks, X),
        "min": gathered[:, 0].min(axis=0),
        "max": gathered[:, 1].max(axis=0),
    }
