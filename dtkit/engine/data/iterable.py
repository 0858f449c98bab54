"""Streams of samples whose number nobody knows: generators, IterableDatasets, whatever can only be iterated.

Each rank iterates over its own part and takes its share of every batch. How many samples a step has is not known
beforehand, since parts may end at different times; so the ranks add up their counts, one small all-reduce a step, which
gives exact weights. A rank whose part has ended joins as an empty rank. When all counts are 0 the stream has ended, and
every rank learns it at the same step.

The function that makes the stream is called on each engine. One that takes ``rank`` and ``world_size`` makes that
rank's part; of any other, rank r takes the items r, r + N, r + 2N and so on, and the others pass by unused.

A stream has a state, unlike rows by index: it goes forward only. A job that is made anew (by `verify`, say) iterates
anew from the start, and steps that it does not take are drawn and dropped. What was drawn for a step is kept until a
later step is asked for, so that a step that failed can be taken again.
"""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.data.columns import ColumnSelection
from dtkit.data.sharding import divide_proportionally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.types import JobPlan


class StreamSource:
    """How samples are made on this engine: an iterable, or a function that returns one and is called for each job."""

    def __init__(self, data_or_factory: Any, columns: ColumnSelection | None = None) -> None:
        self._data_or_factory, self._columns = data_or_factory, columns or ColumnSelection()

    def iterate_samples(self, rank: int, world_size: int) -> Iterator[Any]:
        """The samples of `rank`'s part, from the start."""
        made, whole = self._make_iterable(rank, world_size)
        _check_iterable(made)
        if not whole:
            return iter(made)
        if _is_hub_iterable(made):
            from datasets.distributed import split_dataset_by_node

            return iter(split_dataset_by_node(made, rank, world_size))
        return itertools.islice(iter(made), rank, None, world_size)

    def make_sample_batch(self, num_rows: int) -> Any:
        """A batch of so many rows to try a model with: the first samples, over again where there are fewer."""
        first = list(itertools.islice(self.iterate_samples(0, 1), num_rows))
        return self.collate(list(itertools.islice(itertools.cycle(first), num_rows)))

    def _make_iterable(self, rank: int, world_size: int) -> tuple[Any, bool]:
        """(an iterable, whether it still holds the parts of all ranks)."""
        if not _is_factory(self._data_or_factory):
            return self._data_or_factory, True
        if accepts_rank(self._data_or_factory):
            return self._data_or_factory(rank=rank, world_size=world_size), False
        return self._data_or_factory(), True

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch of samples, by torch's default collation."""
        from torch.utils.data import default_collate

        batch = default_collate(list(samples))
        return self._columns.split_batch(tuple(batch) if isinstance(batch, list) else batch)


class IterableBatches:
    """The batches that one worker takes from a stream: of one rank's part, or of several that it plays alone.

    Has the interface of :class:`~dtkit.engine.data.batches.ShardedBatches`, in which a run without a known end is one
    epoch.
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
        """`world_size`: how many parts there are, of which `mine` are this worker's. `ahead`: draw the next samples in
        a thread while a step runs. `counted`: False where another rank takes the same part and tells its counts.

        A collective. Raises ValueError on all ranks where some part is empty.
        """
        self.steps_per_epoch = max(1, plan.steps)
        self._source, self._own_shards, self._group = source, tuple(own_shards), group
        self._batch_size, self._num_shards, self._reports_counts = plan.batch_size, num_shards, reports_counts
        self._shares: tuple[float, ...] | None = None
        self._shard_iterators = [
            _ShardIterator(source.iterate_samples(rank, num_shards), rank) for rank in self._own_shards
        ]
        self._check_not_empty()
        self._prefetch_executor = _make_executor("dtkit-stream") if prefetch else None
        self._prefetched: Future[list[list[Any]]] | None = None
        self._step = -1
        self._current_samples: list[list[Any]] = [[] for _ in self._shard_iterators]
        self._sample_counts: tuple[int, ...] | None = None

    # -- what Stream has ----------------------------------------------------------------------------------------

    def get_epoch(self, step: int) -> int:
        """0 in a run of the length that was asked for."""
        return step // self.steps_per_epoch

    def set_shares(self, shares: Sequence[float]) -> None:
        """From the next batch that is drawn, have each rank take such a share of it."""
        self._shares = tuple(shares)

    def count_samples(self, step: int) -> tuple[int, ...]:
        """How many samples each rank has in a step; all 0 once the stream has ended on all ranks. A collective."""
        self._advance_to(step)
        if self._sample_counts is None:
            held = [0] * self._num_shards
            for rank, drawn in zip(self._own_shards, self._current_samples, strict=True):
                held[rank] = len(drawn)
            self._sample_counts = self._sum_counts(held)
            self._start_prefetch()
        return self._sample_counts

    def find_step_with_count(self, count: int) -> tuple[int, int] | None:  # noqa: ARG002 - as Stream has it
        """Counts are not known beforehand."""
        return None

    def get_rows(self, step: int) -> None:
        """Samples of a stream have no numbers."""

    def load_batches(self, step: int, num_micro_batches: int = 1) -> list[tuple[int, Any]]:
        """This worker's samples of a step in up to `parts` micro-batches, as (samples, batch)."""
        self._advance_to(step)
        samples = list(itertools.chain.from_iterable(self._current_samples))
        pieces = np.array_split(np.arange(len(samples)), min(num_micro_batches, len(samples))) if samples else []
        return [(len(piece), self._source.collate([samples[k] for k in piece])) for piece in pieces]

    def load_batches_by_shard(self, step: int) -> list[tuple[int, Any]]:
        """This worker's samples of a step, part by part; None for a part without any."""
        self._advance_to(step)
        return [(len(drawn), self._source.collate(drawn) if drawn else None) for drawn in self._current_samples]

    def visit_state(self, visitor: StateVisitor, step: int) -> None:
        """Samples up to a step are drawn again and dropped."""

    def set_process_group(self, group: Group) -> None:
        """Go on in a new generation of the process group. Counts are added up anew: a peer may not have them yet."""
        self._group, self._sample_counts = group, None

    def close(self) -> None:
        """End the thread, and let go of the iterators: a generator's ``finally`` runs as nobody holds it any more."""
        if self._prefetch_executor is not None:
            self._prefetch_executor.shutdown(
                wait=False, cancel_futures=True
            )  # a stream may wait for its next item for ever
        self._prefetched = None
        for part in self._shard_iterators:
            part.release()

    # -- drawing ------------------------------------------------------------------------------------------------

    def _advance_to(self, step: int) -> None:
        """Have the samples of `step`; those of steps before it that were not asked for are dropped."""
        if step < self._step:
            raise ValueError(
                f"the stream stands at step {self._step} and can't go back to step {step}: its samples are gone. Make "
                "the job anew, which iterates from the start"
            )
        while self._step < step:
            drawn, self._sample_counts = self._take_next(), None
            self._step, self._current_samples = self._step + 1, drawn

    def _take_next(self) -> list[list[Any]]:
        """The next samples of each part: drawn already, or now."""
        if self._prefetched is None:
            return self._draw_samples()
        # waits: the user's stream; the notebook's patience and its interrupt end it
        self._prefetched.exception()  # waits; an interrupt leaves the future for the next time
        future, self._prefetched = self._prefetched, None
        # waits: the user's stream; the notebook's patience and its interrupt end it
        return future.result()

    def _draw_samples(self) -> list[list[Any]]:
        return [
            part.take_samples(quota) for part, quota in zip(self._shard_iterators, self._compute_quotas(), strict=True)
        ]

    def _compute_quotas(self) -> list[int]:
        """How many samples of a full batch each of this worker's parts gives: equally many, the rest to the first."""
        if self._shares is not None:
            every = divide_proportionally(self._batch_size, self._shares)
        else:
            size, rest = divmod(self._batch_size, self._num_shards)
            every = tuple(size + (rank < rest) for rank in range(self._num_shards))
        return [every[rank] for rank in self._own_shards]

    def _start_prefetch(self) -> None:
        if self._prefetch_executor is not None and self._prefetched is None:
            self._prefetched = self._prefetch_executor.submit(self._draw_samples)

    def _sum_counts(self, counts: list[int]) -> tuple[int, ...]:
        if self._group is None:
            return tuple(counts)
        import torch

        told = torch.tensor(counts) if self._reports_counts else torch.zeros(len(counts), dtype=torch.int64)
        return tuple(self._group.all_reduce(told).tolist())

    def _check_not_empty(self) -> None:
        """Have the ranks tell each other whether their parts hold anything, before anything is built upon them."""
        held = [0] * self._num_shards
        for part in self._shard_iterators:
            held[part.rank] = int(part.fetch_first())
        found = self._sum_counts(held)
        empty = [rank for rank, any_there in enumerate(found) if not any_there]
        if not empty:
            return
        ranks = f"rank {empty[0]}" if len(empty) == 1 else f"ranks {', '.join(map(str, empty))}"
        raise ValueError(
            f"the stream gave no sample on {ranks} of {self._num_shards}; each rank needs at least one to begin. Give "
            "every rank a part of the data (rank r of N gets the items r, r + N, ... of a function without arguments), "
            "or use fewer engines"
        )


class _ShardIterator:
    """One rank's samples, drawn a few at a time."""

    def __init__(self, samples: Iterator[Any], rank: int) -> None:
        self.rank = rank
        self._samples, self._num_taken, self._exhausted, self._error_name = samples, 0, False, ""

    def fetch_first(self) -> bool:
        """Whether there is a first sample; it is kept for the first batch."""
        first = self.take_samples(1)
        self._samples = itertools.chain(first, self._samples)
        self._num_taken = 0
        return bool(first)

    def take_samples(self, max_samples: int) -> list[Any]:
        """Up to `quota` samples; none once it has ended.

        After an error a generator is at its end without having reached it, so nothing is drawn from it again.
        """
        if self._error_name:
            raise ValueError(
                f"the stream of rank {self.rank} broke off after {self._num_taken:,} samples "
                f"({self._error_name}), and an "
                "iterator can't go on after an error. Train anew, which iterates from the start"
            )
        drawn: list[Any] = []
        try:
            if not self._exhausted:
                drawn.extend(itertools.islice(self._samples, max_samples))
        except BaseException as error:
            self._num_taken += len(drawn)
            self._error_name = type(error).__name__
            error.add_note(f"the stream raised this on rank {self.rank}, after {self._num_taken:,} samples of its part")
            raise
        self._exhausted = len(drawn) < max_samples
        self._num_taken += len(drawn)
        return drawn

    def release(self) -> None:
        """Hold the iterator no longer."""
        self._samples, self._exhausted = iter(()), True


# --- what is a stream ---------------------------------------------------------------------------------------


def is_iterable_only(data: Any) -> bool:
    """Whether this can only be iterated: an IterableDataset, or anything iterable that has no rows by number."""
    if any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__):
        return True
    return hasattr(data, "__iter__") and not (hasattr(data, "__getitem__") or hasattr(data, "__len__"))


def is_stream_factory(function: Callable[..., Any]) -> bool:
    """Whether it is plain from the outside that this function makes a stream."""
    return inspect.isgeneratorfunction(function) or accepts_rank(function)


def accepts_rank(function: Callable[..., Any]) -> bool:
    """Whether a function makes one rank's part: it has the parameters ``rank`` and ``world_size``.

    Raises TypeError for one that can't be called without others.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin that does not say
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


def _is_hub_iterable(made: Any) -> bool:
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(made).__mro__)


def _check_iterable(made: Any) -> None:
    """Refuse what is no iterable of samples: a tuple of arrays can be iterated, but not sample by sample."""
    rows = hasattr(made, "__array__") or isinstance(made, (tuple, dict, str, bytes))
    if rows or not hasattr(made, "__iter__"):
        raise TypeError(
            f"the function of (rank, world_size) returned a {type(made).__name__}; it must return an iterable of "
            "samples, such as a generator. For arrays, give a function without arguments: dtkit deals out their rows"
        )


def _make_executor(name: str) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, name)
