"""Scheduling of items on single engines, as these become free.

An engine computes one item at a time. If an engine is lost, another one computes its item again; if none is left, lost
ones are replaced first. A failed call breaks the process group on its engine. It gets no further item until the group
is formed again. That happens when no usable engine is left, or at the end.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import queue
import time
from typing import TYPE_CHECKING, Any, Protocol

from dtkit._util import timeouts
from dtkit._util.guard import Subscribers
from dtkit.engine.item_call import call_item, forget_items
from dtkit.errors import ClusterClosedError, DtkitError
from dtkit.rpc.protocol import FunctionOperations, make_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from dtkit.engine.item_call import ItemResult
    from dtkit.messages import OutputItem, Reply
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.types import Failure

_NOBODY = -1
"""Stands for the rank that has answered, if none has."""

MAX_TRIES = 3
"""Attempts at an item, each of which lost its engine."""


class ItemSource(Protocol):
    """Source of items, which also receives their results. If a method raises, the work ends."""

    @property
    def has_more(self) -> bool:
        """Whether there is another item."""
        ...

    def take(self) -> tuple[int, Any]:
        """Return the next item, with its number."""
        ...

    def on_start(self, index: int, rank: int) -> None:
        """Called when an engine begins an item."""

    def on_repeat(self, index: int, item: Any) -> Any:
        """Return the item to compute again, because its engine was lost."""

    def on_result(self, index: int, value: Any) -> None:
        """Called with the result of an item."""

    def on_failure(self, index: int, failure: Failure) -> None:
        """Called when an item has failed finally."""

    def on_poll(self) -> None:
        """Called at short intervals."""


@dataclasses.dataclass
class _RunningItem:
    index: int
    item: Any
    payload: Payload
    future: Future[Reply[Any]]
    num_received: int = 0
    """Number of pieces of output that have arrived."""


class ItemScheduler:
    """Computes the items of one source. While it runs, a view shows printed lines and rows of `dtkit.log`, as for a
    call.
    """

    def __init__(
        self,
        engine_group: EngineGroup,
        name: str,
        function_call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
        source: ItemSource,
        repair: Callable[[], object],
    ) -> None:
        """`function_call` is a function with its arguments after the item; `repair` replaces engines that are gone."""
        self.name, self.world_size = name, engine_group.world_size
        self.state, self.note = "running", ""
        """"running", "done" or "failed"."""
        self.rows: list[dict[str, Any]] = []
        self.output: list[tuple[int, str]] = []
        self.progress: dict[int, str] = {}
        self.num_done: collections.Counter[int] = collections.Counter()
        """Items that each rank has computed."""
        self._group, self._function_call, self._source, self._repair = engine_group, function_call, source, repair
        self._running: dict[int, _RunningItem] = {}
        self._loaded: set[int] = set()  # ranks that have the function and its arguments
        self._unusable: set[int] = set()  # ranks that are gone or have left the process group
        self._to_repeat: collections.deque[tuple[int, Any]] = collections.deque()
        self._num_losses: collections.Counter[int] = collections.Counter()
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._subscribers = Subscribers()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change, from any thread. Return the function that unsubscribes it."""
        return self._subscribers.add(callback)

    def run(self, timeout: float | None, poll_s: float = timeouts.INTERRUPT_POLL_S) -> None:
        """Compute all items. Raises TimeoutError after `timeout` seconds. Any error ends the engines' work."""
        group = self._group
        if group.membership.find_lost_ranks():
            self._repair()
        group.membership.ensure_formed()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        key = group.make_key("map")
        shared = group.uploads.upload(group.uploads.pack(self._function_call, name=self.name))
        self.state = "failed"
        try:
            while self._running or self._has_items:
                self._send_to_free_ranks(key, shared)
                self._wait_for_reply(min(poll_s, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{self.name}: {self.num_done.total()} items were computed within {timeout} s, and "
                        f"{len(self._running)} were being computed; give more time by timeout="
                    )
            self.state = "done"
        finally:
            group.uploads.discard(shared)
            if not group.is_closed:
                self._end_running()
                self._tidy_up()
            self._subscribers.notify(self.name)

    def wake(self) -> None:
        """Make `run` look for further items now. May be called from any thread."""
        self._arrived.put(_NOBODY)

    # -- sending ----------------------------------------------------------------------------------------------

    @property
    def _has_items(self) -> bool:
        return bool(self._to_repeat) or self._source.has_more

    def _send_to_free_ranks(self, key: str, shared: Payload) -> None:
        if not self._running and len(self._unusable) >= self._group.world_size:
            self._restore_group()
        for rank in range(self._group.world_size):
            if not self._has_items:
                return
            if rank not in self._running and rank not in self._unusable:
                index, item = self._to_repeat.popleft() if self._to_repeat else self._source.take()
                self._send(rank, index, item, (key, None if rank in self._loaded else shared))

    def _send(self, rank: int, index: int, item: Any, function: tuple[str, Payload | None]) -> None:
        uploads = self._group.uploads
        payload = uploads.upload(uploads.pack((call_item, (*function, item), {}), name=f"item {index}"))
        call = make_call(FunctionOperations.call_function, payload=payload)
        (future,) = self._group.fan_out(call, ranks=[rank], listen=self._receive)
        self._running[rank] = _RunningItem(index, item, payload, future)
        self._source.on_start(index, rank)
        future.add_done_callback(lambda _: self._arrived.put(rank))

    def _restore_group(self) -> None:
        """Replace lost engines, or form the group again, so that all engines take items."""
        if self._group.membership.find_lost_ranks():
            self._repair()
        else:
            self._group.membership.form_process_group()
        self._unusable.clear()

    # -- receiving --------------------------------------------------------------------------------------------

    def _wait_for_reply(self, wait_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            rank = self._arrived.get(timeout=max(0.0, wait_s))
            if rank == _NOBODY:
                self._source.on_poll()
                return
            running = self._running.pop(rank, None)
            if running is not None:
                # waits: already done here
                self._process_reply(rank, running, running.future.result())
                self._subscribers.notify(self.name)
                return
        if self._group.is_closed:
            raise ClusterClosedError(f"this cluster was closed while it computed {self.name}")
        self._group.transport.check_reachable()
        self._source.on_poll()

    def _process_reply(self, rank: int, running: _RunningItem, reply: Reply[Any]) -> None:
        self._group.uploads.discard(running.payload)
        if isinstance(reply.value, tuple):
            self._add_output(rank, running, 0, reply.value[1])
        if reply.failure is None:
            result: Payload = reply.unwrap()[0]
            self._process_result(rank, running, result.load())
            result.discard()
            return
        self._unusable.add(rank)
        self._loaded.discard(rank)
        self._num_losses[running.index] += 1
        will_repeat = reply.failure.kind in ("lost", "refused") and self._num_losses[running.index] < MAX_TRIES
        if will_repeat:
            self._to_repeat.append((running.index, self._source.on_repeat(running.index, running.item)))
        else:
            self._source.on_failure(running.index, reply.failure)

    def _process_result(self, rank: int, running: _RunningItem, result: ItemResult) -> None:
        payload, failure = result
        if payload is None:
            assert failure is not None
            self._source.on_failure(running.index, failure)
            return
        value = payload.load()
        payload.discard()
        self.num_done[rank] += 1
        self._loaded.add(rank)
        self._source.on_result(running.index, value)

    def _receive(self, rank: int, first: int, items: list[OutputItem]) -> None:
        running = self._running.get(rank)
        if running is not None:
            self._add_output(rank, running, first, items)
            self._subscribers.notify(self.name)

    def _add_output(self, rank: int, running: _RunningItem, first: int, items: Sequence[OutputItem]) -> None:
        """Add an item's output, numbered from `first`. Output behind a gap comes with the result."""
        if first > running.num_received:
            return
        new = items[running.num_received - first :]
        running.num_received += len(new)
        for kind, content in new:
            if kind == "row":
                values = {name: float(value) for name, value in content.items()}
                self.rows.append({"rank": rank, "index": running.index, **values})
            elif kind == "progress":
                self.progress[rank] = content
            else:
                self.progress.pop(rank, None)
                self.output.append((rank, content))

    # -- the end ----------------------------------------------------------------------------------------------

    def _end_running(self) -> None:
        """Interrupt the running items. An engine that ignores two interrupts is ended."""
        running, self._running = self._running, {}
        if not running:
            return
        ranks, group = sorted(running), self._group
        group.interrupt(ranks)
        replies = group.gather_replies(
            [running[rank].future for rank in ranks],
            timeouts.CANCEL_INTERRUPT_TIMEOUT_S,
            ranks,
            grace_s=timeouts.CANCEL_AGAIN_TIMEOUT_S,
        )
        self._unusable.update(ranks)  # an interrupt may arrive after the item's end, and break the next call
        for rank in ranks:
            group.uploads.discard(running[rank].payload)
        stuck = [
            rank for rank, reply in zip(ranks, replies, strict=True) if reply.failure and reply.failure.kind == "stuck"
        ]
        if stuck:
            group.transport.kill(stuck)

    def _tidy_up(self) -> None:
        """Make the cluster usable again, and free what the items have loaded."""
        group = self._group
        with contextlib.suppress(DtkitError):  # the next call raises the same error
            if self._unusable:
                self._restore_group()
            payload = group.uploads.upload(group.uploads.pack((forget_items, (), {})))
            futures = group.fan_out(make_call(FunctionOperations.call_function, payload=payload))
            replies = group.gather_replies(futures, timeouts.INDEPENDENT_CALL_TIMEOUT_S)
            group.uploads.discard(payload)
            group.unwrap(replies)  # a late interrupt has broken the group
