"""The triangular factor of a tall matrix whose rows are on several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dtkit.integrations.sklearn.ranks import Ranks


def compute_factor(ranks: Ranks, matrix: np.ndarray) -> np.ndarray:
    """Return R of the QR decomposition of all ranks' rows, of shape (columns, columns).

    R has the singular values and the Gram matrix of all rows, without the squared condition number of a Gram matrix.
    Demmel, Grigori, Hoemmen, Langou: Communication-optimal Parallel and Sequential QR and LU Factorizations, 2012.
    """
    factors = ranks.gather(_pad(_factorize(matrix)))
    return factors[0] if len(factors) == 1 else _pad(_factorize(np.vstack(factors)))


def _pad(factor: np.ndarray) -> np.ndarray:
    """Add rows of zeros up to a square, since a rank may have fewer rows than columns."""
    missing = factor.shape[1] - factor.shape[0]
    return np.vstack([factor, np.zeros((missing, factor.shape[1]))]) if missing > 0 else factor


def _factorize(matrix: np.ndarray) -> np.ndarray:
    factor: Any = np.linalg.qr(matrix, mode="r")
    return np.asarray(factor)
