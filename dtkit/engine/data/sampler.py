"""Rows in the order of a user's sampler, such as torch's WeightedRandomSampler.

A sampler yields the row numbers of an epoch. All ranks iterate over the same sampler with the same seeds, and each
takes its part of every batch. So the rows of a step depend neither on the number of ranks nor on earlier calls.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from dtkit.data.sharding import divide_evenly
from dtkit.engine.data.batches import Shards
from dtkit.engine.data.random_state import derive_seed, preserve_generators, seed_generators


class SampledShards(Shards):
    """Equal shards of an epoch's positions. A sampler chooses the row at each position."""

    def __init__(self, sampler: Any, num_rows: int, num_shards: int, seed: int) -> None:
        """Raises ValueError if the sampler gives other rows for the same seed, or rows that don't exist."""
        count = len(sampler)
        super().__init__(range(count), divide_evenly(count, num_shards))
        self._sampler, self._num_data_rows, self._seed = sampler, num_rows, seed
        if not np.array_equal(self.list_rows(0), self.list_rows(0)):
            raise ValueError(
                f"{type(sampler).__name__} gives other rows each time, although dtkit seeds torch, numpy, random and "
                "its `generator`: ranks would take rows of different orders. Let it draw from one of these"
            )

    def list_rows(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in order."""
        seed = derive_seed(self._seed, epoch)
        with preserve_generators():
            seed_generators(seed)
            if (generator := getattr(self._sampler, "generator", None)) is not None:
                generator.manual_seed(seed)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            rows = np.asarray(list(itertools.islice(self._sampler, self.num_rows)))
        self._check(rows)
        return rows.astype(np.int64)

    def _check(self, rows: np.ndarray) -> None:
        name = type(self._sampler).__name__
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise ValueError(f"{name} must yield row numbers one by one; batches are made by batch_size=")
        if len(rows) != self.num_rows:
            raise ValueError(f"{name} yielded {len(rows)} rows, and its length is {self.num_rows}; the two must agree")
        if rows.min() < 0 or rows.max() >= self._num_data_rows:
            raise ValueError(
                f"{name} yielded row {rows.min() if rows.min() < 0 else rows.max()}, and the data has rows 0 to "
                f"{self._num_data_rows - 1}"
            )
