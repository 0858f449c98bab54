"""Common base of all estimators: where `fit` runs, and on which rows."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.utils.validation import validate_data

from dtkit.data.partition import Partition
from dtkit.integrations.sklearn.ranks import OneProcess, ShardFit

if TYPE_CHECKING:
    from collections.abc import Callable


class ShardedMixin:
    """Adds `cluster` to an estimator: the engines that fit it; None for this process."""

    cluster: Any

    def _fit_shards(self, fit: Callable[..., Any], X: Any, y: Any = None, **options: Any) -> list[Any]:
        """Return what `fit` returns on each rank.

        X : array of (rows, features), or a partition of ``(X,)`` or ``(X, y)``.
        y : array of targets; None for a partition, and for estimators without targets.
        """
        if self.cluster is not None and not hasattr(self.cluster, "torchrun"):
            raise TypeError(
                f"cluster={self.cluster!r}; it must be a dtkit.Cluster, as in {type(self).__name__}(cluster=cluster), "
                "or None to fit in this process"
            )
        if isinstance(X, Partition):
            return self._fit_partition(fit, X, y, options)
        columns = [X] if y is None else [X, y]
        if self.cluster is None:
            return [fit(OneProcess(), columns, np.arange(len(X)), **options)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # shards may differ, but all rows are summed
            partition = self.cluster.partition(tuple(np.ascontiguousarray(column) for column in columns))
        return self._fit_placed(fit, partition, options)

    def _fit_partition(self, fit: Callable[..., Any], partition: Partition, y: Any, options: Any) -> list[Any]:
        if self.cluster is None:
            raise ValueError(
                f"the rows of a partition are on engines; name them, as in {type(self).__name__}(cluster=cluster)"
            )
        if y is not None:
            raise ValueError("y is part of the partition, as in cluster.partition((X, y)); leave it out in fit")
        if partition.source is None or partition.source.engine_group.folder != self.cluster.folder:
            raise ValueError("this partition belongs to another cluster; partition the rows with this one")
        results = self._fit_placed(fit, partition, options)
        self.n_features_in_ = int(results[0]["n_features"])
        return results

    def _fit_placed(self, fit: Callable[..., Any], partition: Partition, options: Any) -> list[Any]:
        assert partition.source is not None
        return list(self.cluster.run(ShardFit(f"{type(self).__name__}.fit"), partition.source.key, fit, options))

    def _check_parameters(self) -> None:
        """Raise scikit-learn's InvalidParameterError, a ValueError, for options that it doesn't take."""
        self._validate_params()  # type: ignore[attr-defined]  # the other base class has it

    def __sklearn_tags__(self) -> Any:
        """Return the tags of the estimator: dense, finite numbers, which become float64."""
        tags = super().__sklearn_tags__()  # type: ignore[misc]  # the other base class has it
        tags.input_tags.sparse = tags.input_tags.allow_nan = False
        if tags.transformer_tags is not None:
            tags.transformer_tags.preserves_dtype = ["float64"]
        return tags

    def _check(self, X: Any, y: Any = None, **options: Any) -> Any:
        """Return arrays in float64 as scikit-learn checks them; a partition as it is."""
        if isinstance(X, Partition):
            return X if y is None and "y" not in options else (X, y)
        options = {"dtype": np.float64, "order": "C", **options}
        return validate_data(self, X, **options) if y is None else validate_data(self, X, y, **options)


def require_targets(estimator: Any, y: Any) -> None:
    """Raise ValueError, in scikit-learn's words, if arrays come without targets."""
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None")
