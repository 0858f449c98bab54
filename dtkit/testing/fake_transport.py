"""Any number of fake engines behind a :class:`~dtkit.rpc.transport.Transport`, for tests of the notebook's side.

One thread for each rank serves requests in order, and refuses the same requests as an engine::

    engines = FakeTransport(2)
    cluster = dtkit.Cluster.from_transport(engines, device="cpu")
    engines.inject_failure(rank=1, op="advance", error=RuntimeError("no forward here"), after=2)
    run = cluster.train(...)            # fails as on real engines: rank 1 is the cause, rank 0 its victim

Tests inject failures before they send the calls that should fail, or while these are held. A rank that has already
answered can't take part.
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

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded_in_thread
from dtkit.engine.ops.admission import check_admission
from dtkit.errors import RefusedError
from dtkit.messages import Reply, Request
from dtkit.testing.fake_engine import LOST_PEER_MESSAGE, FakeEngine, FakeResults
from dtkit.testing.fake_ops import make_operations
from dtkit.types import EngineLoss, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.messages import OutputItem
    from dtkit.rpc.transport import Hosts

    Publish = Callable[[int, list[OutputItem]], None]


_LOSS = "its process has ended"


@dataclasses.dataclass
class _Worker:
    """The inbox of an engine, which a thread serves."""

    engine: FakeEngine
    operations: dict[str, Callable[..., Any]]
    inbox: queue.SimpleQueue[Any] = dataclasses.field(default_factory=queue.SimpleQueue)
    is_lost: bool = False
    num_sent: int = 0
    canceled_until: int = 0  # calls up to this one are no longer held


@dataclasses.dataclass
class _Fault:
    """A failure that will happen: on one rank, in one call. The other ranks are its victims, in the same generation."""

    rank: int
    op: str
    error: BaseException
    remaining_successes: list[int]  # by rank: calls of the operation that succeed before
    generation: int | None = None

    def take_if_due(self, engine: FakeEngine, request: Request) -> bool:
        """Return whether the request fails on this engine."""
        if request.op != self.op or self.generation not in (None, engine.generation):
            return False
        if self.op == "handshake" and engine.rank != self.rank:  # there is no group yet
            return False
        self.remaining_successes[engine.rank] -= 1
        if self.remaining_successes[engine.rank] != -1:
            return False
        self.generation = engine.generation
        return True


class FakeTransport(FakeResults):
    """`world_size` fake engines with the ids 10, 11, ...

    ``served_requests`` has (rank, operation, arguments) in the order of service. ``interrupted_ranks`` has the ranks
    that were interrupted.
    """

    hosts: Hosts | None = None
    on_queue: Callable[[str], object] = bool

    def __init__(self, world_size: int = 2, *, step_s: float = 0.05) -> None:
        super().__init__(world_size, step_s)
        self.engine_ids: Sequence[int] = range(10, 10 + world_size)  # an engine's id is not its rank
        self.served_requests: list[tuple[int, str, dict[str, Any]]] = []
        self.interrupted_ranks: list[int] = []
        # locks: for a few assignments
        self._condition = threading.Condition()  # guards the tests' settings, and the counts of calls
        self._is_open, self._is_closed = True, False
        self._faults: list[_Fault] = []
        self._threads: list[threading.Thread] = []
        self._workers = [self._start(rank) for rank in range(world_size)]

    # -- control by tests -------------------------------------------------------------------------------------

    def hold_requests(self) -> None:
        """Serve nothing until `release_requests`."""
        with self._condition:
            self._is_open = False

    def release_requests(self) -> None:
        """Serve again."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def inject_failure(self, rank: int, op: str, error: BaseException, *, after: int = 0) -> None:
        """Make a rank fail in its next call of `op`; the others are its victims, and the group is broken.

        `after` is how many such calls succeed first.
        """
        with self._condition:
            self._faults.append(_Fault(rank, op, error, [after] * len(self._workers)))

    def queue_output(self, rank: int, *items: OutputItem) -> None:
        """Add output to the rank's next dispatch or call: ("text", line) or ("row", {name: number})."""
        engine = self._workers[rank].engine
        engine.pending_output = [*engine.pending_output, *items]

    def end_engine(self, rank: int) -> None:
        """End that engine's process: it answers no more calls, including those that are held."""
        self._workers[rank].is_lost = True
        self._cancel_held([rank])

    # -- the transport ----------------------------------------------------------------------------------------

    def send(self, rank: int, message: bytes, listen: Publish | None = None) -> Future[Reply[Any]]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        future: Future[Reply[Any]] = Future()
        worker = self._workers[rank]
        with self._condition:
            if self._is_closed:
                future.set_result(_make_lost_reply(worker.engine))
            else:
                worker.num_sent += 1
                worker.inbox.put((worker.num_sent, message, listen, future))
        return future

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:  # noqa: ARG002 - none is ever stopped
        """Record the interrupt. The first call that is held there ends with KeyboardInterrupt."""
        self.interrupted_ranks += ranks
        if not self._is_open:
            self._cancel_held(ranks)

    def check_reachable(self) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""

    def explain_loss(self, rank: int) -> str:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        del rank
        return _LOSS

    def describe_loss(self, rank: int) -> EngineLoss:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        del rank
        return EngineLoss(_LOSS)

    def track_processes(self, pids: Mapping[int, int]) -> None:
        """Do nothing: its engines have no processes."""

    def find_lost_ranks(self) -> list[int]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        return [worker.engine.rank for worker in self._workers if worker.is_lost]

    def kill(self, ranks: Sequence[int], timeout: float = 0) -> bool:  # noqa: ARG002 - it ends at once
        """See :class:`~dtkit.rpc.transport.Transport`."""
        for rank in ranks:
            self.end_engine(rank)
        return True

    def replace(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        for rank in ranks:
            self._workers[rank].inbox.put(None)
            self._workers[rank] = self._start(rank)

    def set_aside(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`. Only engines that `replace` has started are set aside."""

    def drop(self, ranks: Sequence[int]) -> None:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        kept = [worker for worker in self._workers if worker.engine.rank not in ranks]
        self.engine_ids = [self.engine_ids[worker.engine.rank] for worker in kept]
        for rank, worker in enumerate(kept):
            worker.engine.rank = rank
        self._workers, self.world_size = kept, len(kept)

    def end_processes(self, pids: Sequence[int]) -> None:
        """Do nothing: fake engines have no processes."""

    def detach(self) -> None:
        """Do nothing: no other notebook can take fake engines over."""

    def close(self) -> None:
        """Serve held requests, and end the threads. Idempotent."""
        self.release_requests()
        with self._condition:
            self._is_closed = True
        for worker in self._workers:
            worker.inbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=timeouts.FAKE_ENGINE_TIMEOUT_S)

    # -- an engine --------------------------------------------------------------------------------------------

    def _start(self, rank: int) -> _Worker:
        engine = FakeEngine(rank, self)
        worker = _Worker(engine, make_operations(engine))
        thread = threading.Thread(target=self._serve, args=(worker,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return worker

    def _cancel_held(self, ranks: Sequence[int]) -> None:
        with self._condition:
            for rank in ranks:
                self._workers[rank].canceled_until = self._workers[rank].num_sent
            self._condition.notify_all()

    def _serve(self, worker: _Worker) -> None:
        # waits: a fake engine's daemon thread waits for work until `close`
        while (item := worker.inbox.get()) is not None:
            number, message, listen, future = item
            self._wait_until_released(worker, number)
            future.set_result(self._answer(worker, message, listen, is_interrupted=number <= worker.canceled_until))

    def _wait_until_released(self, worker: _Worker, number: int) -> None:
        with self._condition:
            self._condition.wait_for(
                lambda: self._is_open or number <= worker.canceled_until, timeout=timeouts.HELD_CALL_TIMEOUT_S
            )

    def _answer(self, worker: _Worker, message: bytes, listen: Publish | None, *, is_interrupted: bool) -> Any:
        """Return the reply to a message, or a list of replies."""
        # unpickles: made in the same process
        content: Request | tuple[Request, ...] = pickle.loads(message)
        requests = content if isinstance(content, tuple) else (content,)
        replies = []
        for request in requests:
            answer = functools.partial(self._answer_request, worker, request, listen, is_interrupted=is_interrupted)
            replies.append(run_guarded_in_thread(answer, functools.partial(_make_failure_reply, worker.engine)))
        return replies if isinstance(content, tuple) else replies[0]

    def _answer_request(
        self, worker: _Worker, request: Request, listen: Publish | None, *, is_interrupted: bool
    ) -> Reply[Any]:
        engine = worker.engine
        self.served_requests.append((engine.rank, request.op, request.args))
        if worker.is_lost:
            return _make_lost_reply(engine)
        check_admission(request, engine.owner, engine.generation, is_broken=engine.is_broken)
        if is_interrupted and not engine.is_broken:
            return _make_failure_reply(engine, KeyboardInterrupt())
        if request.op in ("advance", "evaluate"):  # an injected failure waits for a call that is not refused
            engine.get_job(request.args["job"], request.args["step"])
        engine.publish = listen
        if (fault := self._find_fault(engine, request)) is not None:
            return _fail_together(worker, request, fault)
        return Reply(worker.operations[request.op](**request.args))

    def _find_fault(self, engine: FakeEngine, request: Request) -> _Fault | None:
        with self._condition:
            return next((fault for fault in self._faults if fault.take_if_due(engine, request)), None)


def _fail_together(worker: _Worker, request: Request, fault: _Fault) -> Reply[Any]:
    """Return the failure of a rank, or the loss of its peer, with the steps completed until then."""
    engine, partial = worker.engine, None
    if request.op == "advance":
        partial = worker.operations["advance"](**{**request.args, "steps": 0})
    elif request.op in ("call_function", "run_script"):
        partial = None, engine.take_output()
    error = fault.error if engine.rank == fault.rank else RuntimeError(LOST_PEER_MESSAGE)
    return dataclasses.replace(_make_failure_reply(engine, error), value=partial)


def _make_lost_reply(engine: FakeEngine) -> Reply[Any]:
    return Reply(failure=Failure(engine.rank, "?", "EngineLost", _LOSS, "", kind="lost"))


def _make_failure_reply(engine: FakeEngine, error: BaseException) -> Reply[Any]:
    """Return an engine's report on an error. An error that is not a refusal breaks the group."""
    kind = "refused" if isinstance(error, RefusedError) else "error"
    kind = "interrupted" if isinstance(error, KeyboardInterrupt) else kind
    engine.is_broken = engine.is_broken or kind != "refused"
    is_victim = str(error) == LOST_PEER_MESSAGE
    trace = "".join(traceback.format_exception(error))
    return Reply(failure=Failure(engine.rank, "fake", type(error).__name__, str(error), trace, None, is_victim, kind))
