"""The transport over an ipyparallel client. Besides the launchers, only this module and its view use ipyparallel."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting, timeouts, torch_private
from dtkit._util.deadline import wait_until
from dtkit.engine.entrypoint import MIMETYPE, Entrypoint
from dtkit.errors import ClusterError
from dtkit.messages import Reply
from dtkit.rpc.unpickling import unpickle
from dtkit.types import EngineLoss, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import ipyparallel as ipp

    from dtkit.rpc.transport import Hosts

LOSS_ERROR = "EngineError"
"""Name of ipyparallel's error for a call during which the engine ended."""
_ATTACHED_REMEDY = "Train with on_failure='shrink', or start engines where the lost ones came from, and attach again"

_CORRECT_FIRST = "If your code ended it, correct that first: another engine would end in the same way"


def wrap_client(client: Any) -> IpyparallelTransport:
    """Return a transport over the engines of a client that the user connected."""
    import ipyparallel as ipp

    if not isinstance(client, ipp.Client):
        raise TypeError(
            f"from_client({client!r}): client must be an ipyparallel.Client, as in from_client(ipp.Cluster(n=2)"
            ".start_and_connect_sync())"
        )
    if not client.ids:
        raise ClusterError("the client has no engines yet; call client.wait_for_engines(n) first")
    return IpyparallelTransport(client, list(client.ids))


class IpyparallelTransport:
    """Transport over a connected client, which leaves the engines running when it is closed."""

    hosts: Hosts | None = None
    on_queue: Callable[[str], object] = bool
    _remedy = _ATTACHED_REMEDY

    def __init__(self, client: ipp.Client, engine_ids: list[int]) -> None:
        self._client = client
        _drop_late_replies(client)
        self.engine_ids = list(engine_ids)
        self._entrypoint = Entrypoint()
        self._killed_ids: set[int] = set()

    def send(
        self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None
    ) -> Future[Reply[Any]]:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        reply: Future[Reply[Any]] = Future()
        client = self._client
        engine_id, engines = self.engine_ids[rank], torch_private.get_client_engines(client)
        engine = engines.get(engine_id)
        if engine is None:
            reply.set_result(self._make_lost_reply(rank))
            return reply
        result = client.send_apply_request(
            torch_private.get_main_stream(client), self._entrypoint, [message], ident=engine.encode()
        )
        if listen is not None:
            _OutputListener(result.output.metadata, listen, reply).start()
        waiting = [reply]
        result.add_done_callback(lambda done: _resolve(waiting.pop(), self._read_reply(rank, done)))
        if engine_id not in engines:  # the client may have seen the loss before it knew of the call
            _resolve(reply, self._make_lost_reply(rank))
        return reply

    def _read_reply(self, rank: int, finished: Any) -> Reply[Any]:
        """Return the reply, and remove it from the client's history, which would grow without end.

        The client's other tables clear themselves once the engine has reported idle. Its futures are in reference
        cycles, so the reply and its future are taken out of them.
        """
        with contextlib.suppress(ValueError):
            self._client.history.remove(finished.msg_id)
        result = finished.result(timeout=0)
        if isinstance(result, list):
            # unpickles: an engine's reply; engines are trusted (docs/guides/security.md)
            return unpickle(result.pop())  # type: ignore[no-any-return]
        name = getattr(result, "ename", type(result).__name__)
        if name == LOSS_ERROR:  # an engine ended during the call
            return self._make_lost_reply(rank)
        kind = "interrupted" if name == KeyboardInterrupt.__name__ else "error"  # between two calls
        trace = getattr(result, "traceback", None) or ""
        return Reply(failure=Failure(rank, "?", name, getattr(result, "evalue", str(result)), trace, kind=kind))

    def _make_lost_reply(self, rank: int) -> Reply[Any]:
        loss = self.describe_loss(rank)
        return Reply(
            failure=Failure(rank, "?", "EngineLost", self._format_loss(rank, loss), "", kind="lost", loss=loss)
        )

    def describe_loss(self, rank: int) -> EngineLoss:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        is_killed = self.engine_ids[rank] in self._killed_ids
        loss = EngineLoss("dtkit ended its process, as it was told to") if is_killed else self._find_cause(rank)
        return dataclasses.replace(loss, host=self._describe_host(rank))

    def explain_loss(self, rank: int) -> str:
        """See :class:`~dtkit.rpc.transport.Transport`."""
        return self._format_loss(rank, self.describe_loss(rank))

    def _format_loss(self, rank: int, loss: EngineLoss) -> str:
        where = f" on {loss.host}" if loss.host else ""
        remedy = self._remedy if loss.exit_code is None else f"{_CORRECT_FIRST}. {self._remedy}"
        return f"the engine of rank {rank}{where} is gone: {loss.cause}. {remedy}"

    def _describe_host(self, rank: int) -> str:
        """Return the name of a rank's host, or "" if it is unknown."""
        del rank
        return ""

    def _find_cause(self, rank: int) -> EngineLoss:
        """Return why the engine of a rank may be gone."""
        del rank
        return EngineLoss("its process has ended, or its controller receives no heartbeats")

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:
        """Send SIGINT through each engine's nanny."""
        alive = [self.engine_ids[r] for r in ranks if self.engine_ids[r] in self._client.ids]
        for number in (signal.SIGCONT, signal.SIGINT) if wake else (signal.SIGINT,):
            if alive:
                self._client.send_signal(number, targets=alive, block=False)

    def check_reachable(self) -> None:
        """Return at once: the controller is not a process of this cluster."""

    def find_lost_ranks(self) -> list[int]:
        """Return the ranks whose engines have ended."""
        alive = set(self._client.ids)
        return [rank for rank, engine in enumerate(self.engine_ids) if engine not in alive]

    def track_processes(self, pids: Mapping[int, int]) -> None:
        """Do nothing: these processes belong to the user."""

    def kill(self, ranks: Sequence[int], timeout: float = timeouts.KILL_TIMEOUT_S) -> bool:
        """End these engines by SIGKILL, through their nannies, and wait until the controller knows. See `Transport`."""
        targets = [self.engine_ids[rank] for rank in ranks if self.engine_ids[rank] in self._client.ids]
        if not targets:
            return True
        self._killed_ids.update(targets)
        self._client.send_signal(signal.SIGKILL, targets=targets, block=False)
        return wait_until(lambda: not set(targets) & set(self._client.ids), timeout)

    def end_processes(self, pids: Sequence[int]) -> None:
        """Do nothing: these processes belong to the user."""

    def drop(self, ranks: Sequence[int]) -> None:
        """Continue without these ranks; higher ranks move down."""
        self.engine_ids = [engine for rank, engine in enumerate(self.engine_ids) if rank not in set(ranks)]

    def replace(self, ranks: Sequence[int]) -> None:
        """Raise ClusterError: dtkit did not start these engines, so it can't start others."""
        raise ClusterError(
            f"the engines of {formatting.format_count(len(ranks), 'rank')} are gone ({', '.join(map(str, ranks))}), "
            "and this cluster was attached to engines that somebody else started, so it can't start others. "
            f"{_ATTACHED_REMEDY}"
        )

    def set_aside(self, ranks: Sequence[int]) -> None:
        """Do nothing: `replace` has never started an engine."""

    def make_locked_view(self, lock: threading.RLock) -> ipp.DirectView:
        """Return a view for ``%%px`` that fans out under the cluster's lock."""
        from dtkit.cluster.locked_view import LockedView

        view = LockedView(self._client, torch_private.get_main_stream(self._client), targets=self.engine_ids)
        view.lock = lock
        view.block = True  # the cell shows what engines print, and their errors
        return view

    def close(self) -> None:
        """Do nothing: the user ends the engines."""

    def detach(self) -> None:
        """Do nothing: no other notebook can take these engines over."""


class _OutputListener:
    """Passes on an engine's output during a call. A thread reads the output that the client has collected."""

    def __init__(self, metadata: Any, listen: Callable[[int, list[Any]], None], reply: Future[Reply[Any]]) -> None:
        self._metadata = metadata
        self._listen, self._reply_arrived = listen, threading.Event()
        self._num_handled = 0
        reply.add_done_callback(lambda _: self._reply_arrived.set())

    def start(self) -> None:
        threading.Thread(target=self._poll_outputs, name="dtkit-listen", daemon=True).start()

    def _poll_outputs(self) -> None:
        while not self._reply_arrived.wait(timeouts.OUTPUT_POLL_S):
            outputs = self._metadata["outputs"]
            while self._num_handled < len(outputs):
                data = outputs[self._num_handled]["data"].get(MIMETYPE)
                outputs[self._num_handled] = None  # the client would keep it
                self._num_handled += 1
                if data is not None:
                    self._listen(data["first"], data["items"])


def _resolve(future: Future[Reply[Any]], reply: Reply[Any]) -> None:
    """Set the result, unless another thread has noticed the engine's loss before."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(reply)


def _drop_late_replies(client: ipp.Client) -> None:
    """Drop replies of engines that were given up. For each, ipyparallel prints a line into whatever cell runs."""
    handlers = torch_private.get_client_handlers(client)
    handle = handlers["apply_reply"]

    def handle_awaited(message: dict[str, Any]) -> None:
        msg_id = message["parent_header"].get("msg_id")
        future = torch_private.get_client_futures(client).get(msg_id)
        if msg_id in client.outstanding or (future is not None and not future.done()):
            handle(message)

    handlers["apply_reply"] = handle_awaited
