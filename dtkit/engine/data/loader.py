"""Batches of a worker that come through a loader: directly, one step ahead in a thread, or from worker processes.

:class:`~dtkit.engine.data.batches.ShardedBatches` computes the rows of any step from its number, so a loader may load
ahead. A step's rows change with the ranks' shares of the batch. Then the loader drops what it has loaded, and loads the
new rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

from dtkit.engine.data.batches import ShardedBatches
from dtkit.engine.data.iterable import IterableBatches, StreamSource
from dtkit.engine.data.prefetch_loader import PrefetchLoader, SyncLoader
from dtkit.engine.data.sample_seeds import SampleSeeds
from dtkit.engine.data.sources import DatasetSource
from dtkit.engine.data.worker_loader import WorkerLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import torch

    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.prefetch_loader import BatchLoader, StepBatches
    from dtkit.engine.data.replica_link import ReplicaLink
    from dtkit.engine.data.sources import RowSource
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.rpc.job_plan import JobPlan, LoadingOptions


class LoadedBatches(ShardedBatches):
    """Batches of rows by number that come through a loader."""

    def __init__(
        self, source: RowSource, shards: Shards, plan: JobPlan, own_shards: Sequence[int], loader: BatchLoader
    ) -> None:
        super().__init__(_RowNumbers(source), shards, plan, own_shards)
        self._loader = loader

    def load_batches(self, step: int, num_micro_batches: int = 1) -> StepBatches:
        """See :class:`ShardedBatches`."""
        return self._loader.load(step, lambda s: ShardedBatches.load_batches(self, s, num_micro_batches))

    def load_batches_by_part(self, step: int, num_micro_batches: int = 1) -> list[StepBatches]:
        """See :class:`ShardedBatches`."""

        def plan_parts(step: int) -> list[StepBatches]:
            return ShardedBatches.load_batches_by_part(self, step, num_micro_batches)

        batches = iter(self._loader.load(step, lambda s: list(itertools.chain.from_iterable(plan_parts(s)))))
        return [[next(batches) for _ in part] for part in plan_parts(step)]

    def load_batches_by_shard(self, step: int) -> StepBatches:
        """See :class:`ShardedBatches`."""
        return self._loader.load(step, lambda s: ShardedBatches.load_batches_by_shard(self, s))

    def close(self) -> None:
        """End threads and processes."""
        self._loader.close()


def make_row_batches(
    source: RowSource, shards: Shards, plan: JobPlan, context: WorkerContext, options: LoadingOptions
) -> LoadedBatches:
    """Return this worker's batches of rows by number."""
    rank = 0 if context.group is None else context.group.rank
    return LoadedBatches(
        source, shards, plan, context.shards, make_loader(source, options, context.device, plan.seed, rank)
    )


def make_stream_batches(
    source: StreamSource, plan: JobPlan, context: WorkerContext, options: LoadingOptions
) -> IterableBatches:
    """Return this worker's batches of a stream. A collective. Raises ValueError on all ranks if one has no sample."""
    if options.num_workers:
        raise ValueError(
            f"num_workers={options.num_workers}: worker processes load rows by number, and a stream has none. Leave "
            "num_workers out; prefetch=True draws the next samples in one worker process"
        )
    draws = context.replica_link is None or context.replica_link.is_leader
    shards = context.shards if draws else ()
    return IterableBatches(
        source, plan, context.mesh.num_replicas, shards, context.group, prefetch=bool(options.prefetch)
    )


def make_loader(source: RowSource, options: LoadingOptions, device: torch.device, seed: int, rank: int) -> BatchLoader:
    """Return the loader that the options request, or the best one for this source and device."""
    is_gpu = device.type == "cuda"
    pin_memory = is_gpu and options.pin_memory is not False
    num_workers, seeds = _count_workers(source, options), SampleSeeds(seed)
    if num_workers:
        return WorkerLoader(source, num_workers, seeds, pin_memory=pin_memory, rank=rank)
    prefetch = options.prefetch
    if prefetch is None:
        prefetch = source.is_thread_safe and (source.reads_disk or is_gpu)
    pin_memory = pin_memory and (prefetch or bool(options.pin_memory))
    sync_loader = SyncLoader(source, seeds, pin_memory=pin_memory, rank=rank)
    return PrefetchLoader(sync_loader) if prefetch else sync_loader


def _count_workers(source: RowSource, options: LoadingOptions) -> int:
    """Return the number of worker processes. User code that loads ahead gets one, since threads share generators."""
    if not options.num_workers:
        return 1 if options.prefetch and not source.is_thread_safe else 0
    if not isinstance(source, DatasetSource):
        raise ValueError(  # noqa: TRY004 - the value of num_workers is wrong
            f"num_workers={options.num_workers}: worker processes are for Datasets whose samples take computing. "
            f"Copying these rows ({type(source).__name__}) out of arrays or files is faster than sending them "
            "between processes. Leave num_workers out"
        )
    return options.num_workers


def load_evaluation_batches(
    source: RowSource,
    rows: np.ndarray,
    batch_size: int,
    options: LoadingOptions,
    *,
    rank: int,
    link: ReplicaLink | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (samples, batch) of rows to evaluate on, in order, with as many worker processes as training has.

    With a `link` one rank of the replica loads the batches for the others.
    """
    parts = [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]
    if source.is_same_on_all_ranks:
        link = None
    seeds = SampleSeeds(0, evaluation=True)
    loader: BatchLoader = SyncLoader(source, seeds, rank=rank, unit="evaluation batch")
    if options.num_workers and isinstance(source, DatasetSource) and (link is None or link.is_leader):
        loader = WorkerLoader(
            source, options.num_workers, seeds, rank=rank, num_steps=len(parts), unit="evaluation batch"
        )
    with contextlib.closing(loader):
        for k in range(len(parts)):
            load = functools.partial(loader.load, k, lambda k: [(len(parts[k]), parts[k])])
            yield from load() if link is None else link.share(load)


class _RowNumbers:
    """Source whose batches are the row numbers themselves."""

    is_thread_safe, reads_disk, is_same_on_all_ranks = True, False, True

    def __init__(self, source: RowSource) -> None:
        self._source = source
        if hasattr(source, "shuffle_rows"):
            self.shuffle_rows = source.shuffle_rows

    def __len__(self) -> int:
        return len(self._source)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows."""
        return rows
