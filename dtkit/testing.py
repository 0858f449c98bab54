"""A public double of the engine processes, so that what stands above them can be tested without any.

It stands where ipyparallel stands: at the :class:`~dtkit.transport.Transport`. One thread per rank serves requests in
order, as an engine does, and refuses what a real one refuses; what a rank computes is made up.

    engines = FakeTransport(2)
    cluster = dtkit.Cluster.over(engines)
    engines.fail(rank=1, op="advance", error=RuntimeError("no forward here"))
    run = cluster.train(...)            # fails as on real engines: rank 1 is the cause, rank 0 its victim
"""

from __future__ import annotations

import dataclasses
import pickle
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit import wire
from dtkit.engine.probe import hello
from dtkit.errors import Refused
from dtkit.history import ROW
from dtkit.records import Advance, Failure, Reply, Request
from dtkit.shipment import Shipment, ship

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclasses.dataclass
class _Rank:
    """What one pretended engine holds."""

    number: int
    owner: int = 0
    generation: int = -1
    broken: bool = False
    lost: bool = False
    jobs: dict[str, int] = dataclasses.field(default_factory=dict)  # where each job stands
    lr: float = 0.1
    inbox: queue.SimpleQueue[Any] = dataclasses.field(default_factory=queue.SimpleQueue)


@dataclasses.dataclass
class _Fault:
    """A failure to come: of one rank, in the next call of one kind."""

    rank: int
    op: str
    error: BaseException
    waiting: set[int]
    """The ranks that have not met it."""


class FakeTransport:
    """`world_size` pretended engines.

    ``served`` lists (rank, op, args) as they were served. Until :meth:`let_go` is called after :meth:`hold`, requests
    wait. `step_s` is what a step is said to take; nothing sleeps.
    """

    def __init__(self, world_size: int = 2, *, step_s: float = 0.05) -> None:
        self.engine_ids: Sequence[int] = range(10, 10 + world_size)  # engine ids are no ranks
        self.step_s = step_s
        self.served: list[tuple[int, str, dict[str, Any]]] = []
        self.interrupted: list[int] = []
        self.hello: dict[str, Any] = {}  # overrides what engines say of themselves
        self._ranks = [_Rank(number) for number in range(world_size)]
        self._gate = threading.Event()
        self._gate.set()
        self._faults: list[_Fault] = []
        self._nonfinite: dict[int, tuple[Sequence[int], set[int]]] = {}
        self._nonfinite_for_ever: set[int] = set()
        self._slow: list[int] = []
        self._threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in self._ranks]
        for thread in self._threads:
            thread.start()

    # -- what a test says -------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Serve nothing until `let_go`."""
        self._gate.clear()

    def let_go(self) -> None:
        """Serve again."""
        self._gate.set()

    def fail(self, rank: int, op: str, error: BaseException) -> None:
        """Have that rank fail at the next `op`, and the others with it as its victims."""
        self._faults.append(_Fault(rank, op, error, set(range(len(self._ranks)))))

    def nonfinite(self, step: int, ranks: Sequence[int], *, always: bool = False) -> None:
        """Have the gradients of that step be NaN, with the loss NaN on `ranks`; once, unless `always`."""
        self._nonfinite[step] = ranks, set(range(len(self._ranks)))
        if always:
            self._nonfinite_for_ever.add(step)

    def slow_after(self, steps: int) -> None:
        """Have the next dispatch of more steps end early, as when steps have become slow."""
        self._slow = [steps] * len(self._ranks)

    def lose(self, rank: int) -> None:
        """End that engine's process."""
        self._ranks[rank].lost = True

    # -- the transport ----------------------------------------------------------------------------------------

    def send(self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None) -> Future[Reply]:
        """See :class:`~dtkit.transport.Transport`."""
        future: Future[Reply] = Future()
        self._ranks[rank].inbox.put((message, listen, future))
        return future

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Note who was interrupted; held requests are served."""
        self.interrupted += ranks
        self._gate.set()

    def close(self) -> None:
        """End the threads."""
        self._gate.set()
        for rank in self._ranks:
            rank.inbox.put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    # -- an engine --------------------------------------------------------------------------------------------

    def _serve(self, rank: _Rank) -> None:
        while (item := rank.inbox.get()) is not None:
            message, listen, future = item
            self._gate.wait(timeout=600)
            future.set_result(self._answer(rank, pickle.loads(message), listen))

    def _answer(self, rank: _Rank, request: Request, listen: Callable[[int, list[Any]], None] | None) -> Reply:
        self.served.append((rank.number, request.op, request.args))
        if rank.lost:
            return self._failed(rank, RuntimeError("its process has ended"), kind="lost")
        try:
            self._admit(rank, request)
            for fault in self._faults:
                if fault.op == request.op and rank.number in fault.waiting:
                    return self._fail_together(rank, fault)
            return Reply(getattr(self, f"_{request.op}")(rank, listen=listen, **request.args))
        except Refused as error:
            return self._failed(rank, error, kind="refused")
        except Exception as error:  # noqa: BLE001 - as on an engine: it goes to the notebook
            rank.broken = True
            return self._failed(rank, error)

    def _admit(self, rank: _Rank, request: Request) -> None:
        if request.op in ("hello", "join"):
            return
        if request.owner != rank.owner or request.generation != rank.generation:
            raise Refused(f"owner {rank.owner} and generation {rank.generation} are this engine's, not the call's")
        if rank.broken:
            raise Refused("the process group was broken up and not yet formed anew")

    def _fail_together(self, rank: _Rank, fault: _Fault) -> Reply:
        rank.broken = True
        fault.waiting.discard(rank.number)  # each rank meets it once
        if rank.number != fault.rank:
            return self._failed(rank, RuntimeError("Connection closed by peer"), victim=True)
        return self._failed(rank, fault.error)

    def _failed(self, rank: _Rank, error: BaseException, *, kind: str = "error", victim: bool = False) -> Reply:
        trace = f"{type(error).__name__}: {error}\n"
        return Reply(
            failure=Failure(rank.number, "fake", type(error).__name__, str(error), trace, victim=victim, kind=kind)
        )

    # -- what it serves: the operations of dtkit.engine.session ------------------------------------------------

    def _hello(self, _rank: _Rank, **_: Any) -> dict[str, Any]:
        return {**hello(), **self.hello}

    def _join(self, rank: _Rank, *, owner: int, spec: Any, **_: Any) -> dict[str, Any]:
        if owner < rank.owner:
            raise Refused(f"owner {owner} was superseded by owner {rank.owner}")
        rank.owner, rank.generation, rank.broken = owner, spec.generation, False
        return self._info(rank)

    def _info(self, rank: _Rank, **_: Any) -> dict[str, Any]:
        memory = {"memory_total": 8_000_000_000, "memory_free": 5_000_000_000}
        return {"host": "fake", "pid": 4000 + rank.number, "device": "cpu", "threads": 1, **memory}

    def _warm(self, _rank: _Rank, **_: Any) -> None:
        return None

    def _load(self, _rank: _Rank, *, shipment: Shipment, sizes: Sequence[int] | None, **_: Any) -> int:
        loaded = shipment.unload()
        data = loaded() if sizes is None else loaded[0]
        return len(data[0] if isinstance(data, tuple) else data)

    def _shard(self, _rank: _Rank, **_: Any) -> None:
        return None

    def _unload(self, rank: _Rank, *, keys: Sequence[str], **_: Any) -> None:
        for key in keys:
            rank.jobs.pop(key, None)

    def _place(self, _rank: _Rank, **_: Any) -> str:
        return "5eed5eed5eed"

    def _build(self, rank: _Rank, *, job: str, **_: Any) -> float:
        rank.jobs[job] = 0
        return rank.lr

    def _job(self, rank: _Rank, job: str, step: int | None) -> int:
        if job not in rank.jobs:
            raise Refused(f"no job {job} on this engine; it was released")
        if step is not None and rank.jobs[job] != step:
            raise Refused(f"the job stands at step {rank.jobs[job]}, the call is for step {step}")
        return rank.jobs[job]

    def _advance(
        self, rank: _Rank, *, job: str, step: int, steps: int, lr: float | None, **_: Any
    ) -> tuple[Advance, list[Any]]:
        self._job(rank, job, step)
        rank.lr = rank.lr if lr is None else lr
        stop, ended, loss = step + steps, "done", None
        if self._slow and (limit := self._slow[rank.number]) and limit < steps:
            stop, ended, self._slow[rank.number] = step + limit, "time", 0
        bad = next((s for s in range(step, stop) if rank.number in self._nonfinite.get(s, ((), set()))[1]), None)
        if bad is not None:
            stop, ended, loss = bad, "nonfinite", float("nan" if rank.number in self._nonfinite[bad][0] else 1)
            if bad not in self._nonfinite_for_ever:
                self._nonfinite[bad][1].discard(rank.number)
        rank.jobs[job] = stop
        return Advance(self._rows(rank, step, stop), stop, rank.lr, ended, loss), []

    def _rows(self, rank: _Rank, start: int, stop: int) -> np.ndarray:
        rows = np.zeros(stop - start, ROW)
        rows["step"], rows["rank"], rows["lr"] = np.arange(start, stop), rank.number, rank.lr
        rows["samples"], rows["weight"], rows["step_s"] = 8, 8, self.step_s
        rows["loss"] = 1 / (1 + rows["step"])
        return rows

    def _state(self, rank: _Rank, *, job: str, **_: Any) -> Shipment | None:
        step = self._job(rank, job, None)
        return ship(wire.pack({"step": step}), None) if rank.number == 0 else None

    def _evaluate(
        self, rank: _Rank, *, job: str, step: int | None = None, **_: Any
    ) -> tuple[int, dict[str, tuple[float, float]]]:
        self._job(rank, job, step)
        return 4, {"loss": (2.0, 4.0)}

    def _call(
        self, rank: _Rank, *, shipment: Shipment, listen: Callable[[int, list[Any]], None] | None, **_: Any
    ) -> tuple[Shipment, list[Any]]:
        fn, args, kwargs = shipment.unload()
        items = [("text", f"called on rank {rank.number}")]
        if listen is not None:
            listen(0, items)
        return ship(wire.pack(fn(*args, **kwargs)), None), items

    def _open_store(self, _rank: _Rank, **_: Any) -> int:
        return 1
