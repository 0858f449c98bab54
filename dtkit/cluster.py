"""Engines as ordered ranks: start or attach, call, re-form, close. The only module that imports ipyparallel.

The layout of a started cluster: the notebook; a warden that outlives it (:mod:`dtkit.warden`); ipyparallel's
controller; and one engine set per rank, so that each engine has an environment of its own. All of it lives in one
folder that only the user can enter: connection files, logs, and the FileStore that the process group meets at.

Lockstep. A call to all ranks is N messages. Two threads that fan out at the same time would reach the engines in
different orders, and collectives would deadlock; so one method (`fan_out`) sends, under one lock, and ``%%px`` goes
through a view that takes the same lock.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import html
import itertools
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp

from dtkit import __version__, host, shared, units, warden, wire
from dtkit.dashboard.progress import waiting
from dtkit.engine import limits
from dtkit.engine.probe import hello
from dtkit.entry import MIMETYPE, Entry
from dtkit.errors import ClusterClosed, ClusterError, EngineError, VersionMismatch
from dtkit.records import Failure, GroupSpec, NodeInfo, Reply, Request
from dtkit.shipment import Shipment, ship

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from dtkit.partition import Partition
    from dtkit.replicas import Replicas
    from dtkit.run import Run
    from dtkit.strategies.base import Strategy
    from dtkit.task import Task
    from dtkit.transport import Transport

LEASE_S, JOB_LEASE_S = 60.0, 1800.0
_HUB_BYTES = 256 * 1024**2  # what the hub keeps of requests and results at most


class Cluster:
    """Engines on this machine (or wherever `launcher` starts them), as ranks 0 to n - 1 of one process group.

    Parameters
    ----------
    n
        Engines. By default one per GPU, else what cores and memory carry, at most four.
    launcher
        "local", or the name of any ipyparallel launcher ("ssh", "slurm", "mpi", ...).
    device
        "auto" (a GPU where there is one), "cpu" or "cuda".
    threads
        Torch threads per engine; by default the cores divided among the engines.
    memory_limit
        Bytes (or text such as "600MB") that each engine's process may allocate for data.
    timeout
        Seconds that starting may take, and forming the group.
    step_timeout
        Seconds that a collective may wait. By default 30 minutes for the first step of a job, then 60 seconds or 20
        median steps, whichever is longer.
    lease
        Seconds that engines live without a notebook: by default 60, or 30 minutes with a job in memory.
    interface
        Network interface of the collectives. By default the loopback interface, which nobody outside this host
        can reach; name another one to use engines on several hosts. Tensor traffic is not encrypted.

    """

    def __init__(
        self,
        n: int | None = None,
        *,
        launcher: str = "local",
        device: str = "auto",
        threads: int | None = None,
        memory_limit: int | str | None = None,
        timeout: float = 60,
        step_timeout: float | None = None,
        lease: float | None = None,
        interface: str | None = None,
    ) -> None:
        n = _checked_size(n, launcher)
        limit = None if memory_limit is None else units.parse_bytes(memory_limit)
        plan = _plan_devices(n, device, threads)
        shared.sweep()
        with waiting(f"starting {units.plural(n, 'engine')}") as progress:
            transport = _Started(n, launcher, plan, limit, timeout, lease)
            progress.update(f"loading torch on {units.plural(n, 'engine')}")
            self._open(transport, transport.folder, transport.keeper, plan, timeout, step_timeout, interface)

    @classmethod
    def over(
        cls,
        transport: Transport,
        *,
        device: str = "auto",
        threads: int | None = None,
        timeout: float = 60,
        step_timeout: float | None = None,
        interface: str | None = None,
    ) -> Cluster:
        """A cluster over engines that somebody else started (see :func:`attach`), or over a test double."""
        self = cls.__new__(cls)
        folder = Path(tempfile.mkdtemp(prefix="dtkit-"))
        plan = _plan_devices(len(transport.engine_ids), device, threads)
        self._open(transport, folder, shared.Owner.of(), plan, timeout, step_timeout, interface)
        return self

    def _open(
        self,
        transport: Transport,
        folder: Path,
        keeper: shared.Owner,
        plan: _DevicePlan,
        timeout: float,
        step_timeout: float | None,
        interface: str | None,
    ) -> None:
        self._transport, self._folder, self._keeper, self._plan = transport, folder, keeper, plan
        self._timeout, self.step_timeout, self._interface = timeout, step_timeout, interface
        self._lock = threading.RLock()
        self._owner = time.time_ns()  # later notebooks get larger numbers
        self._generation = -1
        self._closed = False
        self._keys = itertools.count()
        self._nodes: list[NodeInfo] = []
        self._uploads: list[Shipment] = []
        self._unwanted: collections.deque[str] = collections.deque()
        self.current_run: Run | None = None
        self._attempts = itertools.count()
        try:
            self._engine_path = self._greet()
            self.form()
            self.fan_out("warm")  # nobody waits for it: the first step will find it done
        except BaseException:
            self.close()
            raise
        atexit.register(self._at_exit)

    # -- who is there -----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeInfo]:
        """One row per rank; memory as it was when last asked (see `refresh`)."""
        return list(self._nodes)

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self._transport.engine_ids)

    def __len__(self) -> int:
        return self.world_size

    @property
    def backend(self) -> str:
        """What carries the collectives: "gloo" or "nccl"."""
        return "nccl" if "nccl" in self._plan.backend else "gloo"

    @property
    def generation(self) -> int:
        """How many times the process group was formed anew."""
        return self._generation

    def refresh(self) -> list[NodeInfo]:
        """Ask every engine for its memory again."""
        self._take_nodes(self.ask("info"))
        return self.nodes

    def _take_nodes(self, infos: Sequence[Any]) -> None:
        ids = self._transport.engine_ids
        self._nodes = [NodeInfo(rank=r, engine_id=ids[r], **info) for r, info in enumerate(infos)]

    def _greet(self) -> list[str]:
        """Compare versions with every engine, before anything else is said. Returns the engines' import path."""
        mine = hello()
        replies = self.collect(self.fan_out("hello"), self._timeout)
        for rank, reply in enumerate(replies):
            theirs = reply.value
            if not isinstance(theirs, dict):
                reason = reply.failure.message if reply.failure else "no answer"
                raise VersionMismatch(
                    f"rank {rank} can't load dtkit {__version__}: {reason}. Install the same dtkit-jupyter where the "
                    "engines run"
                )
            for name in ("dtkit", "python", "cloudpickle", "torch"):
                if mine[name] != theirs.get(name):
                    raise VersionMismatch(
                        f"{name} is {mine[name]} in the notebook and {theirs.get(name)} on rank {rank} "
                        f"({theirs['host']}); they must be equal. Start the engines from the notebook's environment"
                    )
        hosts = {str(r.value["host"]) for r in replies if isinstance(r.value, dict)}
        self._one_host = hosts == {str(mine["host"])}
        if len(hosts) > 1 and self._interface is None:
            raise ClusterError(
                f"the engines run on {len(hosts)} hosts ({', '.join(sorted(hosts))}) and dtkit keeps to loopback by "
                "default; name the network between them, as in interface='eth0'. Tensor traffic on it is not encrypted"
            )
        return list(replies[0].value["path"])  # type: ignore[index]

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
                    request = Request(op, self._owner, self._generation, {**args, **extra})
                    same = pickle.dumps(request, protocol=5)
                hear = None if listen is None else _for_rank(listen, rank)
                futures.append(self._transport.send(rank, same, hear))
            return futures

    def ask(self, op: str, *, timeout: float | None = None, **options: Any) -> list[Any]:
        """Fan out, wait, and return the values by rank. On failure the group is formed anew and the cause raised."""
        self._free_unwanted()
        replies = self.collect(self.fan_out(op, **options), timeout or self.patience)
        return self.values(replies)

    def _free_unwanted(self) -> None:
        keys = []
        with contextlib.suppress(IndexError):
            while True:
                keys.append(self._unwanted.popleft())
        if keys:
            self.fan_out("unload", keys=keys)

    def values(self, replies: Sequence[Reply]) -> list[Any]:
        """The replies' values; or, after forming the group anew, the first cause as an error."""
        failures = [r.failure for r in replies if r.failure is not None]
        if not failures:
            return [r.value for r in replies]
        self.heal(failures)
        raise EngineError(failures)

    def heal(self, failures: Sequence[Failure]) -> None:
        """Form the group anew after failures, unless nothing was run or an engine is gone."""
        if all(f.kind == "refused" for f in failures) or any(f.kind in ("lost", "stuck") for f in failures):
            return
        self.form()

    @property
    def patience(self) -> float:
        """Seconds to wait for a call to all ranks: longer than any collective may take, never for ever."""
        return (self.step_timeout or 1800.0) + 30.0

    def collect(self, futures: Sequence[Future[Reply]], timeout: float) -> list[Reply]:
        """Wait for one reply per rank. Once one rank failed the others get five seconds, then an interrupt."""
        deadline = time.monotonic() + timeout
        arrived = threading.Event()
        failed_at: list[float] = []

        def note(future: Future[Reply]) -> None:
            if future.result().failure is not None:
                failed_at.append(time.monotonic())
            arrived.set()

        for future in futures:
            future.add_done_callback(note)
        interrupted = False
        while not all(f.done() for f in futures):
            if self._closed:  # nobody will answer any more
                raise ClusterClosed("this cluster was closed during the call; start another one with dtkit.Cluster()")
            now = time.monotonic()
            limit = min(deadline, failed_at[0] + 5.0) if failed_at else deadline
            if now >= limit:
                if interrupted:
                    break
                interrupted = True
                self.interrupt([r for r, f in enumerate(futures) if not f.done()])
                failed_at[:] = [now]
                deadline = now + 5.0
                continue
            arrived.wait(min(limit - now, 1.0))
            arrived.clear()
        return [f.result() if f.done() else self._stuck(r, timeout) for r, f in enumerate(futures)]

    def _stuck(self, rank: int, timeout: float) -> Reply:
        node = self._nodes[rank] if rank < len(self._nodes) else None
        message = (
            f"no answer within {timeout:.0f} s, nor to an interrupt. The engine is stuck; close this cluster and start "
            "another one"
        )
        failure = Failure(rank, node.host if node else "?", "TimeoutError", message, "", kind="stuck")
        return Reply(failure=failure)

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Send SIGINT to engines, as the notebook's interrupt button does for the kernel. Without waiting."""
        self.check_open()
        self._transport.interrupt(list(range(self.world_size)) if ranks is None else ranks)

    def form(self) -> None:
        """Form the process group (anew): the next generation, met at a file of its own."""
        with self._lock:
            self._generation += 1
            store = self._folder / f"store-{self._generation}"
            specs = [self._group_spec(rank, store) for rank in range(self.world_size)]
            join = {"owner": self._owner, "keeper": self._keeper if self._one_host else None}
            each = [{"spec": s, "step_timeout": self.step_timeout, **join} for s in specs]
            futures = self.fan_out("join", each=each)
        replies = self.collect(futures, self._timeout + 5)
        store.unlink(missing_ok=True)
        failures = [r.failure for r in replies if r.failure is not None]
        if failures:
            raise EngineError(failures)
        self._take_nodes([r.value for r in replies])

    def _group_spec(self, rank: int, store: Path) -> GroupSpec:
        from dtkit.engine.comm import loopback

        return GroupSpec(
            rank=rank,
            world_size=self.world_size,
            generation=self._generation,
            backend=self._plan.backend,
            device=self._plan.devices[rank],
            store=str(store),
            interface=self._interface or loopback(),
            threads=self._plan.threads,
            timeout_s=self._timeout,
        )

    # -- shipping ---------------------------------------------------------------------------------------------

    def new_key(self, kind: str) -> str:
        """A name that was not used before in this cluster."""
        return f"{kind}-{next(self._keys)}"

    def pack(self, obj: Any, name: str | None = None) -> wire.Packed:
        """Take apart what is to travel; modules that the engines can't import travel by value."""
        return wire.pack(obj, by_value=wire.user_modules(self._engine_path), name=name)

    def dumps(self, obj: Any, name: str | None = None) -> bytes:
        """As `pack`, for small things."""
        return wire.dumps(obj, wire.user_modules(self._engine_path), name=name)

    def upload(self, packed: wire.Packed) -> Shipment:
        """Put a packed object where all engines can take it; deleted with :meth:`Shipment.discard`, or on `close`."""
        shipment = ship(packed, self._keeper if self._one_host else None)
        self._uploads.append(shipment)
        return shipment

    def deliver(self, op: str, packed: wire.Packed, *, broadcast: bool = False, **args: Any) -> list[Any]:
        """Have every rank do `op` with a packed object, mapped from one file; or, with `broadcast` and wherever
        there are several hosts, sent to rank 0 and from there over the data plane.
        """
        broadcast = broadcast or not self._one_host
        shipment = self.upload(packed)
        rest = shipment.without_buffers() if broadcast else shipment
        each = [{"shipment": shipment if rank == 0 else rest} for rank in range(self.world_size)]
        try:
            return self.ask(op, each=each, broadcast=broadcast, **args)
        finally:
            self.discard(shipment)

    def next_attempt(self) -> int:
        """A number for each script that makes its own group: torchrun's restart count."""
        return next(self._attempts)

    def let_go(self, key: str) -> None:
        """Free data, a model or a job with the next call. A finalizer may call this, from any thread."""
        self._unwanted.append(key)

    def discard(self, shipment: Shipment) -> None:
        """Delete an upload that nobody will open again."""
        shipment.discard()
        with contextlib.suppress(ValueError):
            self._uploads.remove(shipment)

    def note_job(self, *, present: bool) -> None:
        """Tell the warden whether a job is in memory, which makes the lease longer."""
        mark = self._folder / warden.JOB
        if present:
            mark.touch(mode=0o600)
        else:
            mark.unlink(missing_ok=True)

    # -- what a user calls ------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, own_group: bool = False, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, inside the process group; the results by rank.

        Shows live what the ranks report by :func:`dtkit.log` and print. An interrupt reaches the engines.
        ``own_group=True`` gives `fn` torchrun's environment instead, for a script that makes its own group.
        """
        task = self.submit(fn, *args, own_group=own_group, **kwargs)
        return task.follow()

    def submit(self, fn: Callable[..., Any], *args: Any, own_group: bool = False, **kwargs: Any) -> Task:
        """As :meth:`run`, without waiting: a handle that shows itself."""
        from dtkit import task

        return task.start(self, fn, args, kwargs, own_group=own_group)

    def partition(
        self,
        data: Any,
        *,
        by: str = "contiguous",
        weights: Sequence[float] | None = None,
        labels: Any = None,
        seed: int | None = None,
    ) -> Partition:
        """One shard of `data` per rank. Shows who got what.

        Parameters
        ----------
        data
            A tuple of arrays (numpy or torch) of equal lengths, of which the last is the target and the others are the
            model's positional inputs; or a map-style Dataset; or a function that returns one of these on the engine.
        by
            "contiguous", "strided", or "stratified" (every class spread evenly over the ranks).
        weights
            The share of each rank; by default equal shards, whose sizes differ by at most one.
        labels
            One per row, for "stratified" and for the picture; by default the target where it holds classes.
        seed
            Permutes the rows before they are cut; None keeps their order.

        """
        from dtkit import placing

        self.check_open()
        return placing.partition(self, data, by=by, weights=weights, labels=labels, seed=seed)

    def broadcast(self, model: Any) -> Replicas:
        """The model on every rank with identical parameters and buffers. Shows a checksum per rank."""
        from dtkit import replicas

        self.check_open()
        return replicas.broadcast(self, model)

    def train(
        self,
        model: Any,
        data: Any,
        *,
        optimizer: Callable[..., Any],
        batch_size: int,
        loss: Callable[..., Any] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        strategy: Strategy | None = None,
        shuffle: str | None = "shard",
        step: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        valid: Any = None,
        seed: int = 0,
        start: bool = True,
    ) -> Run:
        """Train `model` on `data` and return at once: the run is a handle, a dashboard and something to await.

        Parameters
        ----------
        model
            An ``nn.Module`` (yours stays untouched), or what :meth:`broadcast` returned.
        data
            A :class:`Partition`, or raw data as for :meth:`partition` (permuted by `seed`, then cut).
        optimizer
            A function from parameters to an optimiser, as in ``lambda params: torch.optim.SGD(params, lr=0.1)``.
        batch_size
            Samples per update, over all ranks.
        loss
            ``loss(output, target)``: the mean over samples, or a pair (sum, weight).
        epochs, steps
            How long: one of them.
        strategy
            How to parallelise; :class:`DataParallel` by default.
        shuffle
            "shard": each rank its own rows, in an order of its own. "global": any number of ranks sees the same rows in
            each step, so that training is the same up to rounding. None: rows in order.
        step
            ``step(model, batch)`` instead of `loss`, for batches of any form; returns what `loss` may return.
        metrics
            Names and functions of (output, target) that return means over samples, for `valid` and `Run.evaluate`.
        valid
            Held-out data, evaluated after each epoch.
        seed
            Of the order of rows and of random numbers on the engines.
        start
            False leaves the run paused before its first step, for ``run.step()``.

        Raises
        ------
        ValueError, TypeError
            For what can't work, before anything starts.
        RunError
            While another run is running. One that is paused or has ended is released, its weights kept.
        EngineError
            Where the engines could not set the training up.

        """
        from dtkit import training

        options = training.Options(
            optimizer, batch_size, loss, epochs, steps, strategy, shuffle, step, metrics, valid, seed, start
        )
        return training.train(self, model, data, options)

    def check_open(self) -> None:
        """Raise ClusterClosed where this cluster was closed."""
        if self._closed:
            raise ClusterClosed("this cluster was closed; start another one with dtkit.Cluster()")

    def activate(self) -> None:
        """Make ipyparallel's ``%px`` and ``%%px`` speak to these engines, between dispatches."""
        self.check_open()
        view = getattr(self._transport, "locked_view", None)
        if view is None:
            raise ClusterError("these engines are no ipyparallel engines, so %%px can't reach them")
        view(self._lock).activate()

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run, then everything that this cluster started. Idempotent."""
        with self._lock:
            if self._closed:
                return
            run, self.current_run = self.current_run, None
        if run is not None:
            run.abandon()
        with self._lock:
            self._closed = True
        for shipment in self._uploads:
            shipment.discard()
        self._transport.close()
        with contextlib.suppress(OSError):
            for path in self._folder.glob("store-*"):
                path.unlink()
            (self._folder / warden.JOB).unlink(missing_ok=True)
            self._folder.rmdir()  # somebody else's engines: the folder is ours alone, and empty by now
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """A script that ends takes its engines along; a kernel that ends leaves them to the lease."""
        if not _in_kernel():
            self.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "Cluster(closed)"
        return f"Cluster of {self.world_size} engines, {self.backend}\n" + "\n".join(_text_table(self._table()))

    def _table(self) -> list[list[str]]:
        head = [
            "rank",
            "engine id",
            "host",
            "pid",
            "device",
            "memory used",
            "memory free",
            "threads",
            "backend",
        ]
        rows = [
            [
                str(n.rank),
                str(n.engine_id),
                n.host,
                str(n.pid),
                n.device,
                units.size(n.memory_total - n.memory_free),
                units.size(n.memory_free),
                str(n.threads),
                self.backend,
            ]
            for n in self._nodes
        ]
        return [head, *rows]

    def _repr_html_(self) -> str:
        if self._closed:
            return "<p>Cluster(closed)</p>"
        head, *rows = self._table()
        cells = "".join(f"<th>{html.escape(c)}</th>" for c in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        note = f"<p>{html.escape(self._plan.note)}</p>" if self._plan.note else ""
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{note}"


def attach(client: ipp.Client, **options: Any) -> Cluster:
    """Take over the engines of an ipyparallel cluster that somebody else started, by whatever launcher.

    `client` is a connected ``ipyparallel.Client``; the options are those of :class:`Cluster` that make sense for
    engines that run already (device, threads, timeout, step_timeout, interface). ``close()`` leaves the engines
    running.
    """
    if not isinstance(client, ipp.Client):
        raise TypeError(
            f"attach(client={client!r}): client must be an ipyparallel.Client, as in attach(client=ipp.Cluster(n=2)"
            ".start_and_connect_sync())"
        )
    if not client.ids:
        raise ClusterError("the client has no engines yet; call client.wait_for_engines(n) first")
    return Cluster.over(_Engines(client, list(client.ids)), **options)


# --- ipyparallel ------------------------------------------------------------------------------------------------


class _Engines:
    """The transport over a connected client. Leaves engines alone when closed."""

    def __init__(self, client: ipp.Client, engine_ids: list[int]) -> None:
        self._client = client
        self.engine_ids = engine_ids
        self._entry = Entry()

    def send(self, rank: int, message: bytes, listen: Callable[[int, list[Any]], None] | None = None) -> Future[Reply]:
        """See :class:`~dtkit.transport.Transport`."""
        reply: Future[Reply] = Future()
        if self.engine_ids[rank] not in self._client.ids:
            reply.set_result(_lost(rank))
            return reply
        view = self._client.direct_view(self.engine_ids[rank])
        result = view.apply_async(self._entry, message)
        if listen is not None:
            _Listener(self._client, result, listen, reply).start()
        result.add_done_callback(lambda done: reply.set_result(self._read(rank, done)))
        return reply

    def _read(self, rank: int, done: Any) -> Reply:
        """What came back, whatever it is; and forget it in the client, whose tables would grow for ever."""
        for msg_id in done.msg_ids:
            self._client.results.pop(msg_id, None)
            with contextlib.suppress(ValueError):
                self._client.history.remove(msg_id)
        try:
            return pickle.loads(done.result(timeout=0))  # type: ignore[no-any-return]
        except ipp.error.EngineError as error:
            return _lost(rank, str(error))
        except ipp.RemoteError as error:
            failure = Failure(rank, "?", error.ename, error.evalue, error.traceback or "")
            return Reply(failure=failure)

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Through each engine's nanny."""
        alive = [self.engine_ids[r] for r in ranks if self.engine_ids[r] in self._client.ids]
        if alive:
            self._client.send_signal(signal.SIGINT, targets=alive, block=False)

    def locked_view(self, lock: threading.RLock) -> ipp.DirectView:
        """A view for ``%%px`` that fans out under the cluster's lock."""
        view = _LockedView(self._client, self._client._mux_stream, targets=self.engine_ids)  # noqa: SLF001 - as Client.direct_view
        view.lock = lock
        view.block = True  # %%px ends when the engines have run it: what they print stands under it, errors are raised
        return view

    def close(self) -> None:
        """Nothing was started here."""


class _Listener:
    """Hands on what an engine publishes while a call runs: the client collects, a thread looks."""

    def __init__(
        self, client: ipp.Client, result: Any, listen: Callable[[int, list[Any]], None], reply: Future[Reply]
    ) -> None:
        self._metadata = client.metadata[result.msg_ids[0]]
        self._listen, self._over = listen, threading.Event()
        self._seen = 0
        reply.add_done_callback(lambda _: self._over.set())

    def start(self) -> None:
        threading.Thread(target=self._run, name="dtkit-listen", daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            outputs = self._metadata["outputs"]
            while self._seen < len(outputs):
                data = outputs[self._seen]["data"].get(MIMETYPE)
                outputs[self._seen] = None  # handed on; the client would keep it
                self._seen += 1
                if data is not None:
                    self._listen(data["first"], data["items"])


class _LockedView(ipp.DirectView):  # type: ignore[misc]  # ipyparallel has no types
    """A DirectView whose fan-outs take the cluster's lock."""

    lock: Any = contextlib.nullcontext()

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        block = kwargs.pop("block", None)
        with self.lock:
            result = super().execute(*args, block=False, **kwargs)
        if self.block if block is None else block:
            result.get()
        return result


class _Started(_Engines):
    """A transport over engines that we start, and end."""

    def __init__(
        self, n: int, launcher: str, plan: _DevicePlan, limit: int | None, timeout: float, lease: float | None
    ) -> None:
        self._warden: subprocess.Popen[bytes] | None = None
        self.folder = _new_folder()
        self._lease = (LEASE_S if lease is None else lease, JOB_LEASE_S if lease is None else lease)
        self._lock_descriptor = warden.take_lock(self.folder)
        self._pids: list[int] = []
        warden.write_members(self.folder, [], *self._lease)
        self._warden = subprocess.Popen(
            [sys.executable, "-m", "dtkit.warden", str(self.folder)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        self.keeper = shared.Owner.of(self._warden.pid)
        try:
            super().__init__(*self._start(n, launcher, plan, limit, timeout))
        except BaseException:
            self.close()
            raise

    def _start(
        self, n: int, launcher: str, plan: _DevicePlan, limit: int | None, timeout: float
    ) -> tuple[ipp.Client, list[int]]:
        self._cluster = cluster = ipp.Cluster(
            controller_ip="127.0.0.1" if launcher == "local" else None,
            engine_launcher_class=launcher,
            profile_dir=str(self.folder),
            cluster_id="dtkit",
            shutdown_atexit=False,
            log_level=50,
            controller_args=[
                "--HeartMonitor.period=500",  # engines are registered on a beat
                "--IPController.enable_curve=True",
                f"--DictDB.size_limit={_HUB_BYTES}",
            ],
        )
        cluster.start_controller_sync()
        if launcher == "local":
            # One set per engine: each has its own environment, and can be ended by itself.
            sets = [cluster.start_engines_sync(1, environment=plan.environment(r, limit)) for r in range(n)]
        else:
            sets = [cluster.start_engines_sync(n)]
        self._watch(cluster, sets)
        try:
            client = cluster.connect_client_sync(timeout=timeout)
        except TimeoutError:
            raise ClusterError(
                f"the controller did not answer within {timeout:g} s; give it longer with timeout="
            ) from None
        self._wait_for_engines(client, n, timeout)
        self._watch(cluster, sets)  # the nannies, too
        return client, sorted(client.ids)[:n]

    def _wait_for_engines(self, client: ipp.Client, n: int, timeout: float) -> None:
        try:
            client.wait_for_engines(n, timeout=timeout, interactive=False)
        except TimeoutError:
            logs = "\n".join(p.read_text()[-500:] for p in sorted((self.folder / "log").glob("ipengine*"))[:1])
            raise ClusterError(
                f"{len(client.ids)} of {n} engines came within {timeout:g} s; give them longer with timeout=, or fewer "
                f"engines. The first engine's log ends:\n{logs}"
            ) from None

    def _watch(self, cluster: ipp.Cluster, sets: list[str]) -> None:
        """Tell the warden all processes that run by now."""
        import psutil

        roots = [cluster.controller.process.pid] if hasattr(cluster.controller, "process") else []
        for name in sets:
            roots += [e.process.pid for e in getattr(cluster.engines[name], "launchers", {}).values()]
        pids = list(roots)
        for pid in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        warden.write_members(self.folder, pids, *self._lease)

    def close(self) -> None:
        """Ask the warden to end everything; it knows every process."""
        client = getattr(self, "_client", None)
        if client is not None:
            client.close()
        remote = getattr(self, "_cluster", None)
        if remote is not None and remote.engine_launcher_class is not ipp.cluster.launcher.LocalEngineSetLauncher:
            remote.stop_cluster_sync()
        if self._warden is not None:
            self._warden.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._warden.wait(timeout=10)
            self._warden = None
            os.close(self._lock_descriptor)


def _lost(rank: int, why: str = "its process has ended") -> Reply:
    message = f"the engine of rank {rank} is gone: {why}. Close this cluster and start another one"
    return Reply(failure=Failure(rank, "?", "EngineLost", message, "", kind="lost"))


def _for_rank(listen: Callable[[int, int, list[Any]], None], rank: int) -> Callable[[int, list[Any]], None]:
    return lambda first, items: listen(rank, first, items)


def _new_folder() -> Path:
    """A folder that only this user can enter, where Jupyter keeps what lives as long as a session."""
    from jupyter_core.paths import jupyter_runtime_dir

    folder = Path(jupyter_runtime_dir()) / f"dtkit-{secrets.token_hex(4)}"
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def _in_kernel() -> bool:
    """Whether this process is a Jupyter kernel."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return hasattr(shell, "kernel")


# --- what runs where --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _DevicePlan:
    """Devices by rank, threads, and what carries the collectives."""

    devices: tuple[str, ...]
    threads: int | None
    backend: str
    note: str = ""

    def environment(self, rank: int, memory_limit: int | None) -> dict[str, str]:
        """What an engine's process starts with. With more threads than cores torch spins (seven times slower)."""
        found = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        if self.devices[rank] == "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ""
        if memory_limit is not None:
            found[limits.VARIABLE] = str(memory_limit)
        return found


def _plan_devices(n: int, device: str, threads: int | None) -> _DevicePlan:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}; it must be 'auto', 'cpu' or 'cuda'")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}; an engine needs at least one. Leave it out for cores // engines")
    gpus = 0 if device == "cpu" else host.gpus()
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda', but no CUDA device is usable here; use device='cpu' or 'auto'")
    threads = threads or max(1, host.cores() // n)
    if not gpus:
        return _DevicePlan(("cpu",) * n, threads, "gloo")
    devices = tuple(f"cuda:{r % gpus}" for r in range(n))
    if n <= gpus:
        return _DevicePlan(devices, threads, "cpu:gloo,cuda:nccl")
    note = (
        f"{n} engines share {gpus} GPU{'s' * (gpus > 1)}: collectives go through gloo, since NCCL needs a GPU per rank."
    )
    return _DevicePlan(devices, threads, "gloo", note)


def _checked_size(n: int | None, launcher: str) -> int:
    if n is None:
        return host.default_engines()
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(
            f"Cluster({n!r}): the number of engines must be an integer, or None for what this machine carries"
        )
    if n < 1:
        raise ValueError(
            f"Cluster({n}): a cluster needs at least one engine. Leave n out for what this machine carries"
        )
    most = host.most_engines()
    if launcher == "local" and n > most:
        raise ValueError(
            f"Cluster({n}): this machine's free memory ({units.size(host.memory().free)}) carries {most} engines at "
            f"about {units.size(host.ENGINE_BYTES)} each. Use Cluster({most}) or fewer"
        )
    return n


def _text_table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
