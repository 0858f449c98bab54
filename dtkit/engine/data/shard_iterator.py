"""Iterators over one rank's part of a stream: in this process, or in a worker process that draws ahead.

User code draws random numbers from states of its own in both cases, so both give the same samples.
"""

from __future__ import annotations

import collections
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import shut_down_workers
from dtkit.engine.data.random_state import OwnRng, seed_generators
from dtkit.engine.data.whole_batches import split_rows
from dtkit.engine.data.worker_process import make_worker_loader, start_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class ShardIterator:
    """Iterator over one rank's samples."""

    def __init__(self, open_samples: Callable[[], Iterator[Any]], rank: int, seed: int) -> None:
        """`open_samples` returns the samples from the start. Its random numbers, and those of the samples, begin with
        `seed`.
        """
        self.rank = rank
        self._rng = OwnRng(seed)
        self._samples: Iterator[Any] = iter(())
        self._buffer: collections.deque[Any] = collections.deque()
        self._num_taken, self._exhausted, self._error_name = 0, False, ""
        self._items_are_batches = False
        self._open(open_samples)

    def _open(self, open_samples: Callable[[], Iterator[Any]]) -> None:
        with self._rng:
            self._samples = open_samples()

    def has_sample(self) -> bool:
        """Return whether there is a first sample, which is kept for the first batch."""
        self._fill_buffer(1)
        return bool(self._buffer)

    @property
    def start_checksum(self) -> int:
        """Checksum of the first items that all ranks should see, after :meth:`has_sample`; 0 if each has its own."""
        return int(getattr(self._samples, "start_checksum", 0))

    @property
    def first_sample(self) -> Any:
        """The sample that :meth:`has_sample` has found."""
        return self._buffer[0]

    def take_batches_apart(self) -> None:
        """Take each item as a batch from now on, including items that have been drawn."""
        self._items_are_batches = True
        items = list(self._buffer)
        self._buffer.clear()
        self._add(items)

    def _add(self, items: Iterable[Any]) -> None:
        for item in items:
            self._buffer.extend(split_rows(item) if self._items_are_batches else (item,))

    def take_samples(self, max_samples: int) -> list[Any]:
        """Return up to `max_samples` samples; none after the end.

        An error ends a generator early, so nothing is drawn from it after an error.
        """
        self._fill_buffer(max_samples)
        count = min(max_samples, len(self._buffer))
        self._num_taken += count
        return [self._buffer.popleft() for _ in range(count)]

    def _fill_buffer(self, count: int) -> None:
        """Draw until the buffer has `count` samples or the stream ends."""
        if self._error_name:
            raise ValueError(
                f"the stream of rank {self.rank} broke off after {self._num_taken:,} samples ({self._error_name}), and "
                "an iterator can't continue after an error. Train again, which iterates from the start"
            )
        if self._exhausted or len(self._buffer) >= count:
            return
        try:
            self._draw(count)
        except BaseException as error:
            if not self._can_continue_after(error):
                self._num_taken += len(self._buffer)
                self._error_name = type(error).__name__
            error.add_note(f"the stream raised this on rank {self.rank}, after {self._num_taken:,} samples of its part")
            raise
        self._exhausted = len(self._buffer) < count

    def _draw(self, count: int) -> None:
        with self._rng:
            while len(self._buffer) < count:
                before = len(self._buffer)
                missing = 1 if self._items_are_batches else count - before
                for item in itertools.islice(self._samples, missing):  # one by one: the next one may raise
                    self._add([item])
                if len(self._buffer) == before:
                    return

    def _can_continue_after(self, _error: BaseException) -> bool:
        return False

    def close(self) -> None:
        """Drop the iterator, so that the ``finally`` of a generator runs."""
        self._samples, self._exhausted = iter(()), True
        self._buffer.clear()


class WorkerShardIterator(ShardIterator):
    """Iterator over one rank's samples that a worker process draws ahead."""

    def __init__(self, open_samples: Callable[[], Iterator[Any]], rank: int, seed: int, chunk_size: int) -> None:
        self._chunks, self._start_checksum = _SampleChunks(open_samples, seed, chunk_size), 0
        super().__init__(open_samples, rank, seed)

    def _open(self, _open_samples: Callable[[], Iterator[Any]]) -> None:
        self._samples = start_workers(make_worker_loader(self._chunks, num_workers=1))

    def _draw(self, count: int) -> None:
        while len(self._buffer) < count:
            chunk = next(self._samples, None)
            if chunk is None:
                return
            # unpickles: from this engine's own child process
            samples, self._start_checksum = pickle.loads(chunk)
            self._add(samples)

    @property
    def start_checksum(self) -> int:
        """See :class:`ShardIterator`."""
        return self._start_checksum

    def _can_continue_after(self, error: BaseException) -> bool:
        return isinstance(error, KeyboardInterrupt)  # the worker continues to draw

    def close(self) -> None:
        """End the process, and wait for it."""
        iterator: Any = self._samples
        super().close()
        shut_down_workers(iterator)


class _SampleChunks(torch.utils.data.IterableDataset[bytes]):
    """Pickled pairs of a list of samples and the start's checksum, for a worker process.

    One message for each costs less than one for each tensor.
    """

    def __init__(self, open_samples: Callable[[], Iterator[Any]], seed: int, chunk_size: int) -> None:
        self._open_samples, self._seed, self._chunk_size = open_samples, seed, chunk_size

    def __iter__(self) -> Iterator[bytes]:
        seed_generators(self._seed)
        chunk: list[Any] = []
        samples = self._open_samples()

        def pack() -> bytes:
            return pickle.dumps((chunk, getattr(samples, "start_checksum", 0)))

        try:
            for sample in samples:
                chunk.append(sample)
                if len(chunk) == self._chunk_size:
                    yield pack()
                    chunk.clear()
        except Exception:
            if chunk:  # the samples before the error are used
                yield pack()
            raise
        if chunk:
            yield pack()
