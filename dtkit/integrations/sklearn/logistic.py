"""Logistic regression."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import scipy.optimize
import scipy.special
import sklearn.linear_model
from sklearn.exceptions import ConvergenceWarning

from dtkit.integrations.sklearn.classes import ClassifierMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.data.partition import Partition
    from dtkit.integrations.sklearn.ranks import Ranks

_MAX_LINE_SEARCH_STEPS = 50  # as scikit-learn's
_LOSS_TOLERANCE = 64 * np.finfo(np.float64).eps  # as scikit-learn's


class LogisticRegression(ClassifierMixin, sklearn.linear_model.LogisticRegression):  # type: ignore[misc]  # as Statistics
    """Scikit-learn's LogisticRegression with the L-BFGS solver, fitted on shards; multinomial for several classes.

    C : inverse weight of the l2 penalty; infinity for none.
    tol : bound of the gradient's largest entry at which it stops.
    """

    _min_classes = 2

    def __init__(
        self,
        *,
        C: float = 1.0,
        tol: float = 1e-4,
        fit_intercept: bool = True,
        max_iter: int = 100,
        cluster: Any = None,
    ) -> None:
        super().__init__(C=C, tol=tol, fit_intercept=fit_intercept, max_iter=max_iter)
        self.cluster = cluster

    def fit(self, X: np.ndarray | Partition, y: Any = None) -> Self:
        """Fit to arrays, or to a partition of ``(X, y)``."""
        self._check_parameters()
        if not self.tol > 0:
            raise ValueError(f"tol={self.tol}; it must be positive")
        options = {"C": self.C, "tol": self.tol, "fit_intercept": self.fit_intercept, "max_iter": self.max_iter}
        result = self._fit_classes(_fit, X, y, **options)
        weights = result["weights"]
        self.coef_ = weights[:, :-1] if self.fit_intercept else weights
        self.intercept_ = weights[:, -1] if self.fit_intercept else np.zeros(len(weights))
        self.n_iter_ = np.array([result["iterations"]], dtype=np.int32)
        if not result["has_converged"]:
            warnings.warn(
                f"L-BFGS has not converged after {result['iterations']} iterations: {result['message']}. Increase "
                "max_iter, or scale the features with StandardScaler",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self


def _fit(
    ranks: Ranks,
    columns: Sequence[np.ndarray],
    rows: np.ndarray,
    *,
    classes: np.ndarray,
    C: float,
    tol: float,
    fit_intercept: bool,
    max_iter: int,
) -> dict[str, Any]:
    """Minimize on every rank. All ranks have the same sums, so they make the same steps."""
    del rows
    X = np.asarray(columns[0], dtype=np.float64)
    inputs = np.hstack([X, np.ones((len(X), 1))]) if fit_intercept else X
    member = (np.asarray(columns[1])[:, None] == classes).astype(np.float64)
    if len(classes) == 2:
        member = member[:, 1:]
    (count,) = ranks.sum(len(X))
    shape = (member.shape[1], inputs.shape[1])
    penalized = np.ones(shape)
    if fit_intercept:
        penalized[:, -1] = 0.0
    strength = 0.0 if np.isinf(C) else 1.0 / (C * count)

    def compute(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(shape)
        loss, gradient = _compute_loss(inputs @ weights.T, member, inputs)
        total, gradients = ranks.sum(loss, gradient)
        ranks.log(loss=loss / max(len(X), 1))
        penalty = weights * penalized
        objective = total / count + 0.5 * strength * (penalty**2).sum()
        return float(objective), (gradients / count + strength * penalty).ravel()

    solution = scipy.optimize.minimize(
        compute,
        np.zeros(shape[0] * shape[1]),
        method="L-BFGS-B",
        jac=True,
        options={"maxiter": max_iter, "maxls": _MAX_LINE_SEARCH_STEPS, "gtol": tol, "ftol": _LOSS_TOLERANCE},
    )
    return {
        "n_features": X.shape[1],
        "weights": solution.x.reshape(shape),
        "iterations": min(solution.nit, max_iter),
        "has_converged": solution.status == 0,
        "message": solution.message,
    }


def _compute_loss(scores: np.ndarray, member: np.ndarray, inputs: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the sum of this rank's losses, and its gradient of shape (classes or 1, inputs)."""
    if member.shape[1] == 1:
        loss = np.logaddexp(0.0, scores).sum() - (member * scores).sum()
        residuals = scipy.special.expit(scores) - member
    else:
        normalizers = scipy.special.logsumexp(scores, axis=1, keepdims=True) if len(scores) else scores[:, :1]
        loss = normalizers.sum() - (member * scores).sum()
        residuals = np.exp(scores - normalizers) - member
    return float(loss), residuals.T @ inputs
