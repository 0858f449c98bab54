"""A public double of the engine processes, so that what stands above them can be tested without any.

It stands where ipyparallel stands: at the :class:`~dtkit.rpc.transport.Transport`. One thread per rank serves requests
in order, as an engine does, and refuses what a real one refuses; what a rank computes is made up.

    engines = FakeTransport(2)
    cluster = dtkit.Cluster.over(engines, device="cpu")
    engines.fail(rank=1, op="advance", error=RuntimeError("no forward here"), at_step=7)
    run = cluster.train(...)            # fails as on real engines: rank 1 is the cause, rank 0 its victim

What a test says of the future (`fail`, `nonfinite`, `slow_after`) is best said before the calls it concerns are sent,
or while they are held: a rank that has answered already can't take part.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import queue
import threading
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util.guard import contain
from dtkit.engine.node_info import get_handshake
from dtkit.errors import Refused
from dtkit.history.history import ROW_DTYPE
from dtkit.planning.cost_model import StepTimings
from dtkit.rpc import pickling
from dtkit.rpc.payload import Shipment, ship
from dtkit.types import Advance, Failure, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.rpc.shared_memory import Owner
    from dtkit.types import JobPlan

HELD_S, PEER_S = 600.0, 5.0  # no wait is for ever: of a held call, and of one rank for another
_LOST_PEER = "Connection closed by peer"


@dataclasses.dataclass
class _Job:
    """Where a pretended job stands, and what its rows are made of."""

    model: str
    samples: int
    steps_per_epoch: int
    step: int = 0


@dataclasses.dataclass
class _Rank:
    """What one pretended engine holds."""

    number: int
    owner: int = 0
    keeper: Owner | None = None
    generation: int = -1
    broken: bool = False
    lost: bool = False
    lr: float = 0.1
    jobs: dict[str, _Job] = dataclasses.field(default_factory=dict)
    models: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)  # of each data set
    said: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    inbox: queue.SimpleQueue[Any] = dataclasses.field(default_factory=queue.SimpleQueue)
    sent: int = 0
    cut: int = 0  # calls up to this one are held no longer: the rank was interrupted, or is gone


@dataclasses.dataclass
class _Fault:
    """A failure to come: of one rank, in one call; the others meet it in the same generation."""

    rank: int
    op: str
    error: BaseException
    at_step: int | None
    passes: list[int]  # by rank: such calls that go well before it
    generation: int | None = None

    def strikes(self, rank: _Rank, request: Request) -> bool:
        args: dict[str, Any] = request.args
        if request.op != self.op or self.generation not in (None, rank.generation):
            return False
        if self.op == "handshake" and rank.number != self.rank:  # asked before there is a group
            return False
        if self.at_step is not None and not args["step"] <= self.at_step < args["step"] + args["steps"]:
            return False
        self.passes[rank.number] -= 1
        if self.passes[rank.number] != -1:
            return False
        self.generation = rank.generation
        return True


class FakeTransport:
    """`world_size` pretended engines, whose ids are 10, 11, ...

    ``served`` lists (rank, op, args) as they were served, ``interrupted`` the ranks that were interrupted. `step_s`
    is what a step is said to take; nothing sleeps. ``hello[rank]`` overrides what that engine says of itself, as in
    ``engines.hello[1]["torch"] = "1.0"``.
    """

    def __init__(self, world_size: int = 2, *, step_s: float = 0.05) -> None:
        self.engine_ids: Sequence[int] = range(10, 10 + world_size)  # engine ids are no ranks
        self.step_s = step_s
        self.memory_free = 5_000_000_000  # bytes that all these engines share
        self.served: list[tuple[int, str, dict[str, Any]]] = []
        self.interrupted: list[int] = []
        self.hello: list[dict[str, Any]] = [{} for _ in range(world_size)]
        self._ranks = [_Rank(number) for number in range(world_size)]
        # locks: for a few assignments
        self._gate = threading.Condition()  # guards what a test says, and the ranks' counts of calls
        self._open, self._closed = True, False
        self._faults: list[_Fault] = []
        self._nonfinite: dict[int, tuple[Sequence[int], set[int], bool]] = {}
        self._slow = [0] * world_size
        self._arrived: dict[str, Future[Any]] = {}  # the data plane: what rank 0 broadcasts
        self._threads: list[threading.Thread] = []
        for rank in self._ranks:
            self._start(rank)

    # -- what a test says -------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Serve nothing until `let_go`."""
        with self._gate:
            self._open = False

    def let_go(self) -> None:
        """Serve again."""
        with self._gate:
            self._open = True
            self._gate.notify_all()

    def fail(self, rank: int, op: str, error: BaseException, *, at_step: int | None = None, after: int = 0) -> None:
        """Have that rank fail at the next `op`, and the others with it as its victims; the group is then broken.

        `at_step`: at the dispatch that reaches this step, whose steps before it are done. `after`: so many such calls
        go well first.
        """
        if at_step is not None and op != "advance":
            raise ValueError(f"fail(op={op!r}, at_step={at_step}): only op='advance' has steps; leave at_step out")
        with self._gate:
            self._faults.append(_Fault(rank, op, error, at_step, [after] * len(self._ranks)))

    def nonfinite(self, step: int, ranks: Sequence[int], *, always: bool = False) -> None:
        """Have the gradients of that step be NaN, with the loss NaN on `ranks`; once, unless `always`."""
        self._nonfinite[step] = ranks, set(range(len(self._ranks))), always

    def slow_after(self, steps: int) -> None:
        """Have the next dispatch of more steps end early, as when steps have become slow."""
        self._slow = [steps] * len(self._ranks)

    def say(self, rank: int, *items: tuple[str, Any]) -> None:
        """Have the rank's next advance or call say this: ("text", line) or ("row", {name: number}), live and after."""
        self._ranks[rank].said = [*self._ranks[rank].said, *items]

    def lose(self, rank: int) -> None:
        """End that engine's process: it answers nothing any more, what is held included."""
        self._ranks[rank].lost = True
        self._cut([rank])

    # -- the transport ----------------------------------------------------------------------------------------

    def send(self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None) -> Future[Reply]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        future: Future[Reply] = Future()
        engine = self._ranks[rank]
        with self._gate:
            if self._closed:
                future.set_result(_lost(engine))
            else:
                engine.sent += 1
                engine.inbox.put((engine.sent, message, listen, future))
        return future

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:  # noqa: ARG002 - none is ever stopped
        """Note who was interrupted. The first call that is held there ends with KeyboardInterrupt."""
        self.interrupted += ranks
        if not self._open:
            self._cut(ranks)

    def check_reachable(self) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""

    def lost(self) -> list[int]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        return [rank.number for rank in self._ranks if rank.lost]

    def kill(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        for rank in ranks:
            self.lose(rank)

    def replace(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        for rank in ranks:
            old, self._ranks[rank] = self._ranks[rank], _Rank(rank)
            old.inbox.put(None)
            self._start(self._ranks[rank])

    def drop(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        kept = [rank for rank in self._ranks if rank.number not in ranks]
        self.engine_ids = [self.engine_ids[rank.number] for rank in kept]
        for number, rank in enumerate(kept):
            rank.number = number
        self._ranks = kept

    def _start(self, rank: _Rank) -> None:
        thread = threading.Thread(target=self._serve, args=(rank,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _cut(self, ranks: Sequence[int]) -> None:
        with self._gate:
            for rank in ranks:
                self._ranks[rank].cut = self._ranks[rank].sent
            self._gate.notify_all()

    def close(self) -> None:
        """Serve what is held, and end the threads. Idempotent."""
        self.let_go()
        with self._gate:
            self._closed = True
        for rank in self._ranks:
            rank.inbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    # -- an engine --------------------------------------------------------------------------------------------

    def _serve(self, rank: _Rank) -> None:
        # waits: a fake engine's daemon thread waits for work until `close`
        while (item := rank.inbox.get()) is not None:
            number, message, listen, future = item
            self._await_turn(rank, number)
            answer = functools.partial(self._answer, rank, message, listen, interrupted=number <= rank.cut)
            future.set_result(contain(answer, functools.partial(_failed, rank)))  # as on an engine

    def _await_turn(self, rank: _Rank, number: int) -> None:
        with self._gate:
            self._gate.wait_for(lambda: self._open or number <= rank.cut, timeout=HELD_S)

    def _answer(self, rank: _Rank, message: bytes, listen: Any, *, interrupted: bool) -> Reply:
        # unpickles: made in the same process
        request: Request = pickle.loads(message)
        self.served.append((rank.number, request.op, request.args))
        if rank.lost:
            return _lost(rank)
        self._admit(rank, request)
        if interrupted and not rank.broken:
            return _failed(rank, KeyboardInterrupt())
        if (fault := self._fault(rank, request)) is not None:
            return self._fail_together(rank, request, fault)
        return Reply(getattr(self, f"_{request.op}")(rank, listen=listen, **request.args))

    def _admit(self, rank: _Rank, request: Request) -> None:
        if request.op in ("handshake", "join_group"):
            return
        if request.owner != rank.owner:
            raise Refused(f"this engine belongs to owner {rank.owner}, the call came from owner {request.owner}")
        if request.generation != rank.generation:
            raise Refused(f"the group is at generation {rank.generation}, the call is for {request.generation}")
        if rank.broken and request.op not in ("job_status", "export_state"):
            raise Refused("the process group is not formed: an error broke it up")
        if "job" in request.args and request.op not in ("build_job", "rebuild_job"):
            self._stands(rank, str(request.args["job"]), request.args.get("step"))

    def _stands(self, rank: _Rank, job: str, step: object) -> None:
        if job not in rank.jobs:
            raise Refused(f"no job {job} on this engine; it was released")
        if step not in (None, rank.jobs[job].step):
            raise Refused(f"the job stands at step {rank.jobs[job].step}, the call is for step {step}")

    def _fault(self, rank: _Rank, request: Request) -> _Fault | None:
        with self._gate:
            return next((fault for fault in self._faults if fault.strikes(rank, request)), None)

    def _fail_together(self, rank: _Rank, request: Request, fault: _Fault) -> Reply:
        """The rank with its error, another with the loss of its peer; with what was done and said until then."""
        done: Any = None
        if request.op == "advance":
            args: dict[str, Any] = request.args
            steps = 0 if fault.at_step is None else fault.at_step - args["step"]
            done = self._advance(rank, **{**args, "steps": steps})
        elif request.op == "call_function":
            done = None, self._say(rank, None)
        error = fault.error if rank.number == fault.rank else RuntimeError(_LOST_PEER)
        return dataclasses.replace(_failed(rank, error, fault.at_step), value=done)

    def _receive(self, rank: _Rank, key: str, shipment: Shipment, *, broadcast: bool) -> Any:
        """Unpack; or, as by a broadcast, have rank 0 unpack for all."""
        if not broadcast:
            return shipment.unload()
        arrived = self._arrived.setdefault(key, Future())
        if rank.number == 0:
            try:
                arrived.set_result(shipment.unload())
            except BaseException as error:
                arrived.set_exception(error)
                raise
        try:
            return arrived.result(PEER_S)
        except TimeoutError:
            raise RuntimeError(_LOST_PEER) from None

    def _say(self, rank: _Rank, listen: Callable[[int, list[Any]], None] | None) -> list[tuple[str, Any]]:
        items, rank.said = rank.said, []
        if listen is not None and items:
            listen(0, items)
        return items

    # -- what it serves: the operations of dtkit.engine.session ------------------------------------------------

    def _hello(self, rank: _Rank, **_: Any) -> dict[str, Any]:
        return {**get_handshake(), **self.hello[rank.number]}

    def _join(
        self, rank: _Rank, *, owner: int, spec: Any, keeper: Owner | None = None, others: bool = False, **_: Any
    ) -> dict[str, Any]:
        if owner < rank.owner:
            raise Refused(f"owner {owner} was superseded by owner {rank.owner}: another notebook attached meanwhile")
        if owner != rank.owner:
            self._forget(rank)
        if others:
            rank.jobs.clear()
        rank.owner, rank.keeper, rank.generation, rank.broken = owner, keeper, spec.generation, False
        return self._info(rank)

    def _leave(self, rank: _Rank, **_: Any) -> None:
        rank.generation = -1
        self._forget(rank)

    def _forget(self, rank: _Rank) -> None:
        for kept in (rank.jobs, rank.models, rank.rows):
            kept.clear()

    def _info(self, rank: _Rank, **_: Any) -> dict[str, Any]:
        memory = {"memory_total": 8_000_000_000, "memory_free": self.memory_free}
        return {"host": "fake", "pid": 4000 + rank.number, "device": "cpu", "threads": 1, **memory}

    def _clock(self, _rank: _Rank, **_: Any) -> list[float]:
        return [0.0]

    def _warm(self, _rank: _Rank, **_: Any) -> None:
        return None

    def _load(self, rank: _Rank, *, key: str, shipment: Shipment, sizes: Any, broadcast: bool = False, **_: Any) -> int:
        loaded = self._receive(rank, key, shipment, broadcast=broadcast)
        data = loaded() if sizes is None else loaded[0]  # with sizes: (data, all shards' rows)
        rank.rows[key] = len(data[0] if isinstance(data, (tuple, list)) else data)
        return rank.rows[key]

    def _shard(self, rank: _Rank, *, key: str, sizes: Sequence[int], **_: Any) -> None:
        rank.rows[key] = sum(sizes)

    def _unload(self, rank: _Rank, *, keys: Sequence[str], **_: Any) -> None:
        for key in keys:
            for kept in (rank.jobs, rank.models, rank.rows, self._arrived):
                kept.pop(key, None)

    def _keep(self, rank: _Rank, *, key: str, shipment: Shipment, **_: Any) -> None:
        rank.models[key] = shipment.unload()

    def _place(self, rank: _Rank, *, key: str, shipment: Shipment, broadcast: bool = False, **_: Any) -> str:
        from dtkit.engine.session import compute_model_checksum

        rank.models[key] = self._receive(rank, key, shipment, broadcast=broadcast)
        return compute_model_checksum(rank.models[key])

    def _build(self, rank: _Rank, *, job: str, model: str, data: str, plan: JobPlan, **_: Any) -> float:
        share, rest = divmod(plan.batch_size, len(self._ranks))
        steps_per_epoch = -(-rank.rows[data] // plan.batch_size)
        rank.jobs[job] = _Job(model, share + (rank.number < rest), steps_per_epoch)
        return rank.lr

    def _standing(self, rank: _Rank, *, job: str, **_: Any) -> tuple[int, bool, float]:
        return rank.jobs[job].step, True, rank.lr

    def _rescue(self, rank: _Rank, *, job: str, **_: Any) -> Shipment:
        return ship(pickling.pack((rank.jobs[job].step, rank.lr)), rank.keeper)

    def _revive(self, rank: _Rank, *, job: str, shipments: Sequence[Shipment], **order: Any) -> tuple[int, float]:
        self._build(rank, job=job, **order)
        rank.jobs[job].step, rank.lr = shipments[0].unload()
        return rank.jobs[job].step, rank.lr

    def _hand_over(self, rank: _Rank, **_: Any) -> Shipment:
        return ship(pickling.pack((rank.models, rank.rows)), rank.keeper)

    def _take_over(self, rank: _Rank, *, shipment: Shipment, **_: Any) -> None:
        rank.models, rank.rows = shipment.unload()

    def _redeal(self, _rank: _Rank, **_: Any) -> None:
        return None

    def _advance(self, rank: _Rank, *, job: str, step: int, steps: int, lr: Any = None, **_: Any) -> Any:
        found = rank.jobs[job]
        rank.lr = rank.lr if lr is None else lr
        stop, ended, loss = step + steps, "done", None
        if 0 < self._slow[rank.number] < steps:
            stop, ended, self._slow[rank.number] = step + self._slow[rank.number], "time", 0
        bad = next((s for s in range(step, stop) if rank.number in self._nonfinite.get(s, ((), ()))[1]), None)
        if bad is not None:
            ranks, waiting, always = self._nonfinite[bad]
            stop, ended, loss = bad, "nonfinite", float("nan" if rank.number in ranks else 1)
            if not always:
                waiting.discard(rank.number)
        found.step = stop
        return Advance(self._rows(rank, found, step, stop), stop, rank.lr, ended, loss), self._say(rank, None)

    def _rows(self, rank: _Rank, job: _Job, start: int, stop: int) -> np.ndarray:
        rows = np.zeros(stop - start, ROW_DTYPE)
        rows["step"], rows["rank"], rows["lr"] = np.arange(start, stop), rank.number, rank.lr
        rows["epoch"] = rows["step"] // job.steps_per_epoch
        rows["samples"] = rows["weight"] = job.samples
        rows["loss"] = 1 / (1 + rows["step"])
        rows["step_s"], rows["memory_bytes"] = self.step_s, 300_000_000
        return rows

    def _state(self, rank: _Rank, *, job: str, **_: Any) -> Shipment | None:
        state = dict(rank.models[rank.jobs[job].model].state_dict())  # as it was placed: nothing was trained
        return ship(pickling.pack(state), rank.keeper) if rank.number == 0 else None

    def _gradients(self, rank: _Rank, **_: Any) -> Shipment:
        return ship(pickling.pack({}), rank.keeper)

    def _evaluate(self, _rank: _Rank, **_: Any) -> tuple[int, dict[str, tuple[float, float]]]:
        return 4, {"loss": (2.0, 4.0)}

    def _measure(self, rank: _Rank, *, what: str, **args: Any) -> Any:
        """Made up, except for sizes: those are told from the model's shapes, as on an engine."""
        import torch

        from dtkit.engine import benchmark, memory

        args.pop("listen")
        if what == "room":
            return memory.AvailableMemory(self.memory_free, 0, 0, None)
        if what == "links":
            others = range(rank.number + 1, len(self._ranks))
            return benchmark.LinkSpeeds(50e9, [(8, 1e-4), (2**20, 1e-3)], dict.fromkeys(others, (5e-5, 1e9)), 0.5)
        if what == "times":
            return StepTimings([(1, 0.001, 0.002), (args["rows"], 0.001 * args["rows"], 0.002 * args["rows"])], 0.001)
        seat: Any = benchmark.BenchmarkContext(None, torch.device("cpu"), rank.models, {})  # type: ignore[arg-type]  # no collective
        nothing: Any = None if what == "layers" else []
        return benchmark.run_benchmark(seat, what, **args) if what == "sizes" else (nothing, "a double has no data")

    def _call(self, rank: _Rank, *, shipment: Shipment, listen: Any, port: int | None = None, **_: Any) -> Any:
        fn, args, kwargs = shipment.unload()
        rank.broken = port is not None  # a script's own group takes ours' place, until it is formed anew
        items = self._say(rank, listen)
        return ship(pickling.pack(fn(*args, **kwargs), name="the function's result"), rank.keeper), items

    def _open_store(self, _rank: _Rank, **_: Any) -> int:
        return 1


def _lost(rank: _Rank) -> Reply:
    return Reply(failure=Failure(rank.number, "?", "EngineLost", "its process has ended", "", kind="lost"))


def _failed(rank: _Rank, error: BaseException, step: int | None = None) -> Reply:
    """The error as an engine reports it; one that isn't a refusal breaks the group up."""
    kind = {Refused: "refused", KeyboardInterrupt: "interrupted"}.get(type(error), "error")
    rank.broken = rank.broken or kind != "refused"
    trace = "".join(traceback.format_exception(error))
    name, victim = type(error).__name__, str(error) == _LOST_PEER
    return Reply(failure=Failure(rank.number, "fake", name, str(error), trace, step, victim, kind))
