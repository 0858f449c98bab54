"""Process group of one engine, which can be aborted.

A group has a *generation*. Each generation has its own store, so a late message of a broken group can't join the next
group. Collectives carry only tensors, never pickled objects.

A gloo collective waits for its peers until the timeout, and neither exceptions nor signals interrupt it. But a closed
connection ends it at once on all ranks. So the group keeps descriptors of gloo's TCP connections, which it identifies
by the ranks' listening ports. `abort` shuts these connections down, and each rank's blocked call raises. Then the group
is formed again. NCCL has an abort for the same purpose.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtkit._util import timeouts
from dtkit._util.torch_private import abort_groups, get_sparse_indices, get_sparse_values, set_group_timeout
from dtkit.engine.comm import host_link, rendezvous, tcp, torch_cleanup
from dtkit.engine.comm.host_store import HostStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np

    from dtkit.engine.comm.host_messages import HostMessages
    from dtkit.mesh import Mesh
    from dtkit.messages import GroupSpec

_LOST_PEER_PATTERN = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|recvValue failed|sendBytes failed|socket closed"
    r"|communicator was aborted|gloo.*(read|write)(v|Error)|timed out waiting \d+ms|^wait timeout"
    r"|application timeout caused pair closure|operation timed out!",
    re.IGNORECASE,
)

_MAX_PORTS = 64  # per rank, for this group and those along the axes of a mesh


class Group:
    """This rank's membership in one generation of the process group."""

    def __init__(
        self,
        spec: GroupSpec,
        lift_memory_limit: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Form the group. Waits until all ranks have joined, at most ``spec.timeout_s`` seconds.

        `lift_memory_limit` is a context in which memory is unlimited: C++ ends the process if gloo can't start threads.
        """
        self.rank, self.world_size = spec.rank, spec.world_size
        self.generation, self.backend = spec.generation, spec.backend
        self._lift_memory_limit = lift_memory_limit
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = spec.interface
        self._store = rendezvous.meet(spec)  # torch keeps no reference to a store that is written in Python
        before = tcp.list_sockets()
        hook = sys.excepthook
        torch_cleanup.reset_group_names()
        dist.init_process_group(
            spec.backend,
            store=self._store,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=dt.timedelta(seconds=spec.timeout_s),
        )
        sys.excepthook = hook  # torch wraps it again in each generation
        self.connections = tcp.GroupConnections()
        """Gloo's connections to the other ranks."""
        self._find_connections(before)
        self._can_count_sent_bytes = "nccl" not in spec.backend and self.connections.count_sent_bytes() is not None
        self._payload_bytes = 0.0
        self.timeout_s = spec.timeout_s
        """Timeout of each later collective."""
        self._device_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self.is_broken = False
        self._pending_vote: dist.Work | None = None  # the last one without a wait for its result
        self.on_direct_collective: Callable[[str, int, torch.Tensor], None] | None = None
        """Function for an explained step. It gets the kind of each collective through the host, which torch's hooks
        don't see, its bytes and its result."""
        self._host_link: host_link.HostLink | None = None
        self._host_link = host_link.connect(spec, self.barrier)

    def _find_connections(self, known_sockets: set[int]) -> None:
        """Find gloo's connections among the new sockets; all ranks connect in the first collective.

        One end of each has a listening port of some rank.
        """
        local_ports = tcp.list_listening_ports(known_sockets)[:_MAX_PORTS]
        ports = torch.zeros(self.world_size, _MAX_PORTS, dtype=torch.int64)
        ports[self.rank, : len(local_ports)] = torch.tensor(local_ports, dtype=torch.int64)
        dist.all_reduce(ports)
        self.connections.add(known_sockets, set(ports.flatten().tolist()) - {0})

    def all_reduce(self, tensor: torch.Tensor, process_group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum in place over all ranks, or over those of a `process_group` along an axis of a mesh."""
        num_ranks = self.world_size if process_group is None else process_group.size()
        link, world = self._host_link, dist.group.WORLD
        if num_ranks == self.world_size and link is not None and link.can_sum(tensor):
            link.all_reduce(tensor)
            self._report_direct("all_reduce", tensor, tensor)
            return tensor
        self._count_payload(tensor, num_ranks)
        if process_group is None and world is not None and not (tensor.is_complex() or tensor.is_sparse):
            work = world.allreduce([tensor])  # dist.all_reduce makes checks before, for a tenth of a short step
            # waits: a collective, limited by the process group's timeout
            work.wait()
        else:
            dist.all_reduce(tensor, group=process_group)
        return tensor

    def open_messages(self) -> HostMessages | None:
        """Return messages by the ranks' host, or None if they have several. A collective."""
        return None if self._host_link is None else self._host_link.open_messages()

    def can_sum_directly(self, tensor: torch.Tensor) -> bool:
        """Return whether the ranks sum and gather such tensors by sockets or memory of their host."""
        return self._host_link is not None and self._host_link.can_sum(tensor)

    def all_gather_directly(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Gather the tensors of all ranks into a flat `output`, by memory of their host."""
        assert self._host_link is not None
        self._host_link.all_gather(output, own)
        self._report_direct("all_gather", output, output)

    def reduce_scatter_directly(self, output: torch.Tensor, terms: torch.Tensor) -> None:
        """Sum over all ranks, of which each gets its part in a flat `output`, by memory of their host."""
        assert self._host_link is not None
        self._host_link.reduce_scatter(output, terms)
        self._report_direct("reduce_scatter", terms, output)

    def _report_direct(self, kind: str, whole: torch.Tensor, result: torch.Tensor) -> None:
        if self.on_direct_collective is not None:
            self.on_direct_collective(kind, whole.nbytes, result)

    def start_all_reduce_small(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum one number in place over all ranks, and return a function that waits for it."""
        if self._host_link is None or not self._host_link.can_sum(tensor):
            future = self.start_all_reduce(tensor)
            # waits: a collective, limited by the process group's timeout
            return lambda: future.wait()[0]
        if self.on_direct_collective is not None:  # an explained step waits for each collective
            self.all_reduce(tensor)
            return lambda: tensor
        return self._host_link.start_all_reduce(tensor)

    def device_mesh(self, mesh: Mesh, device: torch.device) -> DeviceMesh:
        """Return torch's DeviceMesh with a group along each axis of `mesh`. A collective; cached for the generation.

        Outer axes of size 1 are omitted. For a single axis, torch uses the group of all ranks, without further
        connections and threads.
        """
        *_, last = mesh.axes
        axes = {name: size for name, size in mesh.axes.items() if size > 1 or name == last}
        key = tuple(axes.items())
        if key not in self._device_meshes:
            # waits: a collective, limited by the process group's timeout
            self.barrier()  # can be aborted if a rank has failed; the wait within torch can't
            before = tcp.list_sockets()
            with self._lift_memory_limit():
                self._device_meshes[key] = init_device_mesh(
                    device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
                )
            self._apply_timeout(self._device_meshes[key])
            self._find_connections(before)
        return self._device_meshes[key]

    def start_all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Start an `all_reduce` and return its future, whose value is [tensor]."""
        self._count_payload(tensor, self.world_size)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future()  # type: ignore[no-any-return]

    def _count_payload(self, tensor: torch.Tensor, num_ranks: int) -> None:
        # Each rank's share in a ring, as in NCCL and gloo; it is optimal (Patarasu and Yuan, JPDC 2009)
        size = (
            get_sparse_values(tensor).nbytes + get_sparse_indices(tensor).nbytes if tensor.is_sparse else tensor.nbytes
        )
        self._payload_bytes += 2 * (num_ranks - 1) / num_ranks * size

    def count_sent_bytes(self) -> int:
        """Return the bytes that this rank has sent to its peers, as the kernel counts them on gloo's connections.

        Bytes of direct sums are those that go through sockets, or that other ranks read in shared memory.
        For NCCL and systems other than Linux, return the payload of the all-reduces by the formula for rings.
        """
        counted = self.connections.count_sent_bytes() if self._can_count_sent_bytes else None
        link_bytes = 0 if self._host_link is None else self._host_link.sent_bytes
        return (round(self._payload_bytes) if counted is None else counted) + link_bytes

    def all_reduce_any(self, flag: bool) -> bool:  # noqa: FBT001 - the one value that is agreed upon
        """Return whether the flag is true on any rank."""
        return self.start_all_reduce_any(flag)()

    def start_all_reduce_any(self, flag: bool) -> Callable[[], bool]:  # noqa: FBT001 - the one value that is agreed upon
        """Start to ask all ranks, and return a function that waits for the answer."""
        vote = torch.tensor([int(flag)])
        if self._host_link is not None:
            wait_for_sum = self._host_link.start_all_reduce(vote)
            return lambda: bool(wait_for_sum().item())
        work = self._pending_vote = dist.all_reduce(vote, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def wait_for_result() -> bool:
            # waits: a collective, limited by the process group's timeout
            work.wait()
            self._pending_vote = None
            return bool(vote.item())

        return wait_for_result

    def broadcast_buffers(self, buffers: Sequence[memoryview] | None, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return rank 0's byte buffers on every rank. Rank 0 passes `buffers`; all ranks pass `sizes` in bytes."""
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

    def broadcast_json(self, value: Any, src: int, process_group: dist.ProcessGroup | None = None) -> Any:
        """Return the value of rank `src` on every rank, or on those of a `process_group`. It must be JSON."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        dist.broadcast(length, src=src, group=process_group)
        if self.rank != src:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, src=src, group=process_group)
        return json.loads(text.numpy().tobytes())

    def broadcast_tensors(
        self,
        tensors: Sequence[torch.Tensor] | None,
        src: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of rank `src` on every rank, or on those of a `process_group`, with the same layout.

        Other ranks pass None.
        """
        layouts = self.broadcast_json([_describe_layout(t) for t in tensors or ()], src, process_group)
        received = []
        for k, (shape, stride, dtype, requires_grad) in enumerate(layouts):
            numbers = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if tensors is not None:
                numbers.copy_(tensors[k].detach())
            if numbers.numel():  # as bytes, since gloo doesn't support all dtypes
                dist.broadcast(numbers.view(-1).view(torch.uint8), src=src, group=process_group)
            result = torch.empty_strided(shape, stride, dtype=numbers.dtype, device=device).copy_(numbers)
            received.append(result.requires_grad_(requires_grad))
        return tuple(received)

    def barrier(self) -> None:
        """Wait until all ranks call this method."""
        self.all_reduce_any(False)

    def intersect_names(self, names: Iterable[str]) -> set[str]:
        """Return the names that all ranks pass."""
        text = "\n".join(names).encode()
        longest = torch.tensor([len(text)])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        rows = torch.zeros(self.world_size, int(longest), dtype=torch.uint8)
        rows[self.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        dist.all_reduce(rows)
        return set.intersection(*(set(bytes(row).rstrip(b"\0").decode().split("\n")) for row in rows.tolist()))

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of later collectives, if this version of torch can change it."""
        self.timeout_s = seconds
        if self._host_link is not None:
            self._host_link.set_timeout(seconds)
        _set_group_timeout(seconds, None)
        for device_mesh in self._device_meshes.values():
            self._apply_timeout(device_mesh)

    def _apply_timeout(self, device_mesh: DeviceMesh) -> None:
        """Set the timeout of the groups along a mesh's axes."""
        for group in device_mesh.get_all_groups():
            _set_group_timeout(self.timeout_s, group)

    def has_lost_connection(self) -> bool:
        """Return whether a connection to another rank has ended, or is about to end."""
        return self.is_broken or self.connections.has_closed()

    def abort(self) -> None:
        """Make every rank's blocked collective raise. The group is unusable afterwards. Any thread may call it."""
        self.is_broken = True
        if self._host_link is not None:
            self._host_link.shut_down()
        self.connections.shut_down()
        if "nccl" in self.backend:
            abort_groups()

    def close(self) -> None:
        """Leave the group, even if peers have ended."""
        if self._host_link is not None:
            self._host_link.close()
        self.connections.close()
        if self._pending_vote is not None and not self._pending_vote.is_completed():
            hold_group_until_done(self._pending_vote, dist.group.WORLD, self.timeout_s)
            self._pending_vote = None
        if dist.is_initialized():
            dist.destroy_process_group()
        torch_cleanup.release_groups(self._device_meshes.values())
        self._device_meshes.clear()
        if isinstance(self._store, HostStore):
            self._store.close()


def _describe_layout(tensor: torch.Tensor) -> tuple[list[int], list[int], str, bool]:
    """Return (shape, strides, dtype, whether it requires a gradient) as JSON values."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return list(tensor.shape), list(tensor.stride()), dtype, tensor.requires_grad


def _set_group_timeout(seconds: float, group: dist.ProcessGroup | None) -> None:
    if set_group_timeout is not None:
        set_group_timeout(dt.timedelta(seconds=seconds), group)


def hold_group_until_done(work: dist.Work, group: Any, timeout_s: float) -> None:
    """Keep a reference to a group in a new thread until `work` has ended, at most `timeout_s` seconds.

    Dropping the last reference to a gloo group waits for its work. Work behind a large incomplete message lasts until
    the timeout (see :mod:`dtkit.engine.comm.cancellable_wait`).
    """

    def wait_for_work(work: dist.Work, _group: Any) -> None:
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while not work.is_completed() and time.monotonic() < deadline:
            pause.wait(timeouts.PENDING_WORK_POLL_S)

    threading.Thread(target=wait_for_work, args=(work, group), name="dtkit-held", daemon=True).start()


class PeerFailedError(RuntimeError):
    """Another rank has failed, and reports its error itself."""


def is_lost_peer_error(error: BaseException) -> bool:
    """Return whether an exception only reports that another rank has failed or ended."""
    if isinstance(error, PeerFailedError):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST_PEER_PATTERN.search(str(error)))
