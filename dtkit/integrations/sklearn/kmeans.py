"""k-means by Lloyd's algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import sklearn.cluster
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.metrics import euclidean_distances
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from dtkit.data.partition import Partition
from dtkit.integrations.sklearn.mixin import ShardedMixin
from dtkit.integrations.sklearn.moments import compute_moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.sklearn.ranks import Ranks

_MAX_SAMPLE_ROWS = 20_000
_BLOCK_ROWS = 4096  # the distances of so many rows fit into the processor's cache


class KMeans(
    ShardedMixin,
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]  # scikit-learn has no types
    TransformerMixin,  # type: ignore[misc]
    ClusterMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Scikit-learn's KMeans, fitted on shards.

    init : "k-means++", "random", or an array of centers. If a partition has more than 20,000 rows, the first two choose
        from a sample of that size.
    n_init : number of starts; the best one is used. "auto" is 10 for "random" and 1 otherwise.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: Any = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: Any = None,
        cluster: Any = None,
    ) -> None:
        self.n_clusters, self.init, self.n_init, self.max_iter = n_clusters, init, n_init, max_iter
        self.tol, self.random_state = tol, random_state
        self.cluster = cluster

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to an array or a partition. `labels_` are in the order of the rows."""
        del y
        self._check_parameters()
        X = self._check(X)
        candidates = self._sample_rows(X) if isinstance(X, Partition) else X
        if len(candidates) < self.n_clusters:
            raise ValueError(f"n_samples={len(candidates)} should be >= n_clusters={self.n_clusters}.")
        results = self._fit_shards(
            _fit, X, starts=self._choose_starts(candidates), max_iter=self.max_iter, tol=self.tol
        )
        first = results[0]
        self.cluster_centers_, self.inertia_, self.n_iter_ = first["centers"], first["inertia"], first["iterations"]
        rows = np.concatenate([result["rows"] for result in results])
        self.labels_ = np.concatenate([result["labels"] for result in results])[np.argsort(rows)]
        self._n_features_out = self.n_clusters  # for the names of the features that `transform` returns
        return self

    def fit_predict(self, X: Any, y: Any = None) -> np.ndarray:
        """Fit, and return the number of each row's cluster."""
        labels: np.ndarray = self.fit(X, y).labels_
        return labels

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Return the number of the cluster nearest to each row."""
        return _assign(self._check_rows(X), self.cluster_centers_).astype(np.int32)

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Return the distances of each row to all centers."""
        distances: np.ndarray = euclidean_distances(self._check_rows(X), self.cluster_centers_)
        return distances

    def score(self, X: np.ndarray, y: Any = None) -> float:
        """Return the negative sum of squared distances to the nearest centers."""
        del y
        X = self._check_rows(X)
        return -_sum_squares(X, _assign(X, self.cluster_centers_), self.cluster_centers_)

    def _check_parameters(self) -> None:
        options = {"n_init": self.n_init, "max_iter": self.max_iter, "tol": self.tol}
        _Options(self.n_clusters, random_state=self.random_state, **options)._check_parameters()  # noqa: SLF001 - of this module

    def _check_rows(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        rows: np.ndarray = self._check(np.asarray(X) if isinstance(X, Partition) else X, reset=False)
        return rows

    def _sample_rows(self, partition: Partition) -> np.ndarray:
        results = self._fit_shards(_sample, partition, fraction=min(1.0, _MAX_SAMPLE_ROWS / partition.n))
        return np.concatenate([result["sample"] for result in results])

    def _choose_starts(self, rows: np.ndarray) -> np.ndarray:
        """Return centers of shape (starts, clusters, features)."""
        random = check_random_state(self.random_state)
        if not isinstance(self.init, str) and not callable(self.init):
            centers = np.asarray(self.init, dtype=np.float64)
            if centers.shape != (self.n_clusters, rows.shape[1]):
                raise ValueError(
                    f"init has shape {centers.shape}; it must be (n_clusters, n_features) = "
                    f"{(self.n_clusters, rows.shape[1])}"
                )
            if not np.isfinite(centers).all():
                raise ValueError("init contains NaN or infinity; give finite centers")
            return centers[None]
        num_starts = (10 if self.init == "random" else 1) if self.n_init == "auto" else int(self.n_init)
        if self.init == "random":
            chosen = [random.permutation(len(rows))[: self.n_clusters] for _ in range(num_starts)]
            return np.stack([rows[indices] for indices in chosen])
        if self.init != "k-means++":
            raise ValueError(f"init={self.init!r}; it must be 'k-means++', 'random' or an array of centers")
        draw = sklearn.cluster.kmeans_plusplus
        return np.stack([draw(rows, self.n_clusters, random_state=random)[0] for _ in range(num_starts)])


class _Options(ShardedMixin, sklearn.cluster.KMeans):  # type: ignore[misc]  # as above
    """Scikit-learn's own KMeans, which knows what its options may be."""


_Options.__name__ = "KMeans"  # in errors


def _sample(ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray, *, fraction: float) -> dict[str, Any]:
    del ranks, rows
    X = np.asarray(columns[0], dtype=np.float64)
    every = max(1, int(1 / fraction))
    return {"n_features": X.shape[1], "sample": X[::every]}


def _fit(
    ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray, *, starts: np.ndarray, max_iter: int, tol: float
) -> dict[str, Any]:
    """Run Lloyd's algorithm from each start, and return the best result. Centering the rows reduces rounding errors."""
    X = np.asarray(columns[0], dtype=np.float64)
    moments = compute_moments(ranks, X)
    centered = X - moments.mean
    limit = tol * float(moments.variance.mean())
    results = [_run_lloyd(ranks, centered, start - moments.mean, max_iter, limit) for start in starts]
    best = min(results, key=lambda result: float(result["inertia"]))
    return best | {"centers": best["centers"] + moments.mean, "rows": rows, "n_features": X.shape[1]}


def _run_lloyd(ranks: Ranks, X: np.ndarray, centers: np.ndarray, max_iter: int, limit: float) -> dict[str, Any]:
    labels, sum_of_norms = np.full(len(X), -1), float((X**2).sum())
    has_converged, iterations = False, 0
    while iterations < max_iter:
        iterations += 1
        before = labels
        labels, offsets = _find_nearest(X, centers)
        ranks.log(loss=(sum_of_norms + offsets) / max(len(X), 1))
        moved, num_changed = _move_centers(ranks, X, labels, before, centers)
        shift = float(((moved - centers) ** 2).sum())
        centers = moved
        has_converged = not num_changed
        if has_converged or shift <= limit:
            break
    if not has_converged:  # labels must be those of the last centers
        labels = _assign(X, centers)
    (total,) = ranks.sum(_sum_squares(X, labels, centers))
    return {"centers": centers, "labels": labels.astype(np.int32), "inertia": float(total), "iterations": iterations}


def _find_nearest(X: np.ndarray, centers: np.ndarray) -> tuple[np.ndarray, float]:
    """Return each row's nearest center, and the sum of squared distances minus the sum of the rows' squared norms."""
    squares, offsets = (centers**2).sum(axis=1), 0.0
    labels = np.empty(len(X), dtype=np.intp)
    for k in range(0, len(X), _BLOCK_ROWS):
        distances = squares - 2.0 * (X[k : k + _BLOCK_ROWS] @ centers.T)
        nearest = distances.argmin(axis=1)
        labels[k : k + _BLOCK_ROWS] = nearest
        offsets += float(distances[np.arange(len(nearest)), nearest].sum())
    return labels, offsets


def _assign(X: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Return the number of the nearest center of each row."""
    return _find_nearest(X, centers)[0]


def _sum_squares(X: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    return float(((X - centers[labels]) ** 2).sum())


def _move_centers(
    ranks: Ranks, X: np.ndarray, labels: np.ndarray, before: np.ndarray, centers: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return the means of the clusters over all ranks, and the number of rows whose label differs from `before`."""
    own_sums, num_changed = _sum_clusters(X, labels, len(centers)), np.count_nonzero(labels != before)
    sums, counts, changed = ranks.sum(own_sums, np.bincount(labels, minlength=len(centers)), num_changed)
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        _fill_empty(ranks, X, labels, centers, sums, counts, empty)
    return sums / counts[:, None], int(changed)


def _sum_clusters(X: np.ndarray, labels: np.ndarray, num_clusters: int) -> np.ndarray:
    member = np.zeros((num_clusters, X.shape[1]))
    for k in range(0, len(X), _BLOCK_ROWS):
        part = labels[k : k + _BLOCK_ROWS]
        member += (part == np.arange(num_clusters)[:, None]).astype(np.float64) @ X[k : k + _BLOCK_ROWS]
    return member


def _fill_empty(
    ranks: Ranks,
    X: np.ndarray,
    labels: np.ndarray,
    centers: np.ndarray,
    sums: np.ndarray,
    counts: np.ndarray,
    empty: np.ndarray,
) -> None:
    """Give each empty cluster one of the rows that are farthest from their centers, as scikit-learn does."""
    distances = ((X - centers[labels]) ** 2).sum(axis=1)
    chosen = np.argsort(-distances, kind="stable")[: len(empty)]
    offered = np.full((len(empty), X.shape[1] + 2), -1.0)  # distance, cluster, row
    offered[: len(chosen)] = np.column_stack([distances[chosen], labels[chosen], X[chosen]])
    everyone = np.vstack(ranks.gather(offered))
    farthest = everyone[np.argsort(-everyone[:, 0], kind="stable")[: len(empty)]]
    for new, (_, old, *row) in zip(empty, farthest, strict=True):
        sums[int(old)] -= row
        counts[int(old)] -= 1
        sums[new], counts[new] = row, 1
