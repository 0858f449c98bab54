"""This rank's part of the data: the batches of any step.

A batch is a pure function of the step. The permutation of an epoch follows from (seed, epoch, shard). The number of
rows that each shard gives to each step follows from `step_counts.count_cumulative_samples`. So no state has to be
saved, and a dispatch can start anywhere. One process that simulates all shards sees the same rows as all ranks
together.

Shares let faster ranks take more rows of a step. They never change the rows of a step as a whole, so training stays the
same up to rounding. For this, the rows of a step are concatenated and split again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.data.sharding import divide_proportionally
from dtkit.data.step_counts import count_cumulative_samples
from dtkit.rpc.job_plan import BY_SAMPLER, IN_ORDER

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.sources import RowSource
    from dtkit.rpc.job_plan import JobPlan

_COUNT_BLOCK_STEPS = 1024  # steps whose counts are computed at once


class Shards:
    """Rows of each shard."""

    def __init__(self, indices: np.ndarray | range, sizes: Sequence[int]) -> None:
        """`indices` are the rows of all shards, concatenated; `sizes` is the number of rows of each."""
        self.sizes = tuple(int(s) for s in sizes)
        self._rows_by_shard = np.split(np.asarray(indices), np.cumsum(self.sizes)[:-1])

    @property
    def num_rows(self) -> int:
        """Number of rows of all shards."""
        return sum(self.sizes)

    def get_rows(self, shard: int) -> np.ndarray:
        """Return the rows of a shard, in its order."""
        return self._rows_by_shard[shard]

    def list_rows(self, epoch: int) -> np.ndarray:  # noqa: ARG002 - samplers differ by epoch
        """Return the rows of an epoch in the order of a sampler, or all rows without one."""
        return self.get_all_rows()

    def split_for_replicas(self, num_replicas: int) -> list[np.ndarray]:
        """Return the shards if there are equally many replicas; else all rows in equal parts."""
        if num_replicas == len(self._rows_by_shard):
            return self._rows_by_shard
        return np.array_split(self.get_all_rows(), num_replicas)

    def get_all_rows(self) -> np.ndarray:
        """Return all rows in row order, which is the same for any number of shards."""
        return np.sort(np.concatenate(self._rows_by_shard))


class ShardedBatches:
    """Batches of one worker: of one shard, or of several shards that it simulates."""

    def __init__(self, source: RowSource, shards: Shards, plan: JobPlan, own_shards: Sequence[int]) -> None:
        self._source, self._shards, self._plan, self._own_shards = source, shards, plan, tuple(own_shards)
        self._shares: tuple[float, ...] | None = None
        self.steps_per_epoch = plan.count_steps_per_epoch(shards.num_rows)
        self._cached_permutation = functools.lru_cache(maxsize=2 * len(shards.sizes) + 2)(self._permute_rows)
        self._cached_count_block = functools.lru_cache(maxsize=2)(self._count_samples_in_block)

    def get_epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        return step // self.steps_per_epoch

    def set_process_group(self, group: Group) -> None:
        """Do nothing: rows are the same in every generation of the process group."""

    def close(self) -> None:
        """Do nothing."""

    def set_shares(self, shares: Sequence[float]) -> None:
        """Set the share of every step's rows that each shard's worker takes from now on. Shares are positive."""
        self._shares = tuple(shares)

    def count_samples(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of a step that each shard's worker takes."""
        counts = self._count_shard_samples(step)
        return counts if self._shares is None else divide_proportionally(sum(counts), self._shares)

    def _count_shard_samples(self, step: int) -> tuple[int, ...]:
        """Return the number of samples that each shard gives to a step."""
        within = step % self.steps_per_epoch
        table, _ = self._cached_count_block(within // _COUNT_BLOCK_STEPS)
        return table[within % _COUNT_BLOCK_STEPS]

    def find_step_with_count(self, wanted: Container[int]) -> tuple[int, int] | None:
        """Return (step of the epoch, shard) in which that shard's worker takes one of the `wanted` counts.

        Return None if there is none. Steps of equal size are divided once, since shares divide them alike.
        """
        shares = self._shares
        divide = functools.cache(lambda total: tuple(divide_proportionally(total, shares or ())))
        for block in range(-(-self.steps_per_epoch // _COUNT_BLOCK_STEPS)):
            table, _ = self._cached_count_block(block)
            for k, shard_counts in enumerate(table):
                counts = shard_counts if shares is None else divide(sum(shard_counts))
                shard = next((i for i, count in enumerate(counts) if count in wanted), None)
                if shard is not None:
                    return block * _COUNT_BLOCK_STEPS + k, shard
        return None

    def get_rows(self, step: int) -> np.ndarray:
        """Return the rows that this worker takes in a step."""
        if self._shares is None:
            parts = [self._get_shard_rows(shard, step) for shard in self._own_shards]
        else:
            step_rows = np.concatenate([self._get_shard_rows(shard, step) for shard in range(len(self._shards.sizes))])
            split_rows = np.split(step_rows, np.cumsum(self.count_samples(step))[:-1])
            parts = [split_rows[shard] for shard in self._own_shards]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def load_batches(self, step: int, num_micro_batches: int = 1) -> list[tuple[int, Any]]:
        """Return (samples, batch) for up to `num_micro_batches` micro-batches, whose sizes differ by one at most.

        The list is empty if this worker has no sample in the step.
        """
        rows = self.get_rows(step)
        if not len(rows):
            return []
        if num_micro_batches == 1:  # numpy's split takes longer than the rows' copy
            return [(len(rows), self._source.take(rows))]
        parts = np.array_split(rows, min(num_micro_batches, len(rows)))
        return [(len(part), self._source.take(part)) for part in parts]

    def load_batches_by_part(self, step: int, num_micro_batches: int = 1) -> list[list[tuple[int, Any]]]:
        """Return the batches that the rank of each shard would load by `load_batches`."""
        counts = self.count_samples(step)
        ends = np.cumsum([counts[shard] for shard in self._own_shards])[:-1]
        return [
            [
                (len(part), self._source.take(part))
                for part in np.array_split(rows, min(num_micro_batches, len(rows)) or 1)
                if len(part)
            ]
            for rows in np.split(self.get_rows(step), ends)
        ]

    def load_batches_by_shard(self, step: int) -> list[tuple[int, Any]]:
        """Return (samples, batch) for each of this worker's shards; the batch is None if the shard has no sample."""
        counts = self.count_samples(step)
        sizes = [counts[shard] for shard in self._own_shards]
        parts = np.split(self.get_rows(step), np.cumsum(sizes)[:-1])
        return [(len(part), self._source.take(part) if len(part) else None) for part in parts]

    def _get_shard_rows(self, shard: int, step: int) -> np.ndarray:
        within, epoch = step % self.steps_per_epoch, self.get_epoch(step)
        count = self._count_shard_samples(step)
        if self._plan.shuffle in ("global", IN_ORDER, BY_SAMPLER):
            start = within * self._plan.batch_size + sum(count[:shard])
            return self._cached_permutation(epoch, None)[start : start + count[shard]]
        _, before = self._cached_count_block(within // _COUNT_BLOCK_STEPS)
        start = int(before[within % _COUNT_BLOCK_STEPS, shard])
        return self._cached_permutation(epoch, shard)[start : start + count[shard]]

    def _permute_rows(self, epoch: int, shard: int | None) -> np.ndarray:
        """Return the order of rows in an epoch: of one shard, or of all rows for None."""
        if self._plan.shuffle == BY_SAMPLER:
            return self._shards.list_rows(epoch)
        rows = self._shards.get_all_rows() if shard is None else self._shards.get_rows(shard)
        if self._plan.shuffle in (None, IN_ORDER):
            return rows
        key = [self._plan.seed, epoch] if shard is None else [self._plan.seed, epoch, shard + 1]
        rng = np.random.default_rng(key)
        # A source that reads blocks of rows may keep rows of a block close to each other.
        shuffle = getattr(self._source, "shuffle_rows", None)
        return rng.permutation(rows) if shuffle is None else shuffle(rows, rng)

    def _count_samples_in_block(self, block: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """Return (counts, samples taken before each step of the epoch) for a block of steps, by shard."""
        first = block * _COUNT_BLOCK_STEPS
        last = min(first + _COUNT_BLOCK_STEPS, self.steps_per_epoch)
        taken = np.minimum(np.arange(first, last + 1) * self._plan.batch_size, self._shards.num_rows)
        before = count_cumulative_samples(self._shards.sizes, taken)
        return list(map(tuple, np.diff(before, axis=0).tolist())), before[:-1]
