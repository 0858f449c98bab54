"""Loading of batches in worker processes, for Datasets whose samples take computing.

The processes are those of torch's DataLoader. They are forked, so that they have what was defined in a notebook, and
share its memory. The system ends them when their engine ends.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit._util.torch_private import LOADER_ITERATOR, shut_down_workers
from dtkit.engine.data.prefetch_loader import annotate_load_errors, is_same_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dtkit.engine.data.prefetch_loader import StepBatches
    from dtkit.engine.data.sources import RowSource

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class WorkerLoader:
    """Loader of coming steps in worker processes, in order."""

    def __init__(
        self,
        source: RowSource,
        num_workers: int,
        *,
        pin_memory: bool = False,
        seed: int = 0,
        rank: int = 0,
        num_steps: int | None = None,
        unit: str = "step",
    ) -> None:
        self._rank, self._unit, self._sampler = rank, unit, _StepSampler(num_steps)
        self._iterator: Any = None
        start_method = "fork" if sys.platform.startswith("linux") else None
        # waits: the user's Dataset, as in `load`; torch checks every 5 s that its workers are alive
        self._loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            _StepDataset(source, seed, rank),
            batch_size=None,  # the sampler yields whole steps
            sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=_identity,
            pin_memory=pin_memory,
            persistent_workers=True,
            worker_init_fn=_WorkerInit(os.getpid()),
            multiprocessing_context=start_method,
            generator=torch.Generator().manual_seed(seed),  # without it, torch draws from the job's random numbers
        )

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """See :class:`BatchLoader`."""
        step_rows = plan_rows(step)
        self._sampler.plan_rows = plan_rows
        if self._iterator is None or not self._sampler.accept_next(step, step_rows):
            self._sampler.restart_at(step)
            self._iterator = self._start_workers()
        try:
            with annotate_load_errors(f"{self._unit} {step}", step_rows, self._rank):
                return self._take_next()
        except BaseException:
            self.close()  # the steps in flight are lost, and the next load starts again
            raise

    def _take_next(self) -> StepBatches:
        """Return what the workers loaded next. A worker that ends while it sends a batch closes its connection."""
        try:
            batches: StepBatches = next(self._iterator)
        except (ConnectionError, EOFError) as error:
            if str(error).startswith("Caught "):  # torch's prefix of what the Dataset raised
                raise
            raise RuntimeError(
                "a worker process that loads samples was killed or exited. If memory ran out, use fewer num_workers="
            ) from error
        return batches

    def _start_workers(self) -> Any:
        """Fork the workers, or restart those that exist. Workers end with the calling thread, the main thread."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # Python 3.12: of a process with threads
            return iter(self._loader)

    def close(self) -> None:
        """End the processes, and wait for them."""
        iterator = getattr(self._loader, LOADER_ITERATOR, None)  # with persistent workers torch keeps it
        self._iterator = None
        if iterator is not None:
            setattr(self._loader, LOADER_ITERATOR, None)
            shut_down_workers(iterator)


class _StepSampler(torch.utils.data.Sampler[Any]):
    """Sampler of (step, its rows) for the coming steps; without end if `num_steps` is None."""

    def __init__(self, num_steps: int | None) -> None:
        self.plan_rows: Callable[[int], StepBatches] = lambda _: []
        self._num_steps, self._first_step = num_steps, 0
        self._requested: list[tuple[int, StepBatches]] = []

    def restart_at(self, step: int) -> None:
        """Start the next iteration at `step`."""
        self._first_step = step
        self._requested.clear()

    def accept_next(self, step: int, step_rows: StepBatches) -> bool:
        """Return whether these rows were requested next; then they count as received."""
        if not self._requested or self._requested[0][0] != step or not is_same_rows(self._requested[0][1], step_rows):
            return False
        del self._requested[0]
        return True

    def __iter__(self) -> Iterator[tuple[int, StepBatches]]:
        step = self._first_step
        while self._num_steps is None or step < self._num_steps:
            step_rows = self.plan_rows(step)
            if step > self._first_step:  # `load` requests the first step itself
                self._requested.append((step, step_rows))
            yield step, step_rows
            step += 1


class _StepDataset(torch.utils.data.Dataset[Any]):
    """Dataset of steps, for a worker process: an item is the batches of one step."""

    def __init__(self, source: RowSource, seed: int, rank: int) -> None:
        self._source, self._seed, self._rank = source, seed, rank

    def __getitem__(self, request: tuple[int, StepBatches]) -> StepBatches:
        step, step_rows = request
        _seed_all([self._seed, self._rank, step])
        return [(count, None if rows is None else self._source.take(rows)) for count, rows in step_rows]


def _seed_all(entropy: Iterable[int]) -> None:
    """Seed all generators. Numbers then don't depend on the number of workers or on the first step of the run."""
    import random

    number = int(np.random.SeedSequence(list(entropy)).generate_state(1)[0])
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - a user's Dataset may draw from numpy's global generator


def _identity(batch: Any) -> Any:
    return batch


class _WorkerInit:
    """Function that a worker process calls first."""

    def __init__(self, engine_pid: int) -> None:
        self._engine_pid = engine_pid

    def __call__(self, _worker_id: int) -> None:
        """Ignore interrupts, and have the system end this process with the engine."""
        signal.set_wakeup_fd(-1)  # it is the engine's, which would take this process's interrupt for its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform.startswith("linux"):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._engine_pid:  # the engine ended before that call
                os._exit(1)
