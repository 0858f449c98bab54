"""Engines as ordered ranks of one process group: one call to all of them, and what travels with it.

Lockstep. A call to all ranks is N messages. Two threads that fan out at the same time would reach the engines in
different orders, and collectives would deadlock; so one method (`fan_out`) sends, under one lock, and ``%%px`` goes
through a view that takes the same lock.

Each rank answers for itself, so that the first failure is seen at once. After a failure the process group is formed
anew: the next *generation*, met at a file of its own, so that no late message of a broken group can join it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import pickle
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit import __version__
from dtkit.cluster import reaper
from dtkit.engine.node_info import get_handshake
from dtkit.errors import (
    ClusterClosedError,
    ClusterError,
    DtkitError,
    EngineError,
    VersionMismatchError,
    drop_consequential_refusals,
)
from dtkit.health import stacks
from dtkit.rpc import pickling
from dtkit.rpc.cancellation import AbandonedCall
from dtkit.rpc.payload import Payload, make_payload
from dtkit.types import ABORT_FLAG, END_EARLY_PREFIX, EngineInventory, Failure, GroupSpec, NodeInfo, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dtkit.cluster.devices import DevicePlan
    from dtkit.health.status import EngineStatus
    from dtkit.rpc import shared_memory
    from dtkit.rpc.transport import Transport

SNAPSHOTS_FOLDER = "snapshots"
INDEPENDENT_CALL_TIMEOUT_S = 30.0  # for what an engine does by itself
_POLL_S = 0.5  # between two looks at whether those who are waited for can answer
FAILURE_GRACE_S = 5.0  # for the other ranks once one has failed, and again after an interrupt
_REFORM_TIMEOUT_S = 30.0  # for what an interrupt broke to be formed anew
_WAIT_SLICE_S = 0.1
_FIRST_STEP_TIMEOUT_S, _CALL_TIMEOUT_MARGIN_S = 1800.0, 30.0


class EngineGroup:
    """The engines behind a :class:`~dtkit.rpc.transport.Transport`. `file_owner` owns the shared files."""

    def __init__(
        self,
        transport: Transport,
        folder: Path,
        file_owner: shared_memory.ProcessId,
        device_plan: DevicePlan,
        timeout: float,
        step_timeout: float | None,
        interface: str | None,
    ) -> None:
        self._transport, self._folder, self._file_owner, self._device_plan = transport, folder, file_owner, device_plan
        self._timeout, self.step_timeout, self._interface = timeout, step_timeout, interface
        # locks: while ipyparallel queues messages
        self._lock = threading.RLock()
        self._owner_id = time.time_ns()  # later notebooks get larger numbers
        self._generation = self._inherited_generation = -1
        self._is_formed = False  # whether all ranks have joined it
        self.uninitialized_ranks: set[int] = set()
        """Ranks of new engines, which hold no data and no model yet."""
        self._is_closed = False
        self._reform_thread: threading.Thread | None = None
        self._nodes: list[NodeInfo] = []
        self._engine_sys_path: list[str] = []
        self._host_by_rank: dict[int, str] = {}  # by rank, of those that were greeted
        self._is_single_host = True
        self.clock_offsets: list[float] | None = None
        """Seconds that each rank's clock is ahead of rank 0's; None on one host, where there is one clock."""
        self._uploaded_payloads: list[Payload] = []
        self._keys_to_free: collections.deque[str] = collections.deque()
        self._key_counter, self._restart_counter = itertools.count(), itertools.count()

    def check_open(self) -> None:
        """Raise ClusterClosedError if this cluster was closed."""
        if self._is_closed:
            raise ClusterClosedError("this cluster was closed; start another one with dtkit.Cluster()")

    @property
    def is_superseded(self) -> bool:
        """Whether another notebook has taken these engines over."""
        return False

    @property
    def can_be_reattached(self) -> bool:
        """Whether the engines outlive this notebook, so that another one can take them over."""
        return False

    def check_owned(self) -> None:
        """Raise SupersededError if another notebook is known to have these engines."""

    # -- who is there -----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeInfo]:
        """One row per rank; memory as it was when last asked (see `refresh_nodes`)."""
        return list(self._nodes)

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self._transport.engine_ids)

    @property
    def is_single_host(self) -> bool:
        """Whether all engines are on this host, so that they can map its files."""
        return self._is_single_host

    @property
    def folder(self) -> Path:
        """Of this cluster alone: where the group meets, and where each engine says how it stands."""
        return self._folder

    def __len__(self) -> int:
        return self.world_size

    @property
    def backend(self) -> str:
        """What carries the collectives: "gloo" or "nccl"."""
        return "nccl" if "nccl" in self._device_plan.backend else "gloo"

    @property
    def generation(self) -> int:
        """How many times the process group was formed anew."""
        return self._generation

    def refresh_nodes(self) -> list[NodeInfo]:
        """Ask every engine for its memory again."""
        self._set_nodes(self.call_all("node_info"))
        return self.nodes

    def _set_nodes(self, infos: Sequence[Any]) -> None:
        ids = self._transport.engine_ids
        self._nodes = [NodeInfo(rank=r, engine_id=ids[r], **info) for r, info in enumerate(infos)]

    def handshake(self, ranks: Sequence[int] | None = None) -> None:
        """Compare versions with every engine (of `ranks`: the others are gone), before anything else is said, and note
        where they are and what they can import.
        """
        ranks = list(range(self.world_size)) if ranks is None else ranks
        replies = self._exchange_handshakes(ranks)
        self._engine_sys_path = list(replies[0].value["path"])  # type: ignore[index]

    def _exchange_handshakes(self, ranks: Sequence[int]) -> list[Reply]:
        mine = get_handshake()
        replies = self.gather_replies(self.fan_out("handshake", ranks=ranks), self._timeout, ranks)
        for rank, reply in zip(ranks, replies, strict=True):
            theirs = reply.value
            if not isinstance(theirs, dict):
                reason = reply.failure.message if reply.failure else "no answer"
                raise VersionMismatchError(
                    f"rank {rank} can't load dtkit {__version__}: {reason}. Install the same dtkit-jupyter where the "
                    "engines run"
                )
            for name in ("dtkit", "python", "cloudpickle", "torch"):
                if mine[name] != theirs.get(name):
                    raise VersionMismatchError(
                        f"{name} is {mine[name]} in the notebook and {theirs.get(name)} on rank {rank} "
                        f"({theirs['host']}); they must be equal. Start the engines from the notebook's environment"
                    )
        self._host_by_rank |= {rank: str(reply.value["host"]) for rank, reply in zip(ranks, replies, strict=True)}  # type: ignore[index]
        self._check_hosts()
        return replies

    def _check_hosts(self) -> None:
        hosts = set(self._host_by_rank.values())
        self._is_single_host = hosts == {socket.gethostname()}
        if len(hosts) > 1 and self._interface is None:
            raise ClusterError(
                f"the engines run on {len(hosts)} hosts ({', '.join(sorted(hosts))}) and dtkit keeps to loopback by "
                "default; name the network between them, as in interface='eth0'. Tensor traffic on it is not encrypted"
            )

    # -- calls ------------------------------------------------------------------------------------------------

    def fan_out(
        self,
        op: str,
        *,
        each: Sequence[dict[str, Any]] | None = None,
        ranks: Sequence[int] | None = None,
        listen: Callable[[int, int, list[Any]], None] | None = None,
        **args: Any,
    ) -> list[Future[Reply]]:
        """Send one request to every rank (or to `ranks`), in order, under the lock. One future per rank, no waiting.

        `each` adds arguments by rank; `listen(rank, first, items)` gets what a rank publishes meanwhile.
        """
        chosen = range(self.world_size) if ranks is None else ranks
        with self._lock:
            self.check_open()
            same = None
            futures = []
            for k, rank in enumerate(chosen):
                if each is not None or same is None:
                    extra = each[k] if each is not None else {}
                    request = Request(op, self._owner_id, self._generation, {**args, **extra})
                    same = pickle.dumps(request, protocol=5)
                hear = None if listen is None else _bind_rank(listen, rank)
                futures.append(self._transport.send(rank, same, hear))
            return futures

    def call_all(self, op: str, *, timeout: float | None = None, **options: Any) -> list[Any]:
        """Fan out, wait, and return the values by rank. On failure the group is formed anew and the cause raised."""
        self.ensure_group_formed()
        self._free_unused_keys()
        futures: list[Future[Reply]] = []
        ranks, generation = options.get("ranks"), self._generation
        try:
            futures = self.fan_out(op, **options)
            replies = self.gather_replies(futures, timeout or self.call_timeout_s, ranks)
        except KeyboardInterrupt:
            self._is_formed = False  # before all else: another interrupt may come any moment
            self._abandon_call(
                AbandonedCall(op, generation, range(self.world_size) if ranks is None else ranks, futures)
            )
            raise
        return self.unwrap(replies)

    def ensure_group_formed(self) -> None:
        """Have the group formed, where an interrupt broke it or the last try to form it failed."""
        self.wait_until_reformed()
        if not self._is_formed:
            self.form_process_group()

    def _abandon_call(self, call: AbandonedCall) -> None:
        """Nobody waits for a call any longer: end it on the engines too, and form the group anew where that broke it.

        A further interrupt doesn't wait for that; the next call does.
        """
        self._reform_thread = threading.Thread(
            target=self._end_abandoned_call, args=(call,), name="dtkit-settle", daemon=True
        )
        self._reform_thread.start()
        self.wait_until_reformed()

    def _end_abandoned_call(self, call: AbandonedCall) -> None:
        """Where the sending was interrupted, some ranks may have the call, and wait there for others."""
        with contextlib.suppress(DtkitError):  # the next call meets the same, and says so
            if not call.futures:
                self.interrupt(call.ranks)
                self.form_process_group()
            elif not call.wait_for_turn(self._read_status):
                self._mark_group_intact(call)  # it will be done in its turn, for nobody
            elif left := call.get_pending_ranks():
                self.interrupt(left)
                replies = self.gather_replies(call.futures, FAILURE_GRACE_S, call.ranks)
                self.reform_if_broken([reply.failure for reply in replies if reply.failure is not None])
            elif failures := [f for future in call.futures if (f := future.result(0).failure) is not None]:
                self.reform_if_broken(failures)
            else:
                self._mark_group_intact(call)

    def _mark_group_intact(self, call: AbandonedCall) -> None:
        """Nothing was broken off: its group is whole, unless another one was formed since."""
        if self._generation == call.generation:
            self._is_formed = True

    def _read_status(self, rank: int) -> EngineStatus | None:
        """What a rank's watchdog wrote last."""
        return stacks.read_status(self._folder, self._nodes[rank]) if rank < len(self._nodes) else None

    def wait_until_reformed(self) -> None:
        """Wait until the group is formed anew that an interrupt broke; a signal is seen between two waits."""
        deadline, settling = time.monotonic() + _REFORM_TIMEOUT_S, self._reform_thread
        if settling is threading.current_thread():
            return
        while settling is not None and settling.is_alive() and time.monotonic() < deadline:
            settling.join(_WAIT_SLICE_S)

    def _free_unused_keys(self) -> None:
        keys = []
        with contextlib.suppress(IndexError):
            while True:
                keys.append(self._keys_to_free.popleft())
        if keys:
            self.fan_out("release", keys=keys)

    def unwrap(self, replies: Sequence[Reply]) -> list[Any]:
        """The replies' values; or, after forming the group anew, the first cause as an error."""
        failures = [r.failure for r in replies if r.failure is not None]
        if not failures:
            return [r.value for r in replies]
        cause = EngineError(drop_consequential_refusals(failures))
        try:
            self.reform_if_broken(failures)
        except DtkitError as unformed:
            raise cause from unformed
        raise cause

    def reform_if_broken(self, failures: Sequence[Failure]) -> None:
        """Form the group anew after failures, unless nothing was run or an engine is gone."""
        nothing_ran = self._is_formed and all(f.kind == "refused" for f in failures)
        if not nothing_ran and not any(f.is_engine_gone for f in failures):
            self.form_process_group()

    @property
    def call_timeout_s(self) -> float:
        """Seconds to wait for a call to all ranks: longer than any collective may take, never for ever."""
        return (self.step_timeout or _FIRST_STEP_TIMEOUT_S) + _CALL_TIMEOUT_MARGIN_S

    def gather_replies(
        self,
        futures: Sequence[Future[Reply]],
        timeout: float,
        ranks: Sequence[int] | None = None,
        *,
        grace_from_first_reply: bool = False,
        grace_s: float | None = None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> list[Reply]:
        """Wait for one reply per rank (of `ranks`). Once one failed the others get a moment, then an interrupt.

        Each of the two is given `grace` seconds to take effect. With `together`, once one has answered: whoever is far
        behind then waits for it in vain. `meanwhile` is called twice a second.
        """
        ranks = range(len(futures)) if ranks is None else ranks
        grace_s = FAILURE_GRACE_S if grace_s is None else grace_s
        begun = time.monotonic()
        deadline = begun + timeout
        arrived = threading.Event()
        failed_at: list[float] = []

        def note(future: Future[Reply]) -> None:
            # waits: already done here
            if grace_from_first_reply or future.result().failure is not None:
                failed_at.append(time.monotonic())
            arrived.set()

        for future in futures:
            future.add_done_callback(note)
        interrupted = silent = False
        while not all(f.done() for f in futures):
            if self._is_closed:  # nobody will answer any more
                raise ClusterClosedError(
                    "this cluster was closed during the call; start another one with dtkit.Cluster()"
                )
            if silent:
                self.check_reachable()
                on_poll()
            now = time.monotonic()
            limit = min(deadline, failed_at[0] + grace_s) if failed_at else deadline
            if now >= limit:
                if interrupted:
                    break
                interrupted = True
                self._transport.interrupt([r for r, f in zip(ranks, futures, strict=True) if not f.done()])
                failed_at[:] = [now]
                deadline = now + grace_s
                continue
            silent = not arrived.wait(min(limit - now, _POLL_S))
            arrived.clear()
        waited = time.monotonic() - begun
        # waits: already done here
        return [
            f.result() if f.done() else self._make_stuck_reply(r, waited) for r, f in zip(ranks, futures, strict=True)
        ]

    def _make_stuck_reply(self, rank: int, waited_s: float) -> Reply:
        node = self._nodes[rank] if rank < len(self._nodes) else None
        message = (
            f"no answer within {waited_s:.0f} s, nor to an interrupt. The engine is stuck; close this cluster and "
            "start "
            "another one"
        )
        failure = Failure(rank, node.host if node else "?", "TimeoutError", message, "", kind="stuck")
        return Reply(failure=failure)

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Send SIGINT to engines, as the notebook's interrupt button does for the kernel. Without waiting.

        One that is stopped goes on (SIGCONT), else it would not hear.
        """
        self.check_open()
        self._transport.interrupt(list(range(self.world_size)) if ranks is None else ranks, wake=True)

    def call_independently(
        self, op: str, ranks: Sequence[int], *, grace_from_first_reply: bool = False, **options: Any
    ) -> dict[int, Any]:
        """What each of these ranks answers by itself, needing no group; those that fail in it give nothing."""
        replies = self.gather_replies(
            self.fan_out(op, ranks=ranks, **options),
            INDEPENDENT_CALL_TIMEOUT_S,
            ranks,
            grace_from_first_reply=grace_from_first_reply,
        )
        return {rank: reply.value for rank, reply in zip(ranks, replies, strict=True) if reply.failure is None}

    def acquire_ownership(self) -> list[EngineInventory]:
        """Take over engines that another notebook had, with what they hold. Of each that answers, what that is."""
        lost = self.find_lost_ranks()
        # A notebook that died while it sent a dispatch has left ranks with it, who wait for those without.
        found = self.call_independently(
            "acquire_ownership",
            [rank for rank in range(self.world_size) if rank not in lost],
            grace_from_first_reply=True,
        )
        if len(found) < self.world_size - len(lost) or not found:
            raise ClusterError(f"{len(found)} of {self.world_size} engines answered; the others are busy, or stuck")
        self._generation = self._inherited_generation = max(heritage.generation for heritage in found.values())
        return list(found.values())

    def return_ownership(self, former_owner: int) -> None:
        """Have the engines belong to another notebook again, in a group of the generation that it knows.

        Where another one has adopted them meanwhile, they refuse. DtkitError where the group can't be formed; without
        one they stay, since no call would get through to them.
        """
        lost, ours = self.find_lost_ranks(), self._generation
        if ours > self._inherited_generation and not lost:
            self._generation = self._inherited_generation - 1
            _remove_store(self._folder / f"store-{self._inherited_generation}")
            self.form_process_group()
            for generation in range(self._inherited_generation + 1, ours + 1):
                _remove_store(self._folder / f"store-{generation}")
        self.call_independently(
            "return_ownership", [rank for rank in range(self.world_size) if rank not in lost], owner=former_owner
        )

    def check_reachable(self) -> None:
        """Raise ClusterError where nothing can reach the engines any more."""
        self._transport.check_reachable()

    def find_lost_ranks(self) -> list[int]:
        """The ranks whose engines have ended."""
        return self._transport.find_lost_ranks()

    def kill(self, ranks: Sequence[int]) -> None:
        """End these engines' processes at once."""
        self._transport.kill(ranks)

    def clear_if_all_new(self) -> bool:
        """Whether none is left that holds what all held, asked once: they are alike again."""
        none = len(self.uninitialized_ranks) == self.world_size
        if none:
            self.uninitialized_ranks.clear()
        return none

    def replace(self, ranks: Sequence[int]) -> None:
        """Have new engines at these ranks, with the data and models that the others hold. Jobs end: make them anew."""
        self.uninitialized_ranks |= set(ranks)
        self._kill_processes(ranks)
        self._transport.replace(ranks)
        self._exchange_handshakes(ranks)
        self.form_process_group(ranks_changed=True)
        self.fan_out("warm_up", ranks=list(ranks))
        kept = [rank for rank in range(self.world_size) if rank not in self.uninitialized_ranks]
        if kept:
            (shipment,) = self.call_all("export_data", ranks=kept[:1])
            self.call_all("import_data", ranks=sorted(self.uninitialized_ranks), shipment=shipment)
            shipment.discard()
            self.uninitialized_ranks.clear()
        self.write_cluster_file()

    def _kill_processes(self, ranks: Sequence[int]) -> None:
        """The controller forgets an engine that is stopped: no message ends it, and it would stay for ever."""
        here = [node for node in self._nodes if node.rank in ranks and node.host == socket.gethostname()]
        reaper.kill_members(self._folder, [node.pid for node in here])

    def shrink(self, ranks: Sequence[int]) -> None:
        """Go on without these ranks, whose shards the others take. Those above move down. Jobs end: make them anew."""
        devices = tuple(device for rank, device in enumerate(self._device_plan.devices) if rank not in ranks)
        self._transport.kill(ranks)
        self._kill_processes(ranks)
        self._transport.drop(ranks)
        self._device_plan = dataclasses.replace(self._device_plan, devices=devices)
        self._host_by_rank = dict(
            enumerate(host for rank, host in sorted(self._host_by_rank.items()) if rank not in ranks)
        )
        self._check_hosts()
        self.form_process_group(ranks_changed=True)
        self.call_all("repartition")
        self.write_cluster_file()

    def write_cluster_file(self) -> None:
        """The ranks are others now: say so to whoever may come later."""

    def form_process_group(self, *, ranks_changed: bool = False) -> None:
        """Form the process group (anew): the next generation, met at a file of its own.

        `others`: some ranks are not who they were.
        """
        self.wait_until_reformed()
        with self._lock:
            self.check_open()
            self._generation += 1
            self._is_formed = False
            store = self._folder / f"store-{self._generation}"
            store.touch(mode=0o600)
            generation = self._generation
            specs = [self._make_group_spec(rank, store) for rank in range(self.world_size)]
            join = {"owner": self._owner_id, "keeper": self._file_owner if self._is_single_host else None}
            each = [{"spec": s, "step_timeout": self.step_timeout, "others": ranks_changed, **join} for s in specs]
            futures = self.fan_out("join_group", each=each)
        called_off = store.with_name(store.name + ABORT_FLAG)
        for future in futures:
            # waits: already done here
            future.add_done_callback(lambda done: _write_abort_flag(called_off, done.result()))
        try:
            replies = self.gather_replies(futures, self._timeout + 5)
        except KeyboardInterrupt:  # who waits there for a rank that does not come is to wait no longer either
            called_off.touch(mode=0o600)
            raise
        _remove_store(store.with_name(f"store-{generation - 1}"))  # also what an interrupt left: all have come on
        for old in self._folder.glob(f"{store.name}.*"):  # the group's own file stays: subgroups (of a mesh) meet there
            old.unlink(missing_ok=True)
        failures = [r.failure for r in replies if r.failure is not None]
        if failures:
            raise EngineError(failures)
        with self._lock:
            self._is_formed = self._generation == generation  # another thread may have begun the next one meanwhile
        self._set_nodes([r.value for r in replies])
        self.clock_offsets = None if self._is_single_host else self._compare_clocks()

    def _compare_clocks(self) -> list[float]:
        """How far each rank's clock is ahead of the first one's, in seconds."""
        replies = self.gather_replies(self.fan_out("read_clock"), self._timeout)
        if failures := [reply.failure for reply in replies if reply.failure is not None]:
            raise EngineError(
                drop_consequential_refusals(failures)
            )  # `values` would form the group anew, which ends in here
        times = np.array([reply.value for reply in replies])
        return list(np.median(times - times[0], axis=1).tolist())

    def _make_group_spec(self, rank: int, store: Path) -> GroupSpec:
        from dtkit.engine.comm.process_group import find_loopback_interface

        return GroupSpec(
            rank=rank,
            world_size=self.world_size,
            generation=self._generation,
            backend=self._device_plan.backend,
            device=self._device_plan.devices[rank],
            store_path=str(store),
            interface=self._interface or find_loopback_interface(),
            threads=self._device_plan.threads,
            timeout_s=self._timeout,
        )

    # -- shipping ---------------------------------------------------------------------------------------------

    def make_key(self, kind: str) -> str:
        """A name that was not used before in this cluster."""
        return f"{kind}-{self._owner_id:x}-{next(self._key_counter)}"

    def pack(self, obj: Any, name: str | None = None) -> pickling.PackedObject:
        """Take apart what is to travel; modules that the engines can't import travel by value."""
        return pickling.pack_object(obj, by_value=pickling.find_user_modules(self._engine_sys_path), name=name)

    def dumps(self, obj: Any, name: str | None = None) -> bytes:
        """As `pack`, for small things."""
        return pickling.dumps(obj, pickling.find_user_modules(self._engine_sys_path), name=name)

    def upload(self, packed: pickling.PackedObject) -> Payload:
        """Put a packed object where all engines can take it; deleted with :meth:`Payload.discard`, or on `close`."""
        shipment = make_payload(packed, self._file_owner if self._is_single_host else None)
        self._uploaded_payloads.append(shipment)
        return shipment

    def call_all_with_payload(
        self, op: str, packed: pickling.PackedObject, *, broadcast: bool = False, **args: Any
    ) -> list[Any]:
        """Have every rank do `op` with a packed object, mapped from one file; or, with `broadcast` and wherever
        there are several hosts, sent to rank 0 and from there over the data plane.
        """
        broadcast = broadcast or not self._is_single_host
        shipment = self.upload(packed)
        rest = shipment.without_buffers() if broadcast else shipment
        each = [{"shipment": shipment if rank == 0 else rest} for rank in range(self.world_size)]
        try:
            return self.call_all(op, each=each, broadcast=broadcast, **args)
        finally:
            self.discard_payload(shipment)

    def next_restart_count(self) -> int:
        """A number for each script that makes its own group: torchrun's restart count."""
        return next(self._restart_counter)

    def free_later(self, key: str) -> None:
        """Free data, a model or a job with the next call. A finalizer may call this, from any thread."""
        self._keys_to_free.append(key)

    def discard_payload(self, payload: Payload) -> None:
        """Delete an upload that nobody will open again."""
        payload.discard()
        with contextlib.suppress(ValueError):
            self._uploaded_payloads.remove(payload)

    def end_early(self, job: str, *, enabled: bool) -> None:
        """Have a dispatch of this job end where its ranks next decide whether to go on."""
        mark = self._folder / f"{END_EARLY_PREFIX}{job}"
        if enabled:
            with contextlib.suppress(OSError):  # a full disk: then it ends when all its steps are taken
                mark.touch(mode=0o600)
        elif mark.exists():  # where there is none, the folder may be one that nobody can write to any more
            mark.unlink(missing_ok=True)

    def make_snapshot_folder(self, job: str) -> Path:
        """Where a run puts what it may have to go back to."""
        (self._folder / SNAPSHOTS_FOLDER).mkdir(mode=0o700, exist_ok=True)
        return self._folder / SNAPSHOTS_FOLDER / job

    def set_job_flag(self, *, present: bool) -> None:
        """Tell the warden whether a job is in memory, which makes the lease longer."""
        mark = self._folder / reaper.JOB_FLAG
        if present:
            mark.touch(mode=0o600)
        else:
            mark.unlink(missing_ok=True)


def _remove_store(store: Path) -> None:
    """Of a generation that is over, or was never formed, with what its ranks left beside it."""
    for path in [store, *store.parent.glob(f"{store.name}.*")]:
        path.unlink(missing_ok=True)


def _write_abort_flag(abort_flag: Path, reply: Reply) -> None:
    """Let those who wait for a rank that could not join know; the folder may be gone by now."""
    if reply.failure is not None:
        with contextlib.suppress(OSError):
            abort_flag.touch(mode=0o600)


def _bind_rank(listen: Callable[[int, int, list[Any]], None], rank: int) -> Callable[[int, list[Any]], None]:
    return lambda first, items: listen(rank, first, items)
