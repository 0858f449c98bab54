"""Loading of batches in worker processes, for Datasets whose samples take computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import LOADER_ITERATOR, shut_down_workers
from dtkit.engine.data.prefetch_loader import annotate_load_errors, is_same_rows
from dtkit.engine.data.worker_process import make_worker_loader, start_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.engine.data.prefetch_loader import StepBatches
    from dtkit.engine.data.sample_seeds import SampleSeeds
    from dtkit.engine.data.sources import RowSource


class WorkerLoader:
    """Loader of coming steps in worker processes, in order."""

    def __init__(
        self,
        source: RowSource,
        num_workers: int,
        seeds: SampleSeeds,
        *,
        pin_memory: bool = False,
        rank: int = 0,
        num_steps: int | None = None,
        unit: str = "step",
    ) -> None:
        self._rank, self._unit, self._sampler = rank, unit, _StepSampler(num_steps)
        self._iterator: Any = None
        self._loader = make_worker_loader(
            _StepDataset(source, seeds),
            num_workers,
            sampler=self._sampler,
            pin_memory=pin_memory,
            persistent_workers=True,
        )

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """See :class:`BatchLoader`."""
        step_rows = plan_rows(step)
        self._sampler.plan_rows = plan_rows
        if self._iterator is None or not self._sampler.accept_next(step, step_rows):
            self._sampler.restart_at(step)
            self._iterator = start_workers(self._loader)
        try:
            with annotate_load_errors(f"{self._unit} {step}", step_rows, self._rank):
                return self._take_next()
        except BaseException:
            self.close()  # the steps in flight are lost, and the next load starts again
            raise

    def _take_next(self) -> StepBatches:
        """Return the next step that the workers have loaded. A worker that ends while sending a batch closes its
        connection.
        """
        try:
            batches: StepBatches = next(self._iterator)
        except (ConnectionError, EOFError) as error:
            if str(error).startswith("Caught "):  # torch's prefix of what the Dataset raised
                raise
            raise RuntimeError(
                "a worker process that loads samples was killed or exited. If memory ran out, use fewer num_workers="
            ) from error
        return batches

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

    def __init__(self, source: RowSource, seeds: SampleSeeds) -> None:
        self._source, self._seeds = source, seeds

    def __getitem__(self, request: tuple[int, StepBatches]) -> StepBatches:
        step, step_rows = request
        return [
            (count, None if rows is None else self._seeds.take(self._source, rows, step)) for count, rows in step_rows
        ]
