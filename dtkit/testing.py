"""A public double of the engine processes, so that what stands above them can be tested without any.

It stands where ipyparallel stands: at the :class:`~dtkit.rpc.transport.Transport`. One thread per rank serves requests
in order, as an engine does, and refuses what a real one refuses; what a rank computes is made up.

    engines = FakeTransport(2)
    cluster = dtkit.Cluster.over(engines, device="cpu")
    engines.fail(rank=1, op="advance", error=RuntimeError("no forward here"), at_step=7)
    run = cluster.train(...)            # fails as on real engines: rank 1 is the cause, rank 0 its victim

What a test says of the future (`fail`, `nonfinite`, `end_early_after`) is best said before the calls it concerns are
sent, or while they are held: a rank that has answered already can't take part.
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

from dtkit._util.guard import run_guarded_in_thread
from dtkit.engine.node_info import get_handshake
from dtkit.errors import RefusedError
from dtkit.history.history import ROW_DTYPE
from dtkit.planning.cost_model import StepTimings
from dtkit.rpc import pickling
from dtkit.rpc.payload import Payload, make_payload
from dtkit.types import DispatchResult, Failure, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.rpc.shared_memory import ProcessId
    from dtkit.types import JobPlan

HELD_CALL_TIMEOUT_S, PEER_TIMEOUT_S = 600.0, 5.0  # no wait is for ever: of a held call, and of one rank for another
_LOST_PEER = "Connection closed by peer"


@dataclasses.dataclass
class _FakeJob:
    """Where a pretended job stands, and what its rows are made of."""

    model: str
    samples: int
    steps_per_epoch: int
    step: int = 0


@dataclasses.dataclass
class _FakeRank:
    """What one pretended engine holds."""

    number: int
    owner: int = 0
    file_owner: ProcessId | None = None
    generation: int = -1
    is_broken: bool = False
    is_lost: bool = False
    lr: float = 0.1
    jobs: dict[str, _FakeJob] = dataclasses.field(default_factory=dict)
    models: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_rows: dict[str, int] = dataclasses.field(default_factory=dict)  # of each data set
    pending_output: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    inbox: queue.SimpleQueue[Any] = dataclasses.field(default_factory=queue.SimpleQueue)
    num_sent: int = 0
    canceled_until: int = 0  # calls up to this one are held no longer: the rank was interrupted, or is gone


@dataclasses.dataclass
class _Fault:
    """A failure to come: of one rank, in one call; the others meet it in the same generation."""

    rank: int
    op: str
    error: BaseException
    at_step: int | None
    remaining_successes: list[int]  # by rank: such calls that go well before it
    generation: int | None = None

    def take_if_due(self, rank: _FakeRank, request: Request) -> bool:
        args: dict[str, Any] = request.args
        if request.op != self.op or self.generation not in (None, rank.generation):
            return False
        if self.op == "handshake" and rank.number != self.rank:  # asked before there is a group
            return False
        if self.at_step is not None and not args["step"] <= self.at_step < args["step"] + args["steps"]:
            return False
        self.remaining_successes[rank.number] -= 1
        if self.remaining_successes[rank.number] != -1:
            return False
        self.generation = rank.generation
        return True


class FakeTransport:
    """`world_size` pretended engines, whose ids are 10, 11, ...

    ``served_requests`` lists (rank, op, args) as they were served, ``interrupted`` the ranks that were interrupted.
    `step_s` is what a step is said to take; nothing sleeps. ``hello[rank]`` overrides what that engine says of itself,
    as in ``engines.hello[1]["torch"] = "1.0"``.
    """

    def __init__(self, world_size: int = 2, *, step_s: float = 0.05) -> None:
        self.engine_ids: Sequence[int] = range(10, 10 + world_size)  # engine ids are no ranks
        self.step_s = step_s
        self.memory_free = 5_000_000_000  # bytes that all these engines share
        self.served_requests: list[tuple[int, str, dict[str, Any]]] = []
        self.interrupted_ranks: list[int] = []
        self.handshake_overrides: list[dict[str, Any]] = [{} for _ in range(world_size)]
        self._ranks = [_FakeRank(number) for number in range(world_size)]
        # locks: for a few assignments
        self._condition = threading.Condition()  # guards what a test says, and the ranks' counts of calls
        self._is_open, self._is_closed = True, False
        self._faults: list[_Fault] = []
        self._nonfinite_steps: dict[int, tuple[Sequence[int], set[int], bool]] = {}
        self._end_early_after = [0] * world_size
        self._broadcasts: dict[str, Future[Any]] = {}  # the data plane: what rank 0 broadcasts
        self._threads: list[threading.Thread] = []
        for rank in self._ranks:
            self._start(rank)

    # -- what a test says -------------------------------------------------------------------------------------

    def hold_requests(self) -> None:
        """Serve nothing until `let_go`."""
        with self._condition:
            self._is_open = False

    def release_requests(self) -> None:
        """Serve again."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def inject_failure(
        self, rank: int, op: str, error: BaseException, *, at_step: int | None = None, after: int = 0
    ) -> None:
        """Have that rank fail at the next `op`, and the others with it as its victims; the group is then broken.

        `at_step`: at the dispatch that reaches this step, whose steps before it are done. `after`: so many such calls
        go well first.
        """
        if at_step is not None and op != "advance":
            raise ValueError(f"fail(op={op!r}, at_step={at_step}): only op='advance' has steps; leave at_step out")
        with self._condition:
            self._faults.append(_Fault(rank, op, error, at_step, [after] * len(self._ranks)))

    def inject_nonfinite(self, step: int, ranks: Sequence[int], *, always: bool = False) -> None:
        """Have the gradients of that step be NaN, with the loss NaN on `ranks`; once, unless `always`."""
        self._nonfinite_steps[step] = ranks, set(range(len(self._ranks))), always

    def end_early_after(self, steps: int) -> None:
        """Have the next dispatch of more steps end early, as when steps have become slow."""
        self._end_early_after = [steps] * len(self._ranks)

    def queue_output(self, rank: int, *items: tuple[str, Any]) -> None:
        """Have the rank's next advance or call say this: ("text", line) or ("row", {name: number}), live and after."""
        self._ranks[rank].pending_output = [*self._ranks[rank].pending_output, *items]

    def end_engine(self, rank: int) -> None:
        """End that engine's process: it answers nothing any more, what is held included."""
        self._ranks[rank].is_lost = True
        self._cancel_held([rank])

    # -- the transport ----------------------------------------------------------------------------------------

    def send(self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None) -> Future[Reply]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        future: Future[Reply] = Future()
        engine = self._ranks[rank]
        with self._condition:
            if self._is_closed:
                future.set_result(_make_lost_reply(engine))
            else:
                engine.num_sent += 1
                engine.inbox.put((engine.num_sent, message, listen, future))
        return future

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:  # noqa: ARG002 - none is ever stopped
        """Note who was interrupted. The first call that is held there ends with KeyboardInterrupt."""
        self.interrupted_ranks += ranks
        if not self._is_open:
            self._cancel_held(ranks)

    def check_reachable(self) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""

    def find_lost_ranks(self) -> list[int]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        return [rank.number for rank in self._ranks if rank.is_lost]

    def kill(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        for rank in ranks:
            self.end_engine(rank)

    def replace(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        for rank in ranks:
            old, self._ranks[rank] = self._ranks[rank], _FakeRank(rank)
            old.inbox.put(None)
            self._start(self._ranks[rank])

    def drop(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        kept = [rank for rank in self._ranks if rank.number not in ranks]
        self.engine_ids = [self.engine_ids[rank.number] for rank in kept]
        for number, rank in enumerate(kept):
            rank.number = number
        self._ranks = kept

    def _start(self, rank: _FakeRank) -> None:
        thread = threading.Thread(target=self._serve, args=(rank,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _cancel_held(self, ranks: Sequence[int]) -> None:
        with self._condition:
            for rank in ranks:
                self._ranks[rank].canceled_until = self._ranks[rank].num_sent
            self._condition.notify_all()

    def close(self) -> None:
        """Serve what is held, and end the threads. Idempotent."""
        self.release_requests()
        with self._condition:
            self._is_closed = True
        for rank in self._ranks:
            rank.inbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    # -- an engine --------------------------------------------------------------------------------------------

    def _serve(self, rank: _FakeRank) -> None:
        # waits: a fake engine's daemon thread waits for work until `close`
        while (item := rank.inbox.get()) is not None:
            number, message, listen, future = item
            self._await_turn(rank, number)
            answer = functools.partial(self._answer, rank, message, listen, interrupted=number <= rank.canceled_until)
            future.set_result(
                run_guarded_in_thread(answer, functools.partial(_make_failure_reply, rank))
            )  # as on an engine

    def _await_turn(self, rank: _FakeRank, number: int) -> None:
        with self._condition:
            self._condition.wait_for(
                lambda: self._is_open or number <= rank.canceled_until, timeout=HELD_CALL_TIMEOUT_S
            )

    def _answer(self, rank: _FakeRank, message: bytes, listen: Any, *, interrupted: bool) -> Reply:
        # unpickles: made in the same process
        request: Request = pickle.loads(message)
        self.served_requests.append((rank.number, request.op, request.args))
        if rank.is_lost:
            return _make_lost_reply(rank)
        self._check_request(rank, request)
        if interrupted and not rank.is_broken:
            return _make_failure_reply(rank, KeyboardInterrupt())
        if (fault := self._find_fault(rank, request)) is not None:
            return self._fail_together(rank, request, fault)
        return Reply(getattr(self, f"_{request.op}")(rank, listen=listen, **request.args))

    def _check_request(self, rank: _FakeRank, request: Request) -> None:
        if request.op in ("handshake", "join_group"):
            return
        if request.owner_id != rank.owner:
            raise RefusedError(
                f"this engine belongs to owner {rank.owner}, the call came from owner {request.owner_id}"
            )
        if request.generation != rank.generation:
            raise RefusedError(f"the group is at generation {rank.generation}, the call is for {request.generation}")
        if rank.is_broken and request.op not in ("job_status", "export_state"):
            raise RefusedError("the process group is not formed: an error broke it up")
        if "job" in request.args and request.op not in ("build_job", "rebuild_job"):
            self._check_job_position(rank, str(request.args["job"]), request.args.get("step"))

    def _check_job_position(self, rank: _FakeRank, job: str, step: object) -> None:
        if job not in rank.jobs:
            raise RefusedError(f"no job {job} on this engine; it was released")
        if step not in (None, rank.jobs[job].step):
            raise RefusedError(f"the job stands at step {rank.jobs[job].step}, the call is for step {step}")

    def _find_fault(self, rank: _FakeRank, request: Request) -> _Fault | None:
        with self._condition:
            return next((fault for fault in self._faults if fault.take_if_due(rank, request)), None)

    def _fail_together(self, rank: _FakeRank, request: Request, fault: _Fault) -> Reply:
        """The rank with its error, another with the loss of its peer; with what was done and said until then."""
        done: Any = None
        if request.op == "advance":
            args: dict[str, Any] = request.args
            steps = 0 if fault.at_step is None else fault.at_step - args["step"]
            done = self._advance(rank, **{**args, "steps": steps})
        elif request.op == "call_function":
            done = None, self._publish_output(rank, None)
        error = fault.error if rank.number == fault.rank else RuntimeError(_LOST_PEER)
        return dataclasses.replace(_make_failure_reply(rank, error, fault.at_step), value=done)

    def _load_payload(self, rank: _FakeRank, key: str, payload: Payload, *, broadcast: bool) -> Any:
        """Unpack; or, as by a broadcast, have rank 0 unpack for all."""
        if not broadcast:
            return payload.load()
        arrived = self._broadcasts.setdefault(key, Future())
        if rank.number == 0:
            try:
                arrived.set_result(payload.load())
            except BaseException as error:
                arrived.set_exception(error)
                raise
        try:
            return arrived.result(PEER_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(_LOST_PEER) from None

    def _publish_output(
        self, rank: _FakeRank, listen: Callable[[int, list[Any]], None] | None
    ) -> list[tuple[str, Any]]:
        items, rank.pending_output = rank.pending_output, []
        if listen is not None and items:
            listen(0, items)
        return items

    # -- what it serves: the operations of dtkit.engine.session ------------------------------------------------

    def _handshake(self, rank: _FakeRank, **_: Any) -> dict[str, Any]:
        return {**get_handshake(), **self.handshake_overrides[rank.number]}

    def _join_group(
        self, rank: _FakeRank, *, owner: int, spec: Any, keeper: ProcessId | None = None, others: bool = False, **_: Any
    ) -> dict[str, Any]:
        if owner < rank.owner:
            raise RefusedError(
                f"owner {owner} was superseded by owner {rank.owner}: another notebook attached meanwhile"
            )
        if owner != rank.owner:
            self._clear_state(rank)
        if others:
            rank.jobs.clear()
        rank.owner, rank.file_owner, rank.generation, rank.is_broken = owner, keeper, spec.generation, False
        return self._node_info(rank)

    def _leave_group(self, rank: _FakeRank, **_: Any) -> None:
        rank.generation = -1
        self._clear_state(rank)

    def _clear_state(self, rank: _FakeRank) -> None:
        for kept in (rank.jobs, rank.models, rank.num_rows):
            kept.clear()

    def _node_info(self, rank: _FakeRank, **_: Any) -> dict[str, Any]:
        memory = {"memory_total": 8_000_000_000, "memory_free": self.memory_free}
        return {"host": "fake", "pid": 4000 + rank.number, "device": "cpu", "threads": 1, **memory}

    def _read_clock(self, _rank: _FakeRank, **_: Any) -> list[float]:
        return [0.0]

    def _warm_up(self, _rank: _FakeRank, **_: Any) -> None:
        return None

    def _load_data(
        self, rank: _FakeRank, *, key: str, shipment: Payload, sizes: Any, broadcast: bool = False, **_: Any
    ) -> int:
        loaded = self._load_payload(rank, key, shipment, broadcast=broadcast)
        data = loaded() if sizes is None else loaded[0]  # with sizes: (data, all shards' rows)
        rank.num_rows[key] = len(data[0] if isinstance(data, (tuple, list)) else data)
        return rank.num_rows[key]

    def _set_shards(self, rank: _FakeRank, *, key: str, sizes: Sequence[int], **_: Any) -> None:
        rank.num_rows[key] = sum(sizes)

    def _release(self, rank: _FakeRank, *, keys: Sequence[str], **_: Any) -> None:
        for key in keys:
            for kept in (rank.jobs, rank.models, rank.num_rows, self._broadcasts):
                kept.pop(key, None)

    def _store_model(self, rank: _FakeRank, *, key: str, shipment: Payload, **_: Any) -> None:
        rank.models[key] = shipment.load()

    def _receive_model(self, rank: _FakeRank, *, key: str, shipment: Payload, broadcast: bool = False, **_: Any) -> str:
        from dtkit.engine.session import compute_model_checksum

        rank.models[key] = self._load_payload(rank, key, shipment, broadcast=broadcast)
        return compute_model_checksum(rank.models[key])

    def _build_job(self, rank: _FakeRank, *, job: str, model: str, data: str, plan: JobPlan, **_: Any) -> float:
        share, rest = divmod(plan.batch_size, len(self._ranks))
        steps_per_epoch = -(-rank.num_rows[data] // plan.batch_size)
        rank.jobs[job] = _FakeJob(model, share + (rank.number < rest), steps_per_epoch)
        return rank.lr

    def _job_status(self, rank: _FakeRank, *, job: str, **_: Any) -> tuple[int, bool, float]:
        return rank.jobs[job].step, True, rank.lr

    def _export_state(self, rank: _FakeRank, *, job: str, **_: Any) -> Payload:
        return make_payload(pickling.pack_object((rank.jobs[job].step, rank.lr)), rank.file_owner)

    def _rebuild_job(
        self, rank: _FakeRank, *, job: str, shipments: Sequence[Payload], **order: Any
    ) -> tuple[int, float]:
        self._build_job(rank, job=job, **order)
        rank.jobs[job].step, rank.lr = shipments[0].load()
        return rank.jobs[job].step, rank.lr

    def _export_data(self, rank: _FakeRank, **_: Any) -> Payload:
        return make_payload(pickling.pack_object((rank.models, rank.num_rows)), rank.file_owner)

    def _import_data(self, rank: _FakeRank, *, shipment: Payload, **_: Any) -> None:
        rank.models, rank.num_rows = shipment.load()

    def _repartition(self, _rank: _FakeRank, **_: Any) -> None:
        return None

    def _advance(self, rank: _FakeRank, *, job: str, step: int, steps: int, lr: Any = None, **_: Any) -> Any:
        found = rank.jobs[job]
        rank.lr = rank.lr if lr is None else lr
        stop, ended, loss = step + steps, "done", None
        if 0 < self._end_early_after[rank.number] < steps:
            stop, ended, self._end_early_after[rank.number] = step + self._end_early_after[rank.number], "time", 0
        bad = next((s for s in range(step, stop) if rank.number in self._nonfinite_steps.get(s, ((), ()))[1]), None)
        if bad is not None:
            ranks, waiting, always = self._nonfinite_steps[bad]
            stop, ended, loss = bad, "nonfinite", float("nan" if rank.number in ranks else 1)
            if not always:
                waiting.discard(rank.number)
        found.step = stop
        return DispatchResult(
            self._build_rows(rank, found, step, stop), stop, rank.lr, ended, loss
        ), self._publish_output(rank, None)

    def _build_rows(self, rank: _FakeRank, job: _FakeJob, start: int, stop: int) -> np.ndarray:
        rows = np.zeros(stop - start, ROW_DTYPE)
        rows["step"], rows["rank"], rows["lr"] = np.arange(start, stop), rank.number, rank.lr
        rows["epoch"] = rows["step"] // job.steps_per_epoch
        rows["samples"] = rows["weight"] = job.samples
        rows["loss"] = 1 / (1 + rows["step"])
        rows["step_s"], rows["memory_bytes"] = self.step_s, 300_000_000
        return rows

    def _state_dict_parts(self, rank: _FakeRank, *, job: str, **_: Any) -> Payload | None:
        state = dict(rank.models[rank.jobs[job].model].state_dict())  # as it was placed: nothing was trained
        return make_payload(pickling.pack_object(state), rank.file_owner) if rank.number == 0 else None

    def _max_gradients(self, rank: _FakeRank, **_: Any) -> Payload:
        return make_payload(pickling.pack_object({}), rank.file_owner)

    def _evaluate(self, _rank: _FakeRank, **_: Any) -> tuple[int, dict[str, tuple[float, float]]]:
        return 4, {"loss": (2.0, 4.0)}

    def _measure(self, rank: _FakeRank, *, what: str, **args: Any) -> Any:
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

    def _call_function(
        self, rank: _FakeRank, *, shipment: Payload, listen: Any, port: int | None = None, **_: Any
    ) -> Any:
        fn, args, kwargs = shipment.load()
        rank.is_broken = port is not None  # a script's own group takes ours' place, until it is formed anew
        items = self._publish_output(rank, listen)
        return make_payload(
            pickling.pack_object(fn(*args, **kwargs), name="the function's result"), rank.file_owner
        ), items

    def _open_torchrun_store(self, _rank: _FakeRank, **_: Any) -> int:
        return 1


def _make_lost_reply(rank: _FakeRank) -> Reply:
    return Reply(failure=Failure(rank.number, "?", "EngineLost", "its process has ended", "", kind="lost"))


def _make_failure_reply(rank: _FakeRank, error: BaseException, step: int | None = None) -> Reply:
    """The error as an engine reports it; one that isn't a refusal breaks the group up."""
    kind = {RefusedError: "refused", KeyboardInterrupt: "interrupted"}.get(type(error), "error")
    rank.is_broken = rank.is_broken or kind != "refused"
    trace = "".join(traceback.format_exception(error))
    name, victim = type(error).__name__, str(error) == _LOST_PEER
    return Reply(failure=Failure(rank.number, "fake", name, str(error), trace, step, victim, kind))
