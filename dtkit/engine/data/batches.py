"""This rank's part of the data, as a stream of batches that any step can be asked of.

A batch is a pure function of the step: the epoch's permutation follows from (seed, epoch, shard), and how many rows
each shard gives to each step from `partition.count_cumulative_samples`. So a stream has no state to save, a dispatch
can start anywhere, and one process that plays all shards sees the same rows as the ranks together did.

Shares change who takes which rows of a step, never which rows a step has: faster ranks take more of them, and the
training stays the same up to rounding. The rows of a step are then laid end to end and cut anew.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.data.sharding import divide_proportionally
from dtkit.data.step_counts import count_cumulative_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.sources import RowSource
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.types import JobPlan

_COUNT_BLOCK_STEPS = 1024  # steps whose counts are computed at once


class Shards:
    """Which rows belong to which shard."""

    def __init__(self, indices: np.ndarray | range, sizes: Sequence[int]) -> None:
        """`indices`: all shards' rows one after the other, integers; `sizes`: rows of each."""
        self.sizes = tuple(int(s) for s in sizes)
        self._rows_by_shard = np.split(np.asarray(indices), np.cumsum(self.sizes)[:-1])

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return sum(self.sizes)

    def get_rows(self, shard: int) -> np.ndarray:
        """The rows of one shard, in its own order."""
        return self._rows_by_shard[shard]

    def split_for_replicas(self, num_replicas: int) -> list[np.ndarray]:
        """The shards where there are as many replicas; else all rows in so many equal parts."""
        return (
            self._rows_by_shard
            if num_replicas == len(self._rows_by_shard)
            else np.array_split(self.get_all_rows(), num_replicas)
        )

    def get_all_rows(self) -> np.ndarray:
        """All rows, in row order: the same for any number of shards."""
        return np.sort(np.concatenate(self._rows_by_shard))


class ShardedBatches:
    """The batches that one worker takes: of one shard, or of several that it plays alone."""

    def __init__(self, source: RowSource, shards: Shards, plan: JobPlan, own_shards: Sequence[int]) -> None:
        self._source, self._shards, self._plan, self._own_shards = source, shards, plan, tuple(own_shards)
        self._shares: tuple[float, ...] | None = None
        self.steps_per_epoch = -(-shards.num_rows // plan.batch_size)
        self._cached_permutation = functools.lru_cache(maxsize=2 * len(shards.sizes) + 2)(self._permute_rows)
        self._cached_count_block = functools.lru_cache(maxsize=2)(self._count_samples_in_block)

    def get_epoch(self, step: int) -> int:
        """The epoch that a step belongs to."""
        return step // self.steps_per_epoch

    def visit_state(self, visitor: StateVisitor, step: int) -> None:
        """Rows follow from the step."""

    def set_process_group(self, group: Group) -> None:
        """Rows are the same in every generation of the process group."""

    def close(self) -> None:
        """There is nothing to end."""

    def set_shares(self, shares: Sequence[float]) -> None:
        """From now on, have each shard's worker take such a share of every step's rows. Shares are positive."""
        self._shares = tuple(shares)

    def count_samples(self, step: int) -> tuple[int, ...]:
        """How many samples of a step each shard's worker takes."""
        given = self._count_shard_samples(step)
        return given if self._shares is None else divide_proportionally(sum(given), self._shares)

    def _count_shard_samples(self, step: int) -> tuple[int, ...]:
        """How many samples each shard gives to a step."""
        within = step % self.steps_per_epoch
        table, _ = self._cached_count_block(within // _COUNT_BLOCK_STEPS)
        return table[within % _COUNT_BLOCK_STEPS]

    def find_step_with_count(self, count: int) -> tuple[int, int] | None:
        """(step of the epoch, shard) of a shard that gives exactly `count` samples to a step, if there is one."""
        for block in range(-(-self.steps_per_epoch // _COUNT_BLOCK_STEPS)):
            table, _ = self._cached_count_block(block)
            for k, counts in enumerate(table):
                if count in counts:
                    return block * _COUNT_BLOCK_STEPS + k, counts.index(count)
        return None

    def get_rows(self, step: int) -> np.ndarray:
        """The rows that this worker takes in a step."""
        if self._shares is None:
            parts = [self._get_shard_rows(shard, step) for shard in self._own_shards]
        else:
            whole = np.concatenate([self._get_shard_rows(shard, step) for shard in range(len(self._shards.sizes))])
            cut = np.split(whole, np.cumsum(self.count_samples(step))[:-1])
            parts = [cut[shard] for shard in self._own_shards]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def load_batches(self, step: int, num_micro_batches: int = 1) -> list[tuple[int, Any]]:
        """This worker's samples of a step in up to `parts` micro-batches, as (samples, batch); none where it has none.

        Micro-batches differ by one sample at most.
        """
        rows = self.get_rows(step)
        pieces = np.array_split(rows, min(num_micro_batches, len(rows))) if len(rows) else []
        return [(len(piece), self._source.take(piece)) for piece in pieces]

    def load_batches_by_shard(self, step: int) -> list[tuple[int, Any]]:
        """This worker's samples of a step, shard by shard, as (samples, batch): None where there are none."""
        counts = self.count_samples(step)
        sizes = [counts[shard] for shard in self._own_shards]
        pieces = np.split(self.get_rows(step), np.cumsum(sizes)[:-1])
        return [(len(piece), self._source.take(piece) if len(piece) else None) for piece in pieces]

    def _get_shard_rows(self, shard: int, step: int) -> np.ndarray:
        within, epoch = step % self.steps_per_epoch, self.get_epoch(step)
        count = self._count_shard_samples(step)
        if self._plan.shuffle == "global":
            start = within * self._plan.batch_size + sum(count[:shard])
            return self._cached_permutation(epoch, None)[start : start + count[shard]]
        _, before = self._cached_count_block(within // _COUNT_BLOCK_STEPS)
        start = int(before[within % _COUNT_BLOCK_STEPS, shard])
        return self._cached_permutation(epoch, shard)[start : start + count[shard]]

    def _permute_rows(self, epoch: int, shard: int | None) -> np.ndarray:
        """The order of rows in an epoch: of one shard, or (None) of all rows together."""
        rows = self._shards.get_all_rows() if shard is None else self._shards.get_rows(shard)
        if self._plan.shuffle is None:
            return rows
        key = [self._plan.seed, epoch] if shard is None else [self._plan.seed, epoch, shard + 1]
        return self._shuffle_rows(rows, np.random.default_rng(key))

    def _shuffle_rows(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Rows in random order; a source that reads blocks may keep rows of one block near each other."""
        shuffled = getattr(self._source, "shuffled", None)
        return rng.permutation(rows) if shuffled is None else shuffled(rows, rng)

    def _count_samples_in_block(self, block: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """(counts, samples taken before each step of the epoch) for a block of steps, by shard."""
        first = block * _COUNT_BLOCK_STEPS
        last = min(first + _COUNT_BLOCK_STEPS, self.steps_per_epoch)
        taken = np.minimum(np.arange(first, last + 1) * self._plan.batch_size, self._shards.num_rows)
        before = count_cumulative_samples(self._shards.sizes, taken)
        return list(map(tuple, np.diff(before, axis=0).tolist())), before[:-1]
