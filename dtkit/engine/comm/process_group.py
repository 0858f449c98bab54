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
from dtkit.types import ABORT_FLAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np

    from dtkit.mesh import Mesh
    from dtkit.types import GroupSpec

_LOST_PEER_PATTERN = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|recvValue failed|sendBytes failed|socket closed"
    r"|communicator was aborted|gloo.*(read|write)(v|Error)|timed out waiting \d+ms|^wait timeout"
    r"|application timeout caused pair closure|operation timed out!",
    re.IGNORECASE,
)

_JOIN_POLL_S = 0.002  # between two looks whether all ranks are here
_PENDING_WORK_POLL_S = 0.1  # between two looks whether what a group had under way is over
_MAX_PORTS = 64  # on which a rank listens, for this group and those along the axes of a mesh


class Group:
    """This rank's membership in one generation of the process group."""

    def __init__(self, spec: GroupSpec) -> None:
        """Form the group: blocks until all ranks came, at most ``spec.timeout_s`` seconds."""
        self.rank, self.world_size = spec.rank, spec.world_size
        self.generation, self.backend = spec.generation, spec.backend
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = spec.interface
        _wait_for_ranks(spec)
        before = tcp.list_sockets()
        store = dist.FileStore(spec.store_path, spec.world_size)  # type: ignore[attr-defined]  # torch exports it by name only
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
        self._connections = tcp.GroupConnections()
        self._find_connections(before)
        self._can_count_sent_bytes = "nccl" not in spec.backend and self._connections.count_sent_bytes() is not None
        self._payload_bytes = 0.0
        self.timeout_s = spec.timeout_s
        """What every later collective may take."""
        self._device_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self.is_broken = False
        self._pending_vote: dist.Work | None = None  # what was asked last, if nobody has waited for the answer

    def _find_connections(self, known_sockets: set[int]) -> None:
        """Find gloo's own connections among the sockets that are new (all ranks connect in the first collective).

        Each has a listening port of some rank at one of its ends.
        """
        mine = tcp.list_listening_ports(known_sockets)[:_MAX_PORTS]
        ports = torch.zeros(self.world_size, _MAX_PORTS, dtype=torch.int64)
        ports[self.rank, : len(mine)] = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(ports)
        self._connections.add(known_sockets, set(ports.flatten().tolist()) - {0})

    def all_reduce(self, tensor: torch.Tensor, process_group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum in place over all ranks; or over those of a group along an axis of a grid."""
        self._count_payload(tensor, self.world_size if process_group is None else process_group.size())
        dist.all_reduce(tensor, group=process_group)
        return tensor

    def device_mesh(self, mesh: Mesh, device: torch.device) -> DeviceMesh:
        """Groups along each axis of a mesh, as torch's DeviceMesh. A collective; made once in a generation.

        Outer axes of one rank are left out: an axis that is then alone needs no connections and threads of its own,
        since torch takes the group of all ranks for it.
        """
        *_, last = mesh.axes
        axes = {name: size for name, size in mesh.axes.items() if size > 1 or name == last}
        key = tuple(axes.items())
        if key not in self._device_meshes:
            # waits: a collective, limited by the process group's timeout
            self.barrier()  # who waits here can be broken off; who waits in torch for a rank that failed before, can't
            before = tcp.list_sockets()
            with memory_limit.lift_data_limit():
                self._device_meshes[key] = init_device_mesh(
                    device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
                )
            self._apply_timeout(self._device_meshes[key])
            self._find_connections(before)
        return self._device_meshes[key]

    def start_all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """As `all_reduce`, without waiting: the future has [tensor]."""
        self._count_payload(tensor, self.world_size)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future()  # type: ignore[no-any-return]

    def _count_payload(self, tensor: torch.Tensor, num_ranks: int) -> None:
        # What each rank sends in a ring (Patarasu and Yuan, JPDC 2009), which is optimal and what NCCL and gloo do.
        size = tensor._values().nbytes + tensor._indices().nbytes if tensor.is_sparse else tensor.nbytes  # noqa: SLF001 - the public ones ask for a coalesced one
        self._payload_bytes += 2 * (num_ranks - 1) / num_ranks * size

    def count_sent_bytes(self) -> int:
        """What this rank has sent to its peers so far: as the kernel counted on this group's own connections.

        Where it counts nothing (NCCL, or not Linux): the all-reduces' payload by the ring's formula.
        """
        counted = self._connections.count_sent_bytes() if self._can_count_sent_bytes else None
        return round(self._payload_bytes) if counted is None else counted

    def all_reduce_any(self, flag: bool) -> bool:  # noqa: FBT001 - the one value that is agreed upon
        """Whether any rank says yes."""
        return self.start_all_reduce_any(flag)()

    def start_all_reduce_any(self, flag: bool) -> Callable[[], bool]:  # noqa: FBT001 - the one value that is agreed upon
        """As `any`, without waiting for the answer, which the returned function does: a MAX all-reduce on the CPU."""
        vote = torch.tensor([int(flag)])
        work = self._pending_vote = dist.all_reduce(vote, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def wait_for_result() -> bool:
            # waits: a collective, limited by the process group's timeout
            work.wait()
            self._pending_vote = None
            return bool(vote.item())

        return wait_for_result

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

    def broadcast_tensors(
        self, tensors: Sequence[torch.Tensor] | None, src: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """One rank's tensors on every rank, laid out as there. `tensors` are given on rank `source`, None elsewhere."""
        told = json.dumps([_describe_layout(t) for t in tensors or ()]).encode()
        length = torch.tensor([len(told)])
        dist.broadcast(length, src=src)
        text = torch.tensor(list(told)) if tensors is not None else torch.zeros(int(length), dtype=torch.int64)
        dist.broadcast(text, src=src)
        found = []
        for k, (shape, stride, dtype, wanted) in enumerate(json.loads(bytes(text.tolist()))):
            numbers = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if tensors is not None:
                numbers.copy_(tensors[k].detach())
            if numbers.numel():
                dist.broadcast(numbers.view(-1).view(torch.uint8), src=src)  # gloo does not know all types
            laid = torch.empty_strided(shape, stride, dtype=numbers.dtype, device=device).copy_(numbers)
            found.append(laid.requires_grad_(wanted))
        return tuple(found)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_reduce_any(False)

    def intersect_names(self, names: Iterable[str]) -> set[str]:
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
        _set_group_timeout(seconds, None)
        for grid in self._device_meshes.values():
            self._apply_timeout(grid)

    def _apply_timeout(self, device_mesh: DeviceMesh) -> None:
        """The groups along its axes have time limits of their own."""
        for group in device_mesh.get_all_groups():
            _set_group_timeout(self.timeout_s, group)

    def has_lost_connection(self) -> bool:
        """Whether a connection to another rank has ended, or is about to."""
        return self.is_broken or self._connections.has_closed()

    def abort(self) -> None:
        """Make every rank's blocked collective raise, now. The group is unusable afterwards. Any thread may call it."""
        self.is_broken = True
        self._connections.shut_down()
        if "nccl" in self.backend:
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch has no public abort

    def close(self) -> None:
        """Leave the group. Peers may be gone already."""
        self._connections.close()
        if self._pending_vote is not None and not self._pending_vote.is_completed():
            hold_group_until_done(self._pending_vote, dist.group.WORLD, self.timeout_s)
            self._pending_vote = None
        if dist.is_initialized():
            dist.destroy_process_group()
        torch_cleanup.release_groups(self._device_meshes.values())
        self._device_meshes.clear()


def _describe_layout(tensor: torch.Tensor) -> tuple[list[int], list[int], str, bool]:
    """(shape, strides, dtype, whether it wants a gradient), as JSON can tell it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return list(tensor.shape), list(tensor.stride()), dtype, tensor.requires_grad


def _set_group_timeout(seconds: float, group: dist.ProcessGroup | None) -> None:
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        change(dt.timedelta(seconds=seconds), group)


def _wait_for_ranks(spec: GroupSpec) -> None:
    """Wait until all ranks are here, where an interrupt and the notebook's word get through: in torch neither does."""
    here = Path(f"{spec.store_path}.{spec.rank}")
    here.touch(mode=0o600)
    try:
        _poll_for_ranks(spec)
    except BaseException:
        here.unlink(missing_ok=True)  # who comes later would find nobody missing, and wait in torch for this one
        raise


def _poll_for_ranks(spec: GroupSpec) -> None:
    called_off = Path(f"{spec.store_path}{ABORT_FLAG}")
    deadline, pause = time.monotonic() + spec.timeout_s, threading.Event()
    missing = list(range(spec.world_size))
    while missing := [rank for rank in missing if not Path(f"{spec.store_path}.{rank}").exists()]:
        _check_not_aborted(spec, called_off)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Wait timeout: ranks {missing} did not join the group within {spec.timeout_s:g} s")
        pause.wait(_JOIN_POLL_S)
    _check_not_aborted(spec, called_off)  # whoever comes last has not looked yet, and some may have left again


def _check_not_aborted(spec: GroupSpec, abort_flag: Path) -> None:
    if abort_flag.exists():
        raise RuntimeError(f"Connection closed: a rank could not join generation {spec.generation} of the group")


def hold_group_until_done(work: dist.Work, group: Any, timeout_s: float) -> None:
    """Hold a group until this is over, at most so many seconds, in a thread of its own.

    Whoever lets go of a gloo group last waits for what it has under way. A question that stands behind a large message
    which broke off half way (see :mod:`dtkit.engine.comm.cancellable_wait`) ends with the time limit only.
    """

    def wait_for_work(work: dist.Work, _group: Any) -> None:
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while not work.is_completed() and time.monotonic() < deadline:
            pause.wait(_PENDING_WORK_POLL_S)

    threading.Thread(target=wait_for_work, args=(work, group), name="dtkit-held", daemon=True).start()


def is_lost_peer_error(error: BaseException) -> bool:
    """Whether an exception only says that another rank went away."""
    return isinstance(error, RuntimeError) and bool(_LOST_PEER_PATTERN.search(str(error)))


@contextlib.contextmanager
def abort_on_sigint(abort: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT end a blocked collective: a watcher thread is woken by the signal and calls `break_up`.

    The interpreter writes the signal's number to the wakeup descriptor at once, also while the main thread is in
    C code. Only the main thread can be interrupted, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _get_sigint_watcher().call_on_sigint(abort):
        yield


class _SigintWatcher:
    """One thread for all calls: starting one for each cost milliseconds a dispatch where all cores were busy."""

    def __init__(self) -> None:
        # port: a socket pair within the process; nobody else can connect
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # locks: while a group's sockets are shut, for a quarter of a second at most
        self._lock = threading.Lock()  # no call ends while its `break_up` runs
        self._abort: Callable[[], None] | None = None
        threading.Thread(target=self._watch_loop, name="dtkit-interrupt", daemon=True).start()

    @contextlib.contextmanager
    def call_on_sigint(self, abort: Callable[[], None]) -> Iterator[None]:
        """Have SIGINT call `break_up` while the block runs."""
        previous, self._abort = self._abort, abort
        descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            self._abort = previous  # before any call, which an interrupt would come ahead of
            signal.set_wakeup_fd(descriptor)
            with self._lock:
                pass

    def _watch_loop(self) -> None:
        # waits: a daemon thread; nobody waits for it
        while signals := self._reader.recv(64):
            with self._lock:
                break_up = self._abort
                if signal.SIGINT in signals and break_up is not None:
                    break_up()


@functools.cache
def _get_sigint_watcher() -> _SigintWatcher:
    return _SigintWatcher()


def find_loopback_interface() -> str:
    """The name of this host's loopback interface."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == "127.0.0.1" for a in addresses):
            return str(name)
    return "lo" if Path("/proc").exists() else "lo0"
