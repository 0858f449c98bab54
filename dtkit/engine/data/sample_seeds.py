"""Seeds of samples, for Datasets that draw random numbers (augmentation, masking).

A sample draws numbers from torch's, numpy's and Python's generators. They follow from the run's seed, the step and the
sample's row. So they are the same on any number of ranks and worker processes, and after a resumed run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.engine.data.random_state import derive_seed, preserve_generators, seed_generators
from dtkit.engine.data.sources import DatasetSource

if TYPE_CHECKING:
    import numpy as np

    from dtkit.engine.data.sources import RowSource

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that rows of a step have different seeds (Steele et al., OOPSLA 2014)
_SEED_MASK = 2**63 - 1
_EVALUATION_KEY = 2**63  # used instead of a step, so that every evaluation draws the same numbers


class SampleSeeds:
    """Seeds of the samples of a run."""

    def __init__(self, seed: int, *, evaluation: bool = False) -> None:
        self._seed, self._evaluation = seed, evaluation

    def take(self, source: RowSource, rows: np.ndarray, step: int) -> Any:
        """Return a batch of rows for a step. Random numbers that samples draw don't change the generators outside."""
        if source.is_thread_safe or not isinstance(source, DatasetSource):  # no user code runs
            return source.take(rows)
        base = derive_seed(self._seed, _EVALUATION_KEY if self._evaluation else step)
        with preserve_generators():
            return source.take_seeded(rows, lambda row: seed_generators((base + row * _SEED_STRIDE) & _SEED_MASK))
