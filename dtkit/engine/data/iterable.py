"""Streams of samples of unknown length: generators, IterableDatasets, and anything else that can only be iterated.

Each rank iterates over its own part, and takes its share of every batch. Parts may end at different times, so the
number of samples of a step isn't known in advance. Ranks add up their counts with one small all-reduce per step, which
gives exact weights. A rank whose part has ended takes part without samples. When all counts are 0 the stream has ended,
at the same step on every rank.

Each engine calls the function that returns the stream. A function of ``rank`` and ``world_size`` returns that rank's
part. Of any other stream, rank r takes the items r, r + N, r + 2N and so on, and skips the others. Random numbers in it
begin with the same seed on all ranks, so a stream that shuffles itself has the same order everywhere. Ranks compare its
first items (:mod:`dtkit.engine.data.divided_stream`).

A stream only goes forward. A rebuilt job iterates from the start, and skips the samples of steps that it doesn't take.
Samples of a step are kept until a later step is requested, so that a failed step can be repeated.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util.formatting import name_type
from dtkit._util.guard import run_guarded
from dtkit.data.columns import ColumnSelection
from dtkit.data.sharding import divide_proportionally
from dtkit.engine.data.divided_stream import DividedStream, check_same_items
from dtkit.engine.data.rank_queries import record_rank_queries

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.shard_iterator import ShardIterator
    from dtkit.rpc.job_plan import JobPlan


class StreamSource:
    """Source of samples on this engine: an iterable, or a function that returns one for each job."""

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

            if world_size > 1:
                _check_undivided(iterable)
            return iter(split_dataset_by_node(iterable, rank, world_size))
        return DividedStream(iter(iterable), rank, world_size)

    @property
    def makes_parts(self) -> bool:
        """Whether the user's function makes each rank's part."""
        return _is_factory(self._data_or_factory) and accepts_rank(self._data_or_factory)

    def _make_iterable(self, rank: int, world_size: int) -> tuple[Any, bool]:
        """Return (iterable, whether it has the parts of all ranks)."""
        if self.makes_parts:
            return self._data_or_factory(rank=rank, world_size=world_size), False
        return self._data_or_factory() if _is_factory(self._data_or_factory) else self._data_or_factory, True

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return a batch of samples."""
        from dtkit.engine.data.collation import collate_samples

        return collate_samples(list(samples), self._columns)


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
    ) -> None:
        """Start the iterators. A collective. Raises ValueError on all ranks if some part is empty.

        Of `num_shards` parts, `own_shards` are this worker's; none if another rank draws for it. `prefetch` draws the
        next samples in a worker process.
        """
        self.steps_per_epoch = max(1, plan.steps)
        self._source, self._own_shards, self._group = source, tuple(own_shards), group
        self._batch_size, self._num_shards, self._drop_last = plan.batch_size, num_shards, plan.drop_last
        self._shares: tuple[float, ...] | None = None
        self._seed = plan.seed
        self._shard_iterators = [self._start_iterator(shard, prefetch=prefetch) for shard in self._own_shards]
        try:
            self.notes = self._check_start()
            """Lines to show once the training runs."""
        except BaseException:
            self.close()
            raise
        self._step = -1
        self._current_samples: list[list[Any]] = [[] for _ in self._shard_iterators]
        self._sample_counts: tuple[int, ...] | None = None

    def _start_iterator(self, shard: int, *, prefetch: bool) -> ShardIterator:
        from dtkit.engine.data.random_state import derive_seed
        from dtkit.engine.data.shard_iterator import ShardIterator, WorkerShardIterator

        open_samples = functools.partial(self._source.iterate_samples, shard, self._num_shards)
        # A stream with the parts of all ranks must be the same on all of them, although it shuffles at random.
        shard_seed = derive_seed(self._seed, shard if self._source.makes_parts else 0)
        if not prefetch:
            return ShardIterator(open_samples, shard, shard_seed)
        return WorkerShardIterator(open_samples, shard, shard_seed, max(1, self._batch_size // self._num_shards))

    def take_batches_apart(self) -> None:
        """Take each item of the stream as a batch of samples. Call it before the first step."""
        for part in self._shard_iterators:
            part.take_batches_apart()

    @property
    def first_item(self) -> Any:
        """First item of this worker's first part; None without a part."""
        return self._shard_iterators[0].first_sample if self._shard_iterators else None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return a batch of samples."""
        return self._source.collate(samples)

    def make_first_batch(self) -> Any:
        """Return a batch of the first sample, for a trial of the model."""
        return self._source.collate([self._shard_iterators[0].first_sample])

    # -- interface of ShardedBatches --------------------------------------------------------------------------

    def get_epoch(self, step: int) -> int:
        """Return 0 within the requested length of the run."""
        return step // self.steps_per_epoch

    def set_shares(self, shares: Sequence[float]) -> None:
        """Set each rank's share of every batch that is drawn from now on."""
        self._shares = tuple(shares)

    def count_samples(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each rank in a step; all 0 after the stream's end. A collective.

        With `drop_last`, a step that the stream doesn't fill is its end.
        """
        self._advance_to(step)
        if self._sample_counts is None:
            counts = [0] * self._num_shards
            for shard, samples in zip(self._own_shards, self._current_samples, strict=True):
                counts[shard] = len(samples)
            self._sample_counts = self._sum_counts(counts)
            if self._drop_last and sum(self._sample_counts) < self._batch_size:
                self._drop_samples(step, sum(self._sample_counts))
        return self._sample_counts

    def _drop_samples(self, step: int, count: int) -> None:
        """Leave a step's samples out. Raises ValueError on all ranks if no step was full."""
        if not step:
            raise ValueError(
                f"drop_last=True leaves out a batch that isn't full, and the stream has only {count} samples for "
                f"batch_size={self._batch_size}, so no step would train. Use batch_size={count} or less, or "
                "drop_last=False"
            )
        self._current_samples, self._sample_counts = [[] for _ in self._shard_iterators], (0,) * self._num_shards

    def find_step_with_count(self, wanted: Container[int]) -> tuple[int, int] | None:  # noqa: ARG002 - part of the interface
        """Return None: counts aren't known in advance."""
        return None

    def get_rows(self, step: int) -> None:
        """Return None: samples of a stream have no row numbers."""

    def load_batches(self, step: int, num_micro_batches: int = 1) -> list[tuple[int, Any]]:
        """Return (samples, batch) for up to `num_micro_batches` micro-batches of this worker's samples of a step."""
        self._advance_to(step)
        return self._split_batch(list(itertools.chain.from_iterable(self._current_samples)), num_micro_batches)

    def _split_batch(self, samples: Sequence[Any], num_micro_batches: int) -> list[tuple[int, Any]]:
        parts = np.array_split(np.arange(len(samples)), min(num_micro_batches, len(samples))) if samples else []
        return [(len(part), self._source.collate([samples[k] for k in part])) for part in parts]

    def load_batches_by_part(self, step: int, num_micro_batches: int = 1) -> list[list[tuple[int, Any]]]:
        """Return the batches that the rank of each part would load by `load_batches`."""
        self._advance_to(step)
        return [self._split_batch(samples, num_micro_batches) for samples in self._current_samples]

    def load_batches_by_shard(self, step: int) -> list[tuple[int, Any]]:
        """Return (samples, batch) for each of this worker's parts; the batch is None without samples."""
        self._advance_to(step)
        return [(len(samples), self._source.collate(samples) if samples else None) for samples in self._current_samples]

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group. Counts are summed again, since a peer may lack them."""
        self._group, self._sample_counts = group, None

    def close(self) -> None:
        """End the iterators and their worker processes."""
        for part in self._shard_iterators:
            part.close()

    # -- drawing ------------------------------------------------------------------------------------------------

    def _advance_to(self, step: int) -> None:
        """Draw the samples of `step`, and drop those of skipped steps."""
        if step < self._step:
            raise ValueError(
                f"the stream is at step {self._step} and can't go back to step {step}: its samples are gone. Build the "
                "job again, which iterates from the start"
            )
        while self._step < step:
            samples, self._sample_counts = self._draw_samples(), None
            self._step, self._current_samples = self._step + 1, samples

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

    def _sum_counts(self, counts: list[int]) -> tuple[int, ...]:
        if self._group is None:
            return tuple(counts)
        import torch

        return tuple(self._group.all_reduce(torch.tensor(counts)).tolist())

    def _check_start(self) -> list[str]:
        """Return notes on the first samples. Raises ValueError on all ranks if some part is empty, or if ranks have
        different streams to divide. A collective.
        """
        counts, checksums = [0] * self._num_shards, [0] * self._num_shards
        for part in self._shard_iterators:
            counts[part.rank], checksums[part.rank] = int(part.has_sample()), part.start_checksum
        sums = self._sum_counts(counts + checksums)
        self._check_not_empty(sums[: self._num_shards])
        checksums = list(sums[self._num_shards :])
        if self._group is None or len(set(checksums)) < 2:
            return []
        with record_rank_queries() as queries:
            num_random = sum(not self._is_repeatable(part) for part in self._shard_iterators)
        num_random, num_queries = self._sum_counts([num_random, len(queries)])
        return [check_same_items(checksums, divides_itself=num_queries > 0 or not num_random)]

    def _is_repeatable(self, part: ShardIterator) -> bool:
        """Return whether a part's stream begins with the same items when it is opened again."""
        again = self._start_iterator(part.rank, prefetch=False)
        # silent: a stream that can't be opened twice isn't repeatable
        is_same = run_guarded(
            lambda: again.has_sample() and again.start_checksum == part.start_checksum, lambda _: False
        )
        again.close()
        return is_same

    def _check_not_empty(self, counts: Sequence[int]) -> None:
        empty = [rank for rank, count in enumerate(counts) if not count]
        if not empty:
            return
        ranks = f"rank {empty[0]}" if len(empty) == 1 else f"ranks {', '.join(map(str, empty))}"
        raise ValueError(
            f"the stream gave no sample on {ranks} of {self._num_shards}; each rank needs one to start. Give "
            "every rank a part of the data (rank r of N gets the items r, r + N, ... of a function without arguments), "
            "or use fewer engines"
        )


# -- recognizing a stream ------------------------------------------------------------------------------------


def is_iterable_only(data: Any) -> bool:
    """Return whether data can only be iterated: an IterableDataset, or any iterable without rows by number."""
    if any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__):
        return True
    return hasattr(data, "__iter__") and not (hasattr(data, "__getitem__") or hasattr(data, "__len__"))


def is_stream_factory(function: Callable[..., Any], name: str = "data") -> bool:
    """Return whether a function returns a stream, as far as this is known without calling it."""
    return inspect.isgeneratorfunction(function) or accepts_rank(function, name)


def accepts_rank(function: Callable[..., Any], name: str = "data") -> bool:
    """Return whether a function returns one rank's part: it has the parameters ``rank`` and ``world_size``.

    Raises TypeError if the function needs other arguments, and calls it by `name`, the user's argument.
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
            f"{name} is a function of ({', '.join(needed)}); engines call it without arguments, or with rank= and "
            "world_size= where it has these two. Bind the others with functools.partial"
        )
    return False


def _is_factory(data_or_factory: Any) -> bool:
    return isinstance(data_or_factory, type) or (callable(data_or_factory) and not hasattr(data_or_factory, "__iter__"))


def _is_hub_iterable(data: Any) -> bool:
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(data).__mro__)


def _check_undivided(data: Any) -> None:
    """Raise ValueError for an iterable dataset of `datasets` that ``split_dataset_by_node`` has divided already."""
    if vars(data).get("_distributed") is not None:
        raise ValueError(
            "split_dataset_by_node has divided the data already, and dtkit would divide them once more. Give all of "
            "them, or data=lambda rank, world_size: split_dataset_by_node(dataset, rank, world_size)"
        )


def _check_iterable(iterable: Any) -> None:
    """Raise TypeError unless this is an iterable of samples. Iterating over a tuple of arrays would yield arrays."""
    is_wrong_kind = hasattr(iterable, "__array__") or isinstance(iterable, (tuple, dict, str, bytes))
    if is_wrong_kind or not hasattr(iterable, "__iter__"):
        raise TypeError(
            f"the function of (rank, world_size) returned {name_type(iterable)}; it must return an iterable of "
            "samples, such as a generator. For arrays, give a function without arguments: dtkit distributes their rows"
        )
