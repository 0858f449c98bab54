"""Loading of batches when they are needed, or one step ahead in a thread.

A thread saves time if rows are read from a disk or go to a GPU. Gathering and pinning then overlap with the step. If
the cores are busy, gathering rows of an array in a thread costs more than it saves. User code never runs in the thread:
it may draw random numbers, and all threads of a process share torch's generators.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from dtkit.engine.data.sources import ArraySource, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from dtkit.engine.data.sample_seeds import SampleSeeds
    from dtkit.engine.data.sources import RowSource

StepBatches = list[tuple[int, Any]]
"""Samples of a step: (number, rows or batch) for each micro-batch or shard."""


class BatchLoader(Protocol):
    """Loader of the batches of a step."""

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """Return the batches of a step. `plan_rows` returns the rows of any step, for loading ahead."""

    def close(self) -> None:
        """End threads and processes."""


class SyncLoader:
    """Loader without a thread or process of its own."""

    def __init__(
        self, source: RowSource, seeds: SampleSeeds, *, pin_memory: bool = False, rank: int = 0, unit: str = "step"
    ) -> None:
        self._source, self._seeds = source, seeds
        self._pin_memory, self._rank, self._unit = pin_memory, rank, unit

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """See :class:`BatchLoader`."""
        return self.load_rows(step, plan_rows(step))

    def load_rows(self, step: int, step_rows: StepBatches) -> StepBatches:
        """Return the batches of these rows."""
        try:
            row_lists = [rows for _, rows in step_rows if rows is not None]
            if isinstance(self._source, ArraySource) and len(row_lists) > 1:
                batches = iter(self._source.take_micro_batches(row_lists))
            else:
                batches = (self._seeds.take(self._source, rows, step) for rows in row_lists)
            return [(count, None if rows is None else self._pin_batch(next(batches))) for count, rows in step_rows]
        except Exception as error:
            _add_load_note(error, f"{self._unit} {step}", step_rows, self._rank)
            raise

    def _pin_batch(self, batch: Any) -> Any:
        return map_tensors(batch, torch.Tensor.pin_memory) if self._pin_memory else batch

    def close(self) -> None:
        """Do nothing."""


class PrefetchLoader:
    """Loader of the next step in a thread, while this step runs."""

    def __init__(self, sync_loader: SyncLoader) -> None:
        self._sync_loader = sync_loader
        self._executor = ThreadPoolExecutor(1, "dtkit-prefetch")
        self._prefetched: tuple[int, StepBatches, Future[StepBatches]] | None = None

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """See :class:`BatchLoader`."""
        step_rows, (prefetched, self._prefetched) = plan_rows(step), (self._prefetched, None)
        if prefetched is not None and prefetched[0] == step and is_same_rows(prefetched[1], step_rows):
            future = prefetched[2]
        else:  # in the thread as well, since only one thread may use a source
            future = self._executor.submit(self._sync_loader.load_rows, step, step_rows)
        # waits: the user's Dataset; the notebook's timeout and its interrupt end it
        batches = future.result()
        next_rows = plan_rows(step + 1)
        self._prefetched = step + 1, next_rows, self._executor.submit(self._sync_loader.load_rows, step + 1, next_rows)
        return batches

    def close(self) -> None:
        """End the thread once it has loaded the current step."""
        self._prefetched = None
        # waits: a read of the user's files, as in `load`
        self._executor.shutdown(cancel_futures=True)


def is_same_rows(first: StepBatches, second: StepBatches) -> bool:
    """Return whether two plans have the same rows in the same batches."""
    return len(first) == len(second) and all(
        n == m and (n == 0 or np.array_equal(a, b)) for (n, a), (m, b) in zip(first, second, strict=True)
    )


@contextlib.contextmanager
def annotate_load_errors(purpose: str, step_rows: StepBatches, rank: int) -> Iterator[None]:
    """Add to an error the rows that were being loaded, the purpose ("step 7") and the rank."""
    try:
        yield
    except Exception as error:
        _add_load_note(error, purpose, step_rows, rank)
        raise


def _add_load_note(error: Exception, purpose: str, step_rows: StepBatches, rank: int) -> None:
    rows = [int(row) for _, rows in step_rows if rows is not None for row in rows]
    shown = ", ".join(map(str, rows[:8])) + (f", ... ({len(rows)} in all)" if len(rows) > 8 else "")
    error.add_note(f"while rank {rank} was loading {purpose}: rows {shown}")
