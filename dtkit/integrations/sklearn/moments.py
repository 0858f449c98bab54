"""Counts, means and squared deviations of columns over all ranks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from dtkit.integrations.sklearn.ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Moments:
    """Statistics, by feature, of the rows seen so far."""

    count: int
    mean: np.ndarray
    deviations: np.ndarray
    """Sums of squared deviations from the mean."""

    @property
    def variance(self) -> np.ndarray:
        """Variance of the rows themselves (divided by their number)."""
        return self.deviations / self.count

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of rows.

        Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
        """
        if len(other.mean) != len(self.mean):
            raise ValueError(f"the new rows have {len(other.mean)} features, and the earlier ones {len(self.mean)}")
        count = self.count + other.count
        shift = other.mean - self.mean
        deviations = self.deviations + other.deviations + shift**2 * (self.count * other.count / count)
        return Moments(count, self.mean + shift * (other.count / count), deviations)


def compute_moments(ranks: Ranks, X: np.ndarray) -> Moments:
    """Return the moments of all ranks' rows. The mean is computed first, so that no digits cancel."""
    count, total = ranks.sum(len(X), X.sum(axis=0))
    mean = total / count
    centered = X - mean
    residual, deviations = ranks.sum(centered.sum(axis=0), (centered**2).sum(axis=0))
    return Moments(int(count), mean, deviations - residual**2 / count)
