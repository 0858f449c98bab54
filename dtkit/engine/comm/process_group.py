"""The process group of one engine, and how to get out of it.

A group has a *generation*: each (re)formation meets at a FileStore of its own, so a late message of a broken
group can't join the new one. Collectives on the data plane carry tensors only, never pickled objects.

Breaking a stuck collective. A gloo collective waits for its peers until the group's time limit and lets neither
exceptions nor signals in. What ends it at once, on all ranks, is a connection that closes. So the group keeps
the descriptors of gloo's own TCP connections (found by the listening ports that the ranks tell each other, never
by guessing) and `break_up` shuts them down: each rank's blocked call raises, and the group is formed anew.
NCCL has an abort for the same purpose.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtkit.engine import memory_limit
from dtkit.engine.comm import tcp, torch_cleanup
from dtkit.types import CALLED_OFF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np

    from dtkit.mesh import Mesh
    from dtkit.types import GroupSpec

_LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|recvValue failed|sendBytes failed|socket closed"
    r"|communicator was aborted|gloo.*(read|write)(v|Error)|timed out waiting \d+ms|^wait timeout"
    r"|application timeout caused pair closure|operation timed out!",
    re.IGNORECASE,
)

_GATHER_S = 0.002  # between two looks whether all ranks are here
_HELD_S = 0.1  # between two looks whether what a group had under way is over
_MOST_PORTS = 64  # on which a rank listens, for this group and those along the axes of a mesh


class Group:
    """This rank's membership in one generation of the process group."""

    def __init__(self, spec: GroupSpec) -> None:
        """Form the group: blocks until all ranks came, at most ``spec.timeout_s`` seconds."""
        self.rank, self.world_size = spec.rank, spec.world_size
        self.generation, self.backend = spec.generation, spec.backend
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = spec.interface
        _gather(spec)
        before = tcp.present()
        store = dist.FileStore(spec.store, spec.world_size)  # type: ignore[attr-defined]  # torch exports it by name only
        store.set_timeout(dt.timedelta(seconds=spec.timeout_s))  # subgroups wait in it too: five minutes
        hook = sys.excepthook
        dist.init_process_group(
            spec.backend,
            store=store,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=dt.timedelta(seconds=spec.timeout_s),
        )
        sys.excepthook = hook  # torch puts another one around it in each generation
        self._connections = tcp.Connections()
        self._find_connections(before)
        self._counted = "nccl" not in spec.backend and self._connections.sent() is not None
        self._handed = 0.0
        self.timeout_s = spec.timeout_s
        """What every later collective may take."""
        self._grids: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self.broken = False
        self._asked: dist.Work | None = None  # what was asked last, if nobody has waited for the answer

    def _find_connections(self, before: set[int]) -> None:
        """Find gloo's own connections among the sockets that are new (all ranks connect in the first collective).

        Each has a listening port of some rank at one of its ends.
        """
        mine = tcp.listening(before)[:_MOST_PORTS]
        ports = torch.zeros(self.world_size, _MOST_PORTS, dtype=torch.int64)
        ports[self.rank, : len(mine)] = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(ports)
        self._connections.add(before, set(ports.flatten().tolist()) - {0})

    def all_reduce(self, tensor: torch.Tensor, among: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum in place over all ranks; or over those of a group along an axis of a grid."""
        self._hand(tensor, self.world_size if among is None else among.size())
        dist.all_reduce(tensor, group=among)
        return tensor

    def grid(self, mesh: Mesh, device: torch.device) -> DeviceMesh:
        """Groups along each axis of a mesh, as torch's DeviceMesh. A collective; made once in a generation.

        Outer axes of one rank are left out: an axis that is then alone needs no connections and threads of its own,
        since torch takes the group of all ranks for it.
        """
        *_, last = mesh.axes
        axes = {name: size for name, size in mesh.axes.items() if size > 1 or name == last}
        key = tuple(axes.items())
        if key not in self._grids:
            # waits: a collective, limited by the process group's timeout
            self.barrier()  # who waits here can be broken off; who waits in torch for a rank that failed before, can't
            before = tcp.present()
            with memory_limit.lifted():
                self._grids[key] = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            self._limit(self._grids[key])
            self._find_connections(before)
        return self._grids[key]

    def start_all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """As `all_reduce`, without waiting: the future has [tensor]."""
        self._hand(tensor, self.world_size)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future()  # type: ignore[no-any-return]

    def _hand(self, tensor: torch.Tensor, ranks: int) -> None:
        # What each rank sends in a ring (Patarasu and Yuan, JPDC 2009), which is optimal and what NCCL and gloo do.
        size = tensor._values().nbytes + tensor._indices().nbytes if tensor.is_sparse else tensor.nbytes  # noqa: SLF001 - the public ones ask for a coalesced one
        self._handed += 2 * (ranks - 1) / ranks * size

    def sent_bytes(self) -> int:
        """What this rank has sent to its peers so far: as the kernel counted on this group's own connections.

        Where it counts nothing (NCCL, or not Linux): the all-reduces' payload by the ring's formula.
        """
        counted = self._connections.sent() if self._counted else None
        return round(self._handed) if counted is None else counted

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - the one value that is agreed upon
        """Whether any rank says yes."""
        return self.ask(flag)()

    def ask(self, flag: bool) -> Callable[[], bool]:  # noqa: FBT001 - the one value that is agreed upon
        """As `any`, without waiting for the answer, which the returned function does: a MAX all-reduce on the CPU."""
        vote = torch.tensor([int(flag)])
        work = self._asked = dist.all_reduce(vote, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def answer() -> bool:
            # waits: a collective, limited by the process group's timeout
            work.wait()
            self._asked = None
            return bool(vote.item())

        return answer

    def broadcast_buffers(self, buffers: Sequence[memoryview] | None, sizes: Sequence[int]) -> list[np.ndarray]:
        """Rank 0's byte buffers on every rank. `buffers` is given on rank 0; `sizes` (bytes) everywhere."""
        received = []
        for k, size in enumerate(sizes):
            if buffers is None or self.rank != 0:
                data = torch.empty(size, dtype=torch.uint8)
            else:
                data = torch.frombuffer(bytearray(buffers[k]) or bytearray(1), dtype=torch.uint8)[:size]
            if size:
                dist.broadcast(data, src=0)
            received.append(data.numpy())
        return received

    def hand_round(
        self, tensors: Sequence[torch.Tensor] | None, source: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """One rank's tensors on every rank, laid out as there. `tensors` are given on rank `source`, None elsewhere."""
        told = json.dumps([_layout(t) for t in tensors or ()]).encode()
        length = torch.tensor([len(told)])
        dist.broadcast(length, src=source)
        text = torch.tensor(list(told)) if tensors is not None else torch.zeros(int(length), dtype=torch.int64)
        dist.broadcast(text, src=source)
        found = []
        for k, (shape, stride, dtype, wanted) in enumerate(json.loads(bytes(text.tolist()))):
            numbers = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if tensors is not None:
                numbers.copy_(tensors[k].detach())
            if numbers.numel():
                dist.broadcast(numbers.view(-1).view(torch.uint8), src=source)  # gloo does not know all types
            laid = torch.empty_strided(shape, stride, dtype=numbers.dtype, device=device).copy_(numbers)
            found.append(laid.requires_grad_(wanted))
        return tuple(found)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.any(False)

    def common(self, names: Iterable[str]) -> set[str]:
        """Those names that every rank gives."""
        text = "\n".join(names).encode()
        longest = torch.tensor([len(text)])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        rows = torch.zeros(self.world_size, int(longest), dtype=torch.uint8)
        rows[self.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        dist.all_reduce(rows)
        return set.intersection(*(set(bytes(row).rstrip(b"\0").decode().split("\n")) for row in rows.tolist()))

    def set_timeout(self, seconds: float) -> None:
        """Limit every later collective. torch has no public call for it; without the private one, nothing changes."""
        self.timeout_s = seconds
        _set_timeout(seconds, None)
        for grid in self._grids.values():
            self._limit(grid)

    def _limit(self, grid: DeviceMesh) -> None:
        """The groups along its axes have time limits of their own."""
        for group in grid.get_all_groups():
            _set_timeout(self.timeout_s, group)

    def ended(self) -> bool:
        """Whether a connection to another rank has ended, or is about to."""
        return self.broken or self._connections.ended()

    def break_up(self) -> None:
        """Make every rank's blocked collective raise, now. The group is unusable afterwards. Any thread may call it."""
        self.broken = True
        self._connections.shut_down()
        if "nccl" in self.backend:
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch has no public abort

    def close(self) -> None:
        """Leave the group. Peers may be gone already."""
        self._connections.close()
        if self._asked is not None and not self._asked.is_completed():
            keep_until(self._asked, dist.group.WORLD, self.timeout_s)
            self._asked = None
        if dist.is_initialized():
            dist.destroy_process_group()
        torch_cleanup.let_go(self._grids.values())
        self._grids.clear()


def _layout(tensor: torch.Tensor) -> tuple[list[int], list[int], str, bool]:
    """(shape, strides, dtype, whether it wants a gradient), as JSON can tell it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return list(tensor.shape), list(tensor.stride()), dtype, tensor.requires_grad


def _set_timeout(seconds: float, group: dist.ProcessGroup | None) -> None:
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        change(dt.timedelta(seconds=seconds), group)


def _gather(spec: GroupSpec) -> None:
    """Wait until all ranks are here, where an interrupt and the notebook's word get through: in torch neither does."""
    here = Path(f"{spec.store}.{spec.rank}")
    here.touch(mode=0o600)
    try:
        _wait_for_all(spec)
    except BaseException:
        here.unlink(missing_ok=True)  # who comes later would find nobody missing, and wait in torch for this one
        raise


def _wait_for_all(spec: GroupSpec) -> None:
    called_off = Path(f"{spec.store}{CALLED_OFF}")
    deadline, pause = time.monotonic() + spec.timeout_s, threading.Event()
    missing = list(range(spec.world_size))
    while missing := [rank for rank in missing if not Path(f"{spec.store}.{rank}").exists()]:
        _check_wanted(spec, called_off)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Wait timeout: ranks {missing} did not join the group within {spec.timeout_s:g} s")
        pause.wait(_GATHER_S)
    _check_wanted(spec, called_off)  # whoever comes last has not looked yet, and some may have left again


def _check_wanted(spec: GroupSpec, called_off: Path) -> None:
    if called_off.exists():
        raise RuntimeError(f"Connection closed: a rank could not join generation {spec.generation} of the group")


def keep_until(work: dist.Work, group: Any, limit: float) -> None:
    """Hold a group until this is over, at most so many seconds, in a thread of its own.

    Whoever lets go of a gloo group last waits for what it has under way. A question that stands behind a large message
    which broke off half way (see :mod:`dtkit.engine.comm.cancellable_wait`) ends with the time limit only.
    """

    def hold(work: dist.Work, _group: Any) -> None:
        deadline, pause = time.monotonic() + limit, threading.Event()
        while not work.is_completed() and time.monotonic() < deadline:
            pause.wait(_HELD_S)

    threading.Thread(target=hold, args=(work, group), name="dtkit-held", daemon=True).start()


def lost_peer(error: BaseException) -> bool:
    """Whether an exception only says that another rank went away."""
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(str(error)))


@contextlib.contextmanager
def interruptible(break_up: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT end a blocked collective: a watcher thread is woken by the signal and calls `break_up`.

    The interpreter writes the signal's number to the wakeup descriptor at once, also while the main thread is in
    C code. Only the main thread can be interrupted, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _watcher().calling(break_up):
        yield


class _Watcher:
    """One thread for all calls: starting one for each cost milliseconds a dispatch where all cores were busy."""

    def __init__(self) -> None:
        # port: a socket pair within the process; nobody else can connect
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # locks: while a group's sockets are shut, for a quarter of a second at most
        self._lock = threading.Lock()  # no call ends while its `break_up` runs
        self._break_up: Callable[[], None] | None = None
        threading.Thread(target=self._run, name="dtkit-interrupt", daemon=True).start()

    @contextlib.contextmanager
    def calling(self, break_up: Callable[[], None]) -> Iterator[None]:
        """Have SIGINT call `break_up` while the block runs."""
        previous, self._break_up = self._break_up, break_up
        descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            self._break_up = previous  # before any call, which an interrupt would come ahead of
            signal.set_wakeup_fd(descriptor)
            with self._lock:
                pass

    def _run(self) -> None:
        # waits: a daemon thread; nobody waits for it
        while signals := self._reader.recv(64):
            with self._lock:
                break_up = self._break_up
                if signal.SIGINT in signals and break_up is not None:
                    break_up()


@functools.cache
def _watcher() -> _Watcher:
    return _Watcher()


def loopback() -> str:
    """The name of this host's loopback interface."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == "127.0.0.1" for a in addresses):
            return str(name)
    return "lo" if Path("/proc").exists() else "lo0"
