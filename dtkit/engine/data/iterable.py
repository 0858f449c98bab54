"""Streams of samples of unknown length: generators, IterableDatasets, anything that can only be iterated.

Each rank iterates over its own part, and takes its share of every batch. Parts may end at different times, so the
number of samples of a step isn't known beforehand. Ranks add up their counts with one small all-reduce a step, which
gives exact weights. A rank whose part has ended takes part without samples. When all counts are 0 the stream has ended,
at the same step on every rank.

Each engine calls the function that returns the stream. A function of ``rank`` and ``world_size`` returns that rank's
part. Of any other stream, rank r takes the items r, r + N, r + 2N and so on, and skips the others.

A stream only goes forward. A job that is built again iterates from the start, and skips the samples of steps that it
does not take. Samples of a step are kept until a later step is requested, so that a failed step can be repeated.
"""

from __future__ import annotations

import inspect
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.data.columns import ColumnSelection
from dtkit.data.sharding import divide_proportionally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from dtkit.engine.comm.process_group import Group
    from dtkit.types import JobPlan


class StreamSource:
    """Source of samples on this engine: an iterable, or a function that is called for each job and returns one."""

    def __init__(self, data_or_factory: Any, columns: ColumnSelection | None = None) -> None:
        self._data_or_factory, self._columns = data_or_factory, columns or ColumnSelection()

    def iterate_samples(self, rank: int, world_size: int) -> Iterator[Any]:
        """Return the samples of a rank's part, from the start."""
        iterable, has_all_parts = self._make_iterable(rank, world_size)
        _check_iterable(iterable)
        if not has_all_parts:
            return iter(iterable)
        if _is_hub_iterable(iterable):
            from datasets.distributed import split_dataset_by_node

            return iter(split_dataset_by_node(iterable, rank, world_size))
        return itertools.islice(iter(iterable), rank, None, world_size)

    def make_sample_batch(self, num_rows: int) -> Any:
        """Return a batch of the first `num_rows` samples to try a model with; fewer samples are repeated."""
        first = list(itertools.islice(self.iterate_samples(0, 1), num_rows))
        return self.collate(list(itertools.islice(itertools.cycle(first), num_rows)))

    def _make_iterable(self, rank: int, world_size: int) -> tuple[Any, bool]:
        """Return (iterable, whether it has the parts of all ranks)."""
        if not _is_factory(self._data_or_factory):
            return self._data_or_factory, True
        if accepts_rank(self._data_or_factory):
            return self._data_or_factory(rank=rank, world_size=world_size), False
        return self._data_or_factory(), True

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return a batch of samples, by torch's default collation."""
        from torch.utils.data import default_collate

        batch = default_collate(list(samples))
        return self._columns.split_batch(tuple(batch) if isinstance(batch, list) else batch)


class IterableBatches:
    """Batches of one worker from a stream: of one rank's part, or of several parts that it simulates.

    It has the interface of :class:`~dtkit.engine.data.batches.ShardedBatches`. A run without a known end is one epoch.
    """

    def __init__(
        self,
        source: StreamSource,
        plan: JobPlan,
        num_shards: int,
        own_shards: Sequence[int],
        group: Group | None,
        *,
        prefetch: bool = False,
        reports_counts: bool = True,
    ) -> None:
        """Start the iterators. A collective. Raises ValueError on all ranks if some part is empty.

        Of `num_shards` parts, `own_shards` are this worker's. `prefetch` draws the next samples in a thread during a
        step. `reports_counts` is False if another rank takes the same part and reports its counts.
        """
        self.steps_per_epoch = max(1, plan.steps)
        self._source, self._own_shards, self._group = source, tuple(own_shards), group
        self._batch_size, self._num_shards, self._reports_counts = plan.batch_size, num_shards, reports_counts
        self._shares: tuple[float, ...] | None = None
        self._shard_iterators = [
            _ShardIterator(source.iterate_samples(rank, num_shards), rank) for rank in self._own_shards
        ]
        self._check_not_empty()
        self._prefetch_executor = ThreadPoolExecutor(1, "dtkit-stream") if prefetch else None
        self._prefetched: Future[list[list[Any]]] | None = None
        self._step = -1
        self._current_samples: list[list[Any]] = [[] for _ in self._shard_iterators]
        self._sample_counts: tuple[int, ...] | None = None

    # -- interface of ShardedBatches --------------------------------------------------------------------------

    def get_epoch(self, step: int) -> int:
        """Return 0 within the requested length of the run."""
        return step // self.steps_per_epoch

    def set_shares(self, shares: Sequence[float]) -> None:
        """Set each rank's share of every batch that is drawn from now on."""
        self._shares = tuple(shares)

    def count_samples(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each rank in a step; all 0 after the stream's end. A collective."""
        self._advance_to(step)
        if self._sample_counts is None:
            counts = [0] * self._num_shards
            for shard, samples in zip(self._own_shards, self._current_samples, strict=True):
                counts[shard] = len(samples)
            self._sample_counts = self._sum_counts(counts)
            self._start_prefetch()
        return self._sample_counts

    def find_step_with_count(self, count: int) -> tuple[int, int] | None:  # noqa: ARG002 - part of the interface
        """Return None: counts are not known beforehand."""
        return None

    def get_rows(self, step: int) -> None:
        """Return None: samples of a stream have no row numbers."""

    def load_batches(self, step: int, num_micro_batches: int = 1) -> list[tuple[int, Any]]:
        """Return (samples, batch) for up to `num_micro_batches` micro-batches of this worker's samples of a step."""
        self._advance_to(step)
        samples = list(itertools.chain.from_iterable(self._current_samples))
        parts = np.array_split(np.arange(len(samples)), min(num_micro_batches, len(samples))) if samples else []
        return [(len(part), self._source.collate([samples[k] for k in part])) for part in parts]

    def load_batches_by_shard(self, step: int) -> list[tuple[int, Any]]:
        """Return (samples, batch) for each of this worker's parts; the batch is None without samples."""
        self._advance_to(step)
        return [(len(samples), self._source.collate(samples) if samples else None) for samples in self._current_samples]

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group. Counts are summed again: a peer may lack them."""
        self._group, self._sample_counts = group, None

    def close(self) -> None:
        """End the thread, and drop the iterators, so that the ``finally`` of a generator runs."""
        if self._prefetch_executor is not None:
            # A stream may wait forever for its next item.
            self._prefetch_executor.shutdown(wait=False, cancel_futures=True)
        self._prefetched = None
        for part in self._shard_iterators:
            part.release()

    # -- drawing ------------------------------------------------------------------------------------------------

    def _advance_to(self, step: int) -> None:
        """Draw the samples of `step`, and drop those of skipped steps."""
        if step < self._step:
            raise ValueError(
                f"the stream is at step {self._step} and can't go back to step {step}: its samples are gone. Build the "
                "job again, which iterates from the start"
            )
        while self._step < step:
            samples, self._sample_counts = self._take_next(), None
            self._step, self._current_samples = self._step + 1, samples

    def _take_next(self) -> list[list[Any]]:
        """Return the next samples of each part, prefetched or drawn now."""
        if self._prefetched is None:
            return self._draw_samples()
        # waits: the user's stream; the notebook's timeout and its interrupt end it
        self._prefetched.exception()  # an interrupt leaves the future for the next call
        future, self._prefetched = self._prefetched, None
        # waits: already done here
        return future.result()

    def _draw_samples(self) -> list[list[Any]]:
        return [
            part.take_samples(quota) for part, quota in zip(self._shard_iterators, self._compute_quotas(), strict=True)
        ]

    def _compute_quotas(self) -> list[int]:
        """Return the number of samples of a full batch from each of this worker's parts."""
        if self._shares is not None:
            quotas = divide_proportionally(self._batch_size, self._shares)
        else:
            size, rest = divmod(self._batch_size, self._num_shards)
            quotas = tuple(size + (shard < rest) for shard in range(self._num_shards))
        return [quotas[shard] for shard in self._own_shards]

    def _start_prefetch(self) -> None:
        if self._prefetch_executor is not None and self._prefetched is None:
            self._prefetched = self._prefetch_executor.submit(self._draw_samples)

    def _sum_counts(self, counts: list[int]) -> tuple[int, ...]:
        if self._group is None:
            return tuple(counts)
        import torch

        own_counts = torch.tensor(counts) if self._reports_counts else torch.zeros(len(counts), dtype=torch.int64)
        return tuple(self._group.all_reduce(own_counts).tolist())

    def _check_not_empty(self) -> None:
        """Raise ValueError on all ranks if the part of some rank is empty. A collective."""
        counts = [0] * self._num_shards
        for part in self._shard_iterators:
            counts[part.rank] = int(part.fetch_first())
        empty = [rank for rank, count in enumerate(self._sum_counts(counts)) if not count]
        if not empty:
            return
        ranks = f"rank {empty[0]}" if len(empty) == 1 else f"ranks {', '.join(map(str, empty))}"
        raise ValueError(
            f"the stream gave no sample on {ranks} of {self._num_shards}; each rank needs one to start. Give "
            "every rank a part of the data (rank r of N gets the items r, r + N, ... of a function without arguments), "
            "or use fewer engines"
        )


class _ShardIterator:
    """Iterator over one rank's samples."""

    def __init__(self, samples: Iterator[Any], rank: int) -> None:
        self.rank = rank
        self._samples, self._num_taken, self._exhausted, self._error_name = samples, 0, False, ""

    def fetch_first(self) -> bool:
        """Return whether there is a first sample, which is kept for the first batch."""
        first = self.take_samples(1)
        self._samples = itertools.chain(first, self._samples)
        self._num_taken = 0
        return bool(first)

    def take_samples(self, max_samples: int) -> list[Any]:
        """Return up to `max_samples` samples; none after the end.

        An error ends a generator early, so nothing is drawn from it after one.
        """
        if self._error_name:
            raise ValueError(
                f"the stream of rank {self.rank} broke off after {self._num_taken:,} samples ({self._error_name}), and "
                "an iterator can't continue after an error. Train again, which iterates from the start"
            )
        samples: list[Any] = []
        try:
            if not self._exhausted:
                samples.extend(itertools.islice(self._samples, max_samples))
        except BaseException as error:
            self._num_taken += len(samples)
            self._error_name = type(error).__name__
            error.add_note(f"the stream raised this on rank {self.rank}, after {self._num_taken:,} samples of its part")
            raise
        self._exhausted = len(samples) < max_samples
        self._num_taken += len(samples)
        return samples

    def release(self) -> None:
        """Drop the iterator."""
        self._samples, self._exhausted = iter(()), True


# -- recognizing a stream ------------------------------------------------------------------------------------


def is_iterable_only(data: Any) -> bool:
    """Return whether data can only be iterated: an IterableDataset, or any iterable without rows by number."""
    if any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__):
        return True
    return hasattr(data, "__iter__") and not (hasattr(data, "__getitem__") or hasattr(data, "__len__"))


def is_stream_factory(function: Callable[..., Any]) -> bool:
    """Return whether a function returns a stream, as far as this is visible without a call."""
    return inspect.isgeneratorfunction(function) or accepts_rank(function)


def accepts_rank(function: Callable[..., Any]) -> bool:
    """Return whether a function returns one rank's part: it has the parameters ``rank`` and ``world_size``.

    Raises TypeError if the function needs other arguments.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return False
    if {"rank", "world_size"} <= parameters.keys():
        return True
    empty = inspect.Parameter.empty
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is empty and p.kind not in optional]
    if needed:
        raise TypeError(
            f"data is a function of ({', '.join(needed)}); engines call it without arguments, or with rank= and "
            "world_size= where it has these two. Bind the others with functools.partial"
        )
    return False


def _is_factory(data_or_factory: Any) -> bool:
    return isinstance(data_or_factory, type) or (callable(data_or_factory) and not hasattr(data_or_factory, "__iter__"))


def _is_hub_iterable(data: Any) -> bool:
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(data).__mro__)


def _check_iterable(iterable: Any) -> None:
    """Raise TypeError for what isn't an iterable of samples; iterating over a tuple of arrays yields arrays."""
    is_wrong_kind = hasattr(iterable, "__array__") or isinstance(iterable, (tuple, dict, str, bytes))
    if is_wrong_kind or not hasattr(iterable, "__iter__"):
        raise TypeError(
            f"the function of (rank, world_size) returned a {type(iterable).__name__}; it must return an iterable of "
            "samples, such as a generator. For arrays, give a function without arguments: dtkit distributes their rows"
        )
