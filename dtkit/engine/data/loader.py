"""How batches come to a worker: as they are asked for, one ahead in a thread, or from worker processes.

A :class:`Feeder` is a :class:`~dtkit.engine.data.batches.Stream` whose batches come through a :class:`Loader`. The
stream says which rows a step takes; that is a pure function of the step, so a loader may look ahead. What it has loaded
is handed out only if the stream still gives those very rows (shares of the batch may have changed meanwhile), else it
is dropped and loaded anew.

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

from dtkit.engine.data.batches import Stream
from dtkit.engine.data.iterable import IterableStream, StreamSource
from dtkit.engine.data.sources import ArraySource, DatasetSource, on_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import Source
    from dtkit.strategies.base import WorkerContext
    from dtkit.types import JobPlan

Pieces = list[tuple[int, Any]]
"""One step's samples: (how many, their rows or their batch) for each micro-batch or shard."""


@dataclasses.dataclass(frozen=True)
class Loading:
    """How batches are loaded; what ``cluster.train`` was asked for."""

    workers: int = 0
    """Processes per engine that load a Dataset's samples."""
    pin_memory: bool | None = None
    """Page-locked memory for batches on their way to a GPU; None: where there is one."""
    prefetch: bool | None = None
    """Load the next batch in a thread while a step runs; None: where it pays."""

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not hasattr(self.workers, "__index__") or self.workers < 0:
            raise ValueError(f"workers={self.workers!r}; it must be a number of processes per engine, from 0 up")
        for name in ("pin_memory", "prefetch"):
            if getattr(self, name) not in (True, False, None):
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be True, False or None (where it pays)")
        if self.workers and self.prefetch:
            raise ValueError(
                f"workers={self.workers}, prefetch=True: worker processes load ahead by themselves. Leave prefetch out"
            )


class Loader(Protocol):
    """Makes batches of rows."""

    def load(self, step: int, plan: Callable[[int], Pieces]) -> Pieces:
        """The batches of `step`. `plan` says which rows any step takes."""

    def close(self) -> None:
        """Leave nothing behind."""


class Feeder(Stream):
    """A stream whose batches come through a loader."""

    def __init__(self, source: Source, shards: Shards, plan: JobPlan, mine: Sequence[int], loader: Loader) -> None:
        super().__init__(_Rows(source), shards, plan, mine)
        self._loader = loader

    def batches(self, step: int, parts: int = 1) -> Pieces:
        """As Stream has it."""
        return self._loader.load(step, lambda s: Stream.batches(self, s, parts))

    def batches_by_shard(self, step: int) -> Pieces:
        """As Stream has it."""
        return self._loader.load(step, lambda s: Stream.batches_by_shard(self, s))

    def regroup(self, group: Any) -> None:
        """Rows are the same in every generation of the process group."""

    def close(self) -> None:
        """End threads and processes."""
        self._loader.close()


def feed(source: Source, shards: Shards, plan: JobPlan, setting: WorkerContext, loading: Loading) -> Feeder:
    """This worker's batches of rows by number."""
    rank = 0 if setting.group is None else setting.group.rank
    return Feeder(source, shards, plan, setting.shards, loader_for(source, loading, setting.device, plan.seed, rank))


def feed_stream(source: StreamSource, plan: JobPlan, setting: WorkerContext, loading: Loading) -> IterableStream:
    """This worker's batches of a stream without length. A collective; ValueError on all ranks where one has none."""
    if loading.workers:
        raise ValueError(
            f"workers={loading.workers}: worker processes load rows by number, and a stream has none. Leave workers "
            "out; prefetch=True draws the next samples in a thread"
        )
    mesh, group = setting.mesh, setting.group
    here = {} if group is None else mesh.coordinates(group.rank)
    first = not any(place for axis, place in here.items() if axis != "dp")  # of its replica, which takes one part
    with torch.random.fork_rng(devices=[]):  # what is drawn at once must not disturb the numbers of cells
        torch.manual_seed(plan.seed + setting.shards[0])
        return IterableStream(
            source,
            plan,
            mesh.replicas,
            setting.shards,
            group,
            ahead=bool(loading.prefetch),
            counted=first,
        )


def loader_for(source: Source, loading: Loading, device: torch.device, seed: int, rank: int) -> Loader:
    """The loader that `loading` asks for, or that pays with this source and device."""
    gpu = device.type == "cuda"
    pin = gpu and loading.pin_memory is not False  # elsewhere there is nothing to pin for
    if loading.workers:
        if not isinstance(source, DatasetSource):
            _refuse_workers(source, loading.workers)
        return Workers(source, loading.workers, pin=pin, seed=seed, rank=rank)
    ahead = loading.prefetch if loading.prefetch is not None else source.pure and (source.waits or gpu)
    direct = Direct(source, pin=pin and (ahead or bool(loading.pin_memory)), rank=rank)
    return Ahead(direct) if ahead else direct


def held_out(
    source: Source, rows: np.ndarray, batch_size: int, loading: Loading, rank: int
) -> Iterator[tuple[int, Any]]:
    """(samples, batch) of rows to evaluate on, in order; Datasets through worker processes where training has them."""
    parts = [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]
    loader: Loader = Direct(source, rank=rank, unit="evaluation batch")
    if loading.workers and isinstance(source, DatasetSource):
        loader = Workers(source, loading.workers, rank=rank, steps=len(parts), unit="evaluation batch")
    with contextlib.closing(loader):
        for k in range(len(parts)):
            yield from loader.load(k, lambda k: [(len(parts[k]), parts[k])])


class _Rows:
    """Stands for a source where only the rows are asked for."""

    pure, waits = True, False

    def __init__(self, source: Source) -> None:
        self._source = source
        shuffled = getattr(source, "shuffled", None)
        if shuffled is not None:
            self.shuffled = shuffled

    def __len__(self) -> int:
        return len(self._source)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The rows themselves."""
        return rows


# --- as asked for, and one ahead ------------------------------------------------------------------------------


class Direct:
    """Takes rows when they are asked for."""

    def __init__(self, source: Source, *, pin: bool = False, rank: int = 0, unit: str = "step") -> None:
        self._source, self._pin, self._rank, self._unit = source, pin, rank, unit

    def load(self, step: int, plan: Callable[[int], Pieces]) -> Pieces:
        """See :class:`Loader`."""
        return self.take(step, plan(step))

    def take(self, step: int, pieces: Pieces) -> Pieces:
        """The batches of these rows."""
        with explained(f"{self._unit} {step}", pieces, self._rank):
            several = [rows for _, rows in pieces if rows is not None]
            if isinstance(self._source, ArraySource) and len(several) > 1:
                made = iter(self._source.take_pieces(several))
            else:
                made = map(self._source.take, several)
            return [(count, None if rows is None else self._pinned(next(made))) for count, rows in pieces]

    def _pinned(self, batch: Any) -> Any:
        return on_tensors(batch, torch.Tensor.pin_memory) if self._pin else batch

    def close(self) -> None:
        """There is nothing to end."""


class Ahead:
    """Takes the next step's rows in a thread while this step runs."""

    def __init__(self, direct: Direct) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._direct = direct
        self._thread: ThreadPoolExecutor = ThreadPoolExecutor(1, "dtkit-prefetch")
        self._next: tuple[int, Pieces, Future[Pieces]] | None = None

    def load(self, step: int, plan: Callable[[int], Pieces]) -> Pieces:
        """See :class:`Loader`."""
        pieces, (begun, self._next) = plan(step), (self._next, None)
        if begun is not None and begun[0] == step and same(begun[1], pieces):
            # waits: the user's Dataset; the notebook's patience and its interrupt end it
            batches = begun[2].result()
        else:
            # waits: the user's Dataset; the notebook's patience and its interrupt end it
            batches = self._thread.submit(self._direct.take, step, pieces).result()  # sources are used by one thread
        following = plan(step + 1)
        self._next = step + 1, following, self._thread.submit(self._direct.take, step + 1, following)
        return batches

    def close(self) -> None:
        """End the thread once it has taken what it is at."""
        self._next = None
        # waits: a read of the user's files, as in `load`
        self._thread.shutdown(cancel_futures=True)


def same(one: Pieces, other: Pieces) -> bool:
    """Whether two plans take the same rows in the same pieces."""
    return len(one) == len(other) and all(
        a == b and (a == 0 or np.array_equal(rows, others)) for (a, rows), (b, others) in zip(one, other, strict=True)
    )


@contextlib.contextmanager
def explained(what: str, pieces: Pieces, rank: int) -> Iterator[None]:
    """Add to an error which rows were being loaded, for what ("step 7") and on which rank."""
    try:
        yield
    except Exception as error:
        rows = [int(row) for _, rows in pieces if rows is not None for row in rows]
        shown = ", ".join(map(str, rows[:8])) + (f", ... ({len(rows)} in all)" if len(rows) > 8 else "")
        error.add_note(f"while rank {rank} was loading {what}: rows {shown}")
        raise


# --- worker processes -----------------------------------------------------------------------------------------


class Workers:
    """Has a DataLoader's worker processes load the coming steps, in order."""

    def __init__(
        self,
        source: Source,
        workers: int,
        *,
        pin: bool = False,
        seed: int = 0,
        rank: int = 0,
        steps: int | None = None,
        unit: str = "step",
    ) -> None:
        self._rank, self._unit, self._schedule = rank, unit, _Schedule(steps)
        self._iterator: Any = None
        fork = "fork" if sys.platform.startswith("linux") else None
        # waits: the user's Dataset, as in `load`; torch checks every 5 s that its workers live
        self._loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            _Batches(source, seed, rank),
            batch_size=None,  # the schedule yields whole batches
            sampler=self._schedule,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=pin,
            persistent_workers=True,
            worker_init_fn=_Worker(os.getpid()),
            multiprocessing_context=fork,
            generator=torch.Generator().manual_seed(seed),  # else it draws from the job's random numbers
        )

    def load(self, step: int, plan: Callable[[int], Pieces]) -> Pieces:
        """See :class:`Loader`."""
        pieces = plan(step)
        self._schedule.plan = plan
        if self._iterator is None or not self._schedule.expects(step, pieces):
            self._schedule.restart(step)
            self._iterator = self._start()
        try:
            with explained(f"{self._unit} {step}", pieces, self._rank):
                return self._next()
        except BaseException:
            self.close()  # what else was under way is lost: the next load begins anew
            raise

    def _next(self) -> Pieces:
        """What the workers loaded next. One that dies while it hands a batch over is seen as a connection that ends."""
        try:
            batches: Pieces = next(self._iterator)
        except (ConnectionError, EOFError) as error:
            if str(error).startswith("Caught "):  # torch's word for what the Dataset raised
                raise
            raise RuntimeError(
                "a worker process that loads samples was killed or exited; where memory ran out, use fewer workers="
            ) from error
        return batches

    def _start(self) -> Any:
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


class _Schedule(torch.utils.data.Sampler[Any]):
    """What the coming steps take: (step, pieces), without end or for so many steps."""

    def __init__(self, steps: int | None) -> None:
        self.plan: Callable[[int], Pieces] = lambda _: []
        self._steps, self._first = steps, 0
        self._sent: list[tuple[int, Pieces]] = []

    def restart(self, step: int) -> None:
        """Begin at `step` with the next iteration."""
        self._first = step
        self._sent.clear()

    def expects(self, step: int, pieces: Pieces) -> bool:
        """Whether the next batches to come are these; they count as come then."""
        if not self._sent or self._sent[0][0] != step or not same(self._sent[0][1], pieces):
            return False
        del self._sent[0]
        return True

    def __iter__(self) -> Iterator[tuple[int, Pieces]]:
        step = self._first
        while self._steps is None or step < self._steps:
            pieces = self.plan(step)
            if step > self._first:  # the first is asked for as it is sent
                self._sent.append((step, pieces))
            yield step, pieces
            step += 1


class _Batches(torch.utils.data.Dataset[Any]):
    """What a worker process calls: the batches of one step."""

    def __init__(self, source: Source, seed: int, rank: int) -> None:
        self._source, self._seed, self._rank = source, seed, rank

    def __getitem__(self, order: tuple[int, Pieces]) -> Pieces:
        step, pieces = order
        _seed([self._seed, self._rank, step])
        return [(count, None if rows is None else self._source.take(rows)) for count, rows in pieces]


def _seed(key: Iterable[int]) -> None:
    """Random numbers that depend on the step alone: not on how many workers there are, nor on where a run began."""
    import random

    number = int(np.random.SeedSequence(list(key)).generate_state(1)[0])
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - a user's Dataset may draw from numpy's global generator


def _as_it_is(batch: Any) -> Any:
    return batch


class _Worker:
    """What a worker process does first."""

    def __init__(self, engine: int) -> None:
        self._engine = engine

    def __call__(self, _worker: int) -> None:
        """Die with the engine, and leave its signals to it."""
        signal.set_wakeup_fd(-1)  # inherited: an interrupt here would be taken for the engine's
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform.startswith("linux"):
            import ctypes

            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != self._engine:  # it died before that call
                os._exit(1)


_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def _refuse_workers(source: Source, workers: int) -> None:
    raise ValueError(
        f"workers={workers}: worker processes are for Datasets whose samples take computing; these rows "
        f"({type(source).__name__}) are copied out of arrays or files faster than they could travel between processes. "
        "Leave workers out"
    )
