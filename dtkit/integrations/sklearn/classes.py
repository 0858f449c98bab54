"""Labels of classifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets

from dtkit.data.partition import Partition
from dtkit.integrations.sklearn.mixin import ShardedMixin, require_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.integrations.sklearn.ranks import Ranks


class ClassifierMixin(ShardedMixin):
    """Finds the classes before it fits. Labels in arrays may have any type; engines get class numbers."""

    def _fit_classes(self, fit: Callable[..., Any], X: Any, y: Any, **options: Any) -> dict[str, Any]:
        """Set `classes_`, call `fit` with ``classes=`` on all ranks, and return the first rank's result."""
        if isinstance(X, Partition):
            parts = self._fit_shards(_list_classes, X, y)
            self.classes_ = np.unique(np.concatenate([part["classes"] for part in parts]))
            check_classification_targets(self.classes_)
            classes, targets = self.classes_, None
        else:
            require_targets(self, y)
            X, y = self._check(X, y)
            check_classification_targets(y)
            self.classes_, targets = np.unique(y, return_inverse=True)
            classes = np.arange(len(self.classes_))
        if len(self.classes_) < self._min_classes:
            raise ValueError(
                f"This solver needs samples of at least {self._min_classes} classes in the data, but the data contains "
                f"only one class: {self.classes_[0]!r}"
            )
        return dict(self._fit_shards(fit, X, targets, classes=classes, **options)[0])

    _min_classes = 1


def _list_classes(ranks: Ranks, columns: Sequence[np.ndarray], rows: np.ndarray) -> dict[str, Any]:
    del ranks, rows
    if len(columns) != 2:
        raise ValueError(f"the partition has {len(columns)} arrays; give features and labels, as in partition((X, y))")
    if columns[1].ndim != 1:
        raise ValueError(f"y has shape {columns[1].shape}; it must be one label for each row, as in y.ravel()")
    return {"n_features": columns[0].shape[1], "classes": np.unique(columns[1])}
