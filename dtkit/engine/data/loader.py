"""How batches come to a worker: as they are asked for, one ahead in a thread, or from worker processes.

A :class:`LoadedBatches` is a :class:`~dtkit.engine.data.batches.ShardedBatches` whose batches come through a
:class:`BatchLoader`. The stream says which rows a step takes; that is a pure function of the step, so a loader may look
ahead. What it has loaded is handed out only if the stream still gives those very rows (shares of the batch may have
changed meanwhile), else it is dropped and loaded anew.

A thread pays where taking rows waits for a disk, or where they go to a GPU (gathering and pinning then happen beside
the step). On a CPU whose cores compute already, gathering rows of an array in a thread costs more than it gives.

Worker processes are for Datasets whose samples take computing. They are torch's DataLoader's, forked, so that what was
defined in a notebook works and memory is shared. The system ends them with their engine, however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from dtkit.engine.data.batches import ShardedBatches
from dtkit.engine.data.iterable import IterableBatches, StreamSource
from dtkit.engine.data.sources import ArraySource, DatasetSource, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import RowSource
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.types import JobPlan

StepBatches = list[tuple[int, Any]]
"""One step's samples: (how many, their rows or their batch) for each micro-batch or shard."""


@dataclasses.dataclass(frozen=True)
class LoadingOptions:
    """How batches are loaded; what ``cluster.train`` was asked for."""

    num_workers: int = 0
    """Processes per engine that load a Dataset's samples."""
    pin_memory: bool | None = None
    """Page-locked memory for batches on their way to a GPU; None: where there is one."""
    prefetch: bool | None = None
    """Load the next batch in a thread while a step runs; None: where it pays."""

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, bool) or not hasattr(self.num_workers, "__index__") or self.num_workers < 0:
            raise ValueError(
                f"num_workers={self.num_workers!r}; it must be a number of processes per engine, from 0 up"
            )
        for name in ("pin_memory", "prefetch"):
            if getattr(self, name) not in (True, False, None):
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be True, False or None (where it pays)")
        if self.num_workers and self.prefetch:
            raise ValueError(
                f"num_workers={self.num_workers}, prefetch=True: worker processes load ahead by themselves. Leave "
                "prefetch out"
            )


class BatchLoader(Protocol):
    """Makes batches of rows."""

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """The batches of `step`. `plan` says which rows any step takes."""

    def close(self) -> None:
        """Leave nothing behind."""


class LoadedBatches(ShardedBatches):
    """A stream whose batches come through a loader."""

    def __init__(
        self, source: RowSource, shards: Shards, plan: JobPlan, own_shards: Sequence[int], loader: BatchLoader
    ) -> None:
        super().__init__(_RowNumbers(source), shards, plan, own_shards)
        self._loader = loader

    def load_batches(self, step: int, num_micro_batches: int = 1) -> StepBatches:
        """As Stream has it."""
        return self._loader.load(step, lambda s: ShardedBatches.load_batches(self, s, num_micro_batches))

    def load_batches_by_shard(self, step: int) -> StepBatches:
        """As Stream has it."""
        return self._loader.load(step, lambda s: ShardedBatches.load_batches_by_shard(self, s))

    def set_process_group(self, group: Any) -> None:
        """Rows are the same in every generation of the process group."""

    def close(self) -> None:
        """End threads and processes."""
        self._loader.close()


def make_row_batches(
    source: RowSource, shards: Shards, plan: JobPlan, context: WorkerContext, options: LoadingOptions
) -> LoadedBatches:
    """This worker's batches of rows by number."""
    rank = 0 if context.group is None else context.group.rank
    return LoadedBatches(
        source, shards, plan, context.shards, make_loader(source, options, context.device, plan.seed, rank)
    )


def make_stream_batches(
    source: StreamSource, plan: JobPlan, context: WorkerContext, options: LoadingOptions
) -> IterableBatches:
    """This worker's batches of a stream without length. A collective; ValueError on all ranks where one has none."""
    if options.num_workers:
        raise ValueError(
            f"num_workers={options.num_workers}: worker processes load rows by number, and a stream has none. Leave "
            "workers "
            "out; prefetch=True draws the next samples in a thread"
        )
    mesh, group = context.mesh, context.group
    here = {} if group is None else mesh.get_coordinates(group.rank)
    first = not any(place for axis, place in here.items() if axis != "dp")  # of its replica, which takes one part
    with torch.random.fork_rng(devices=[]):  # what is drawn at once must not disturb the numbers of cells
        torch.manual_seed(plan.seed + context.shards[0])
        return IterableBatches(
            source,
            plan,
            mesh.num_replicas,
            context.shards,
            group,
            prefetch=bool(options.prefetch),
            reports_counts=first,
        )


def make_loader(source: RowSource, options: LoadingOptions, device: torch.device, seed: int, rank: int) -> BatchLoader:
    """The loader that `loading` asks for, or that pays with this source and device."""
    gpu = device.type == "cuda"
    pin = gpu and options.pin_memory is not False  # elsewhere there is nothing to pin for
    if options.num_workers:
        if not isinstance(source, DatasetSource):
            _raise_workers_unsupported(source, options.num_workers)
        return WorkerLoader(source, options.num_workers, pin_memory=pin, seed=seed, rank=rank)
    ahead = options.prefetch if options.prefetch is not None else source.is_thread_safe and (source.reads_disk or gpu)
    direct = SyncLoader(source, pin_memory=pin and (ahead or bool(options.pin_memory)), rank=rank)
    return PrefetchLoader(direct) if ahead else direct


def load_evaluation_batches(
    source: RowSource, rows: np.ndarray, batch_size: int, options: LoadingOptions, rank: int
) -> Iterator[tuple[int, Any]]:
    """(samples, batch) of rows to evaluate on, in order; Datasets through worker processes where training has them."""
    parts = [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]
    loader: BatchLoader = SyncLoader(source, rank=rank, unit="evaluation batch")
    if options.num_workers and isinstance(source, DatasetSource):
        loader = WorkerLoader(source, options.num_workers, rank=rank, num_steps=len(parts), unit="evaluation batch")
    with contextlib.closing(loader):
        for k in range(len(parts)):
            yield from loader.load(k, lambda k: [(len(parts[k]), parts[k])])


class _RowNumbers:
    """Stands for a source where only the rows are asked for."""

    is_thread_safe, reads_disk = True, False

    def __init__(self, source: RowSource) -> None:
        self._source = source
        shuffled = getattr(source, "shuffled", None)
        if shuffled is not None:
            self.shuffle_rows = shuffled

    def __len__(self) -> int:
        return len(self._source)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The rows themselves."""
        return rows


# --- as asked for, and one ahead ------------------------------------------------------------------------------


class SyncLoader:
    """Takes rows when they are asked for."""

    def __init__(self, source: RowSource, *, pin_memory: bool = False, rank: int = 0, unit: str = "step") -> None:
        self._source, self._pin_memory, self._rank, self._unit = source, pin_memory, rank, unit

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """See :class:`BatchLoader`."""
        return self.load_rows(step, plan_rows(step))

    def load_rows(self, step: int, step_rows: StepBatches) -> StepBatches:
        """The batches of these rows."""
        with annotate_load_errors(f"{self._unit} {step}", step_rows, self._rank):
            several = [rows for _, rows in step_rows if rows is not None]
            if isinstance(self._source, ArraySource) and len(several) > 1:
                made = iter(self._source.take_micro_batches(several))
            else:
                made = map(self._source.take, several)
            return [(count, None if rows is None else self._pin_batch(next(made))) for count, rows in step_rows]

    def _pin_batch(self, batch: Any) -> Any:
        return map_tensors(batch, torch.Tensor.pin_memory) if self._pin_memory else batch

    def close(self) -> None:
        """There is nothing to end."""


class PrefetchLoader:
    """Takes the next step's rows in a thread while this step runs."""

    def __init__(self, sync_loader: SyncLoader) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._sync_loader = sync_loader
        self._executor: ThreadPoolExecutor = ThreadPoolExecutor(1, "dtkit-prefetch")
        self._prefetched: tuple[int, StepBatches, Future[StepBatches]] | None = None

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """See :class:`BatchLoader`."""
        pieces, (begun, self._prefetched) = plan_rows(step), (self._prefetched, None)
        if begun is not None and begun[0] == step and is_same_rows(begun[1], pieces):
            # waits: the user's Dataset; the notebook's patience and its interrupt end it
            batches = begun[2].result()
        else:
            # waits: the user's Dataset; the notebook's patience and its interrupt end it
            batches = self._executor.submit(
                self._sync_loader.load_rows, step, pieces
            ).result()  # sources are used by one thread
        following = plan_rows(step + 1)
        self._prefetched = step + 1, following, self._executor.submit(self._sync_loader.load_rows, step + 1, following)
        return batches

    def close(self) -> None:
        """End the thread once it has taken what it is at."""
        self._prefetched = None
        # waits: a read of the user's files, as in `load`
        self._executor.shutdown(cancel_futures=True)


def is_same_rows(one: StepBatches, other: StepBatches) -> bool:
    """Whether two plans take the same rows in the same pieces."""
    return len(one) == len(other) and all(
        a == b and (a == 0 or np.array_equal(rows, others)) for (a, rows), (b, others) in zip(one, other, strict=True)
    )


@contextlib.contextmanager
def annotate_load_errors(purpose: str, step_rows: StepBatches, rank: int) -> Iterator[None]:
    """Add to an error which rows were being loaded, for what ("step 7") and on which rank."""
    try:
        yield
    except Exception as error:
        rows = [int(row) for _, rows in step_rows if rows is not None for row in rows]
        shown = ", ".join(map(str, rows[:8])) + (f", ... ({len(rows)} in all)" if len(rows) > 8 else "")
        error.add_note(f"while rank {rank} was loading {purpose}: rows {shown}")
        raise


# --- worker processes -----------------------------------------------------------------------------------------


class WorkerLoader:
    """Has a DataLoader's worker processes load the coming steps, in order."""

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
        self._rank, self._unit, self._schedule = rank, unit, _StepSampler(num_steps)
        self._iterator: Any = None
        fork = "fork" if sys.platform.startswith("linux") else None
        # waits: the user's Dataset, as in `load`; torch checks every 5 s that its workers live
        self._loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            _StepDataset(source, seed, rank),
            batch_size=None,  # the schedule yields whole batches
            sampler=self._schedule,
            num_workers=num_workers,
            collate_fn=_identity,
            pin_memory=pin_memory,
            persistent_workers=True,
            worker_init_fn=_WorkerInit(os.getpid()),
            multiprocessing_context=fork,
            generator=torch.Generator().manual_seed(seed),  # else it draws from the job's random numbers
        )

    def load(self, step: int, plan_rows: Callable[[int], StepBatches]) -> StepBatches:
        """See :class:`BatchLoader`."""
        pieces = plan_rows(step)
        self._schedule.plan_rows = plan_rows
        if self._iterator is None or not self._schedule.accept_next(step, pieces):
            self._schedule.restart_at(step)
            self._iterator = self._start_workers()
        try:
            with annotate_load_errors(f"{self._unit} {step}", pieces, self._rank):
                return self._take_next()
        except BaseException:
            self.close()  # what else was under way is lost: the next load begins anew
            raise

    def _take_next(self) -> StepBatches:
        """What the workers loaded next. One that dies while it hands a batch over is seen as a connection that ends."""
        try:
            batches: StepBatches = next(self._iterator)
        except (ConnectionError, EOFError) as error:
            if str(error).startswith("Caught "):  # torch's word for what the Dataset raised
                raise
            raise RuntimeError(
                "a worker process that loads samples was killed or exited; where memory ran out, use fewer num_workers="
            ) from error
        return batches

    def _start_workers(self) -> Any:
        """Fork the workers, or have those that are there begin anew. From the main thread, with which they end."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # of processes with threads: Python 3.12
            return iter(self._loader)

    def close(self) -> None:
        """End the processes, and wait for them."""
        iterator = getattr(self._loader, "_iterator", None)  # kept there for the next iteration
        self._iterator = None
        if iterator is not None:
            self._loader._iterator = None  # noqa: SLF001 - torch has no public way to end them
            iterator._shutdown_workers()  # noqa: SLF001 - as above


class _StepSampler(torch.utils.data.Sampler[Any]):
    """What the coming steps take: (step, pieces), without end or for so many steps."""

    def __init__(self, num_steps: int | None) -> None:
        self.plan_rows: Callable[[int], StepBatches] = lambda _: []
        self._num_steps, self._first_step = num_steps, 0
        self._requested: list[tuple[int, StepBatches]] = []

    def restart_at(self, step: int) -> None:
        """Begin at `step` with the next iteration."""
        self._first_step = step
        self._requested.clear()

    def accept_next(self, step: int, step_rows: StepBatches) -> bool:
        """Whether the next batches to come are these; they count as come then."""
        if not self._requested or self._requested[0][0] != step or not is_same_rows(self._requested[0][1], step_rows):
            return False
        del self._requested[0]
        return True

    def __iter__(self) -> Iterator[tuple[int, StepBatches]]:
        step = self._first_step
        while self._num_steps is None or step < self._num_steps:
            pieces = self.plan_rows(step)
            if step > self._first_step:  # the first is asked for as it is sent
                self._requested.append((step, pieces))
            yield step, pieces
            step += 1


class _StepDataset(torch.utils.data.Dataset[Any]):
    """What a worker process calls: the batches of one step."""

    def __init__(self, source: RowSource, seed: int, rank: int) -> None:
        self._source, self._seed, self._rank = source, seed, rank

    def __getitem__(self, request: tuple[int, StepBatches]) -> StepBatches:
        step, pieces = request
        _seed_all([self._seed, self._rank, step])
        return [(count, None if rows is None else self._source.take(rows)) for count, rows in pieces]


def _seed_all(entropy: Iterable[int]) -> None:
    """Random numbers that depend on the step alone: not on how many workers there are, nor on where a run began."""
    import random

    number = int(np.random.SeedSequence(list(entropy)).generate_state(1)[0])
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - a user's Dataset may draw from numpy's global generator


def _identity(batch: Any) -> Any:
    return batch


class _WorkerInit:
    """What a worker process does first."""

    def __init__(self, engine_pid: int) -> None:
        self._engine_pid = engine_pid

    def __call__(self, _worker_id: int) -> None:
        """Die with the engine, and leave its signals to it."""
        signal.set_wakeup_fd(-1)  # inherited: an interrupt here would be taken for the engine's
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform.startswith("linux"):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._engine_pid:  # it died before that call
                os._exit(1)


_PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def _raise_workers_unsupported(source: RowSource, num_workers: int) -> None:
    raise ValueError(
        f"num_workers={num_workers}: worker processes are for Datasets whose samples take computing; these rows "
        f"({type(source).__name__}) are copied out of arrays or files faster than they could travel between processes. "
        "Leave num_workers out"
    )
