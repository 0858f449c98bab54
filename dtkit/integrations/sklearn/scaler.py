"""Standardization of features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import sklearn.preprocessing
from sklearn.utils.validation import check_is_fitted

from dtkit.data.partition import Partition
from dtkit.integrations.sklearn.mixin import ShardedMixin
from dtkit.integrations.sklearn.moments import Moments, compute_moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.sklearn.ranks import Ranks


class StandardScaler(ShardedMixin, sklearn.preprocessing.StandardScaler):  # type: ignore[misc]  # as Statistics
    """Scikit-learn's StandardScaler, fitted on shards. `partial_fit` adds rows."""

    def __init__(self, *, with_mean: bool = True, with_std: bool = True, cluster: Any = None) -> None:
        super().__init__(with_mean=with_mean, with_std=with_std)
        self.cluster = cluster

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn means and standard deviations, and forget earlier ones. `X` is an array or a partition."""
        del y
        self._reset()
        return self.partial_fit(X)

    def _reset(self) -> None:
        super()._reset()
        if hasattr(self, "_moments"):
            del self._moments

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Add rows."""
        del y
        self._check_parameters()
        is_first = not hasattr(self, "_moments")
        moments = self._fit_shards(_fit, self._check(X, reset=is_first))[0]["moments"]
        self._moments: Moments = moments if is_first else self._moments.merge(moments)
        self.n_samples_seen_ = np.int64(self._moments.count)
        self.mean_ = self._moments.mean if self.with_mean or self.with_std else None
        self.var_ = self._moments.variance if self.with_std else None
        self.scale_ = _compute_scale(self._moments) if self.with_std else None
        return self

    def transform(self, X: Any, copy: bool | None = None) -> Any:  # noqa: FBT001 - scikit-learn's signature
        """Return the rows with mean 0 and variance 1 in each feature. NaN is refused."""
        check_is_fitted(self)
        rows = np.asarray(X) if isinstance(X, Partition) else X
        return super().transform(self._check(rows, reset=False), copy)


def _compute_scale(moments: Moments) -> np.ndarray:
    """Return standard deviations, and 1 for features whose variance is only rounding error."""
    eps, variance = np.finfo(np.float64).eps, moments.variance
    bound = moments.count * eps * variance + (moments.count * moments.mean * eps) ** 2
    scale: np.ndarray = np.where(variance <= bound, 1.0, np.sqrt(variance))
    return scale


def _fit(ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    del rows
    X = np.asarray(columns[0], dtype=np.float64)
    return {"n_features": X.shape[1], "moments": compute_moments(ranks, X)}
