"""Calls to the engines of one cluster, as ordered ranks.

A call to all ranks is N messages. If two threads fanned out at the same time, messages would reach engines in different
orders, and collectives would deadlock. So only `fan_out` and `fan_out_together` send calls, under one lock; ``%%px``
takes the same lock.

Each rank replies for itself, so that the notebook sees the first failure at once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dtkit._util import timeouts
from dtkit.errors import (
    ClusterClosedError,
    DtkitError,
    EngineError,
    SupersededError,
    drop_consequential_refusals,
)
from dtkit.health import stacks
from dtkit.messages import Reply, Request
from dtkit.rpc.cancellation import AbandonedCall
from dtkit.rpc.gathering import ReplyDeadline, split_replies
from dtkit.rpc.membership import GroupConfig, Membership
from dtkit.rpc.protocol import Call, DataOperations, GroupOperations, make_call
from dtkit.rpc.uploads import Uploads
from dtkit.types import Failure, NodeInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dtkit.health.status import EngineStatus
    from dtkit.messages import OutputItem
    from dtkit.rpc.cluster_folder import ClusterFolder
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.pickling import PackedObject
    from dtkit.rpc.transport import Transport

R = TypeVar("R")


class OwnerRecord(Protocol):
    """Record of a cluster's owner and engines, by which another notebook can take it over."""

    @property
    def is_superseded(self) -> bool:
        """Whether another notebook has taken the cluster over."""
        ...

    def write(self) -> None:
        """Record this notebook as the owner of the current engines."""


class EngineGroup:
    """Engines behind a :class:`~dtkit.rpc.transport.Transport`.

    Without an `owner_record`, no other notebook can take the engines over, and they outlive the cluster.
    """

    def __init__(
        self,
        transport: Transport,
        folder: ClusterFolder,
        config: GroupConfig,
        owner_record: OwnerRecord | None = None,
    ) -> None:
        self.transport, self.cluster_folder, self.owner_record = transport, folder, owner_record
        # locks: while ipyparallel queues messages
        self.lock = threading.RLock()
        self.membership = Membership(self, transport, folder, config)
        self.uploads = Uploads(self.membership)
        self.torchrun_attempts = itertools.count()
        """Restart count of each script."""
        self.is_closed = False
        self._reform_thread: threading.Thread | None = None
        self._keys_to_free: collections.deque[str] = collections.deque()
        self._key_counter = itertools.count()

    @property
    def folder(self) -> Path:
        """The cluster's private folder."""
        return self.cluster_folder.path

    @property
    def nodes(self) -> list[NodeInfo]:
        """One row per rank."""
        return self.membership.nodes

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.transport.engine_ids)

    @property
    def call_timeout_s(self) -> float:
        """Seconds to wait for a call to all ranks: longer than any collective may take."""
        return (self.membership.config.step_timeout or timeouts.FIRST_STEP_TIMEOUT_S) + timeouts.CALL_TIMEOUT_MARGIN_S

    # -- the owner, and the end -------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ClusterClosedError if this cluster was closed."""
        if self.is_closed:
            raise ClusterClosedError("this cluster was closed; start another one with dtkit.Cluster()")

    @property
    def can_be_reattached(self) -> bool:
        """Whether another notebook can take these engines over."""
        return self.owner_record is not None

    @property
    def is_superseded(self) -> bool:
        """Whether another notebook has taken these engines over."""
        return self.owner_record is not None and self.owner_record.is_superseded

    def describe_ended_engines(self) -> Mapping[int, str] | None:
        """Return why the engines of ranks are gone that have ended; None where these engines are no longer watched."""
        return None if self.is_closed or self.is_superseded else self.membership.describe_ended_engines()

    def check_owned(self) -> None:
        """Raise SupersededError if another notebook has taken these engines over."""
        if self.is_superseded:
            raise SupersededError(
                "another notebook, or this one by attaching again, has taken this cluster over; "
                f"dtkit.attach({self.folder.name!r}, force=True) takes it back"
            )

    def record_owner(self) -> None:
        """Record the present engines, so that a notebook that takes over finds them."""
        if self.owner_record is not None:
            self.owner_record.write()

    def close(self) -> None:
        """End the engines that the transport started; others leave the group and free everything."""
        if self.nodes and not self.can_be_reattached:
            self.gather_replies(self.fan_out(make_call(GroupOperations.leave_group)), timeouts.LEAVE_GROUP_TIMEOUT_S)
        with self.lock:
            self.is_closed = True
        self.uploads.discard_all()
        self.transport.close()
        self.cluster_folder.clear()

    def detach(self) -> None:
        """Stop using the engines, and leave them to their new owner. Idempotent."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
        self.transport.detach()

    # -- calls ------------------------------------------------------------------------------------------------

    def fan_out(
        self,
        call: Call[R] | Sequence[Call[R]],
        *,
        ranks: Sequence[int] | None = None,
        listen: Callable[[int, int, list[OutputItem]], None] | None = None,
    ) -> list[Future[Reply[R]]]:
        """Send a call to every rank, or to `ranks`, without waiting. Return one future per rank.

        `call` may be a sequence with a call for each rank. `listen(rank, first, items)` is called with the output that
        a rank publishes meanwhile.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        with self.lock:
            self.check_open()
            if isinstance(call, Call):
                messages = [self._pickle_request(call)] * len(ranks)
            else:
                messages = [self._pickle_request(each) for each in call]
            listeners = [None if listen is None else functools.partial(listen, rank) for rank in ranks]
            return [
                self.transport.send(rank, message, listener)
                for rank, message, listener in zip(ranks, messages, listeners, strict=True)
            ]

    def fan_out_together(self, calls: Sequence[Call[Any]]) -> list[list[Future[Reply[Any]]]]:
        """Send several calls to every rank in one message, without waiting. Return each call's futures, one per rank.

        A rank serves them in this order, and replies to all of them at once.
        """
        with self.lock:
            self.check_open()
            message = pickle.dumps(tuple(map(self._make_request, calls)), protocol=5)
            replies = [self.transport.send(rank, message) for rank in range(self.world_size)]
        return list(map(list, zip(*(split_replies(reply, len(calls)) for reply in replies), strict=True)))

    def _pickle_request(self, call: Call[Any]) -> bytes:
        return pickle.dumps(self._make_request(call), protocol=5)

    def _make_request(self, call: Call[Any]) -> Request:
        return Request(call.operation, self.membership.config.owner_id, self.membership.generation, call.args)

    def gather_replies(
        self,
        futures: Sequence[Future[Reply[R]]],
        timeout: float,
        ranks: Sequence[int] | None = None,
        *,
        grace_from_first_reply: bool = False,
        grace_s: float | None = None,
        first_grace_s: float | None = None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> list[Reply[R]]:
        """Wait for one reply per rank. Once one has failed, the others get a grace period, then an interrupt.

        The interrupted ranks get one more grace period; `first_grace_s` gives the first one another length. With
        `grace_from_first_reply` it also begins with a success. `on_poll` is called twice a second.
        """
        ranks = range(len(futures)) if ranks is None else ranks
        started_at = time.monotonic()
        grace_s = timeouts.FAILURE_GRACE_S if grace_s is None else grace_s
        deadline = ReplyDeadline(
            futures,
            timeout,
            first_grace_s=grace_s if first_grace_s is None else first_grace_s,
            grace_s=grace_s,
            from_first_reply=grace_from_first_reply,
        )
        is_interrupted = is_silent = False
        while pending := [rank for rank, future in zip(ranks, futures, strict=True) if not future.done()]:
            if self.is_closed:
                raise ClusterClosedError(
                    "this cluster was closed during the call; start another one with dtkit.Cluster()"
                )
            if is_silent:
                self.transport.check_reachable()
                on_poll()
            if (remaining_s := deadline.remaining_s) > 0:
                is_silent = not deadline.reply_arrived.wait(min(remaining_s, timeouts.REPLY_POLL_S))
                deadline.reply_arrived.clear()
            elif is_interrupted:
                break
            else:
                is_interrupted = True
                self.transport.interrupt(pending)
                deadline.begin_grace()
        waited_s = time.monotonic() - started_at
        # waits: already done here
        return [
            self._name_host(future.result()) if future.done() else self._make_stuck_reply(rank, waited_s)
            for rank, future in zip(ranks, futures, strict=True)
        ]

    def _name_host(self, reply: Reply[R]) -> Reply[R]:
        """Return the reply with the host of a lost engine, which the transport doesn't know."""
        failure, nodes = reply.failure, self.nodes
        if failure is None or failure.host != "?" or failure.rank >= len(nodes):
            return reply
        return dataclasses.replace(reply, failure=dataclasses.replace(failure, host=nodes[failure.rank].host))

    def call_all(
        self, call: Call[R] | Sequence[Call[R]], *, ranks: Sequence[int] | None = None, timeout: float | None = None
    ) -> list[R]:
        """Call every rank, or `ranks`, and return the values by rank.

        After a failure the process group is formed again, and the cause is raised.
        """
        self.membership.ensure_formed()
        self._free_unused_keys()
        futures: list[Future[Reply[R]]] = []
        generation = self.membership.generation
        try:
            futures = self.fan_out(call, ranks=ranks)
            replies = self.gather_replies(futures, timeout or self.call_timeout_s, ranks)
        except KeyboardInterrupt:
            self.membership.is_formed = False  # must come first, because another interrupt may come at any moment
            ranks = range(self.world_size) if ranks is None else ranks
            operation = call.operation if isinstance(call, Call) else call[0].operation
            self._abandon(AbandonedCall(operation, generation, ranks, futures))
            raise
        return self.unwrap(replies)

    def call_all_with_payload(
        self, make_call: Callable[[Payload], Call[R]], packed: PackedObject, *, broadcast: bool = False
    ) -> list[R]:
        """Call every rank with a packed object, which all map from one file.

        With `broadcast`, and on several hosts without agents, rank 0 gets the object and broadcasts it over the data
        plane. An agent gets one copy for all engines of its host.
        """
        broadcast = broadcast or not self.membership.can_share_memory
        payload = self.uploads.upload(packed, inline=broadcast)
        try:
            if broadcast:
                return self.call_all([make_call(payload.for_broadcast(rank)) for rank in range(self.world_size)])
            return self.call_all(make_call(payload))
        finally:
            self.uploads.discard(payload)

    def call_independently(
        self, call: Call[R] | Sequence[Call[R]], ranks: Sequence[int], *, grace_from_first_reply: bool = False
    ) -> dict[int, R]:
        """Call these ranks without their process group. Return the values of those that succeed."""
        replies = self.gather_replies(
            self.fan_out(call, ranks=ranks),
            timeouts.INDEPENDENT_CALL_TIMEOUT_S,
            ranks,
            grace_from_first_reply=grace_from_first_reply,
        )
        return {rank: reply.unwrap() for rank, reply in zip(ranks, replies, strict=True) if reply.failure is None}

    def unwrap(self, replies: Sequence[Reply[R]]) -> list[R]:
        """Return the replies' values. After a failure, form the group again and raise the cause."""
        failures = [reply.failure for reply in replies if reply.failure is not None]
        if not failures:
            return [reply.unwrap() for reply in replies]
        cause = EngineError(drop_consequential_refusals(failures))
        try:
            self.membership.reform_if_broken(failures)
        except DtkitError as error:
            raise cause from error
        raise cause

    def _make_stuck_reply(self, rank: int, waited_s: float) -> Reply[Any]:
        nodes = self.nodes
        host = nodes[rank].host if rank < len(nodes) else "?"
        message = (
            f"no answer within {waited_s:.0f} s, nor to an interrupt. The engine is stuck; close this cluster and "
            "start another one"
        )
        return Reply(failure=Failure(rank, host, "TimeoutError", message, "", kind="stuck"))

    # -- interrupts -------------------------------------------------------------------------------------------

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Send SIGINT to engines, without waiting. Stopped engines are continued first, so that they react."""
        self.check_open()
        self.transport.interrupt(range(self.world_size) if ranks is None else ranks, wake=True)

    def wait_until_reformed(self) -> None:
        """Wait until a group that an interrupt broke is formed again; signals are handled between two waits."""
        deadline, thread = time.monotonic() + timeouts.REFORM_TIMEOUT_S, self._reform_thread
        if thread is threading.current_thread():
            return
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            thread.join(timeouts.SHORT_INTERRUPT_POLL_S)

    def _abandon(self, call: AbandonedCall) -> None:
        """End a call that the notebook no longer waits for, and form the group again if necessary.

        A further interrupt ends this wait; the next call then waits instead.
        """
        self._reform_thread = threading.Thread(
            target=self._end_abandoned, args=(call,), name="dtkit-settle", daemon=True
        )
        self._reform_thread.start()
        self.wait_until_reformed()

    def _end_abandoned(self, call: AbandonedCall) -> None:
        with contextlib.suppress(DtkitError):  # the next call raises the same error
            if not call.futures:  # some ranks may have the call, and wait in it for the others
                self.interrupt(call.ranks)
                self.membership.form_process_group()
            elif not call.wait_for_turn(self._read_status):
                self.membership.mark_intact(call.generation)  # the engines will run it in its turn
            elif pending := call.get_pending_ranks():
                self.interrupt(pending)
                replies = self.gather_replies(call.futures, timeouts.FAILURE_GRACE_S, call.ranks)
                self.membership.reform_if_broken([reply.failure for reply in replies if reply.failure is not None])
            elif failures := [f for future in call.futures if (f := future.result(0).failure) is not None]:
                self.membership.reform_if_broken(failures)
            else:
                self.membership.mark_intact(call.generation)

    def _read_status(self, rank: int) -> EngineStatus | None:
        """Return the last status of a rank's watchdog."""
        nodes = self.nodes
        return stacks.read_status(self.folder, nodes[rank]) if rank < len(nodes) else None

    # -- keys of data, models and jobs ------------------------------------------------------------------------

    def make_key(self, kind: str) -> str:
        """Return a name that is new in this cluster."""
        return f"{kind}-{self.membership.config.owner_id:x}-{next(self._key_counter)}"

    def free_later(self, key: str) -> None:
        """Free data, a model or a job with the next call. Finalizers may call this, in any thread."""
        self._keys_to_free.append(key)

    def _free_unused_keys(self) -> None:
        keys = []
        with contextlib.suppress(IndexError):
            while True:
                keys.append(self._keys_to_free.popleft())
        if keys:
            self.fan_out(make_call(DataOperations.release, keys=keys))
