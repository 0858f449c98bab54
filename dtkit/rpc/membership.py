"""The ranks of an engine group: their engines, their owner, and the process group that they form.

After a failure the process group is formed again. Each formation is a new *generation* with its own store, so that no
late message of a broken group joins it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from dtkit._util import resources
from dtkit.errors import ClusterError, EngineError, drop_consequential_refusals
from dtkit.messages import ABORT_FLAG, EngineInventory, GroupSpec, Reply
from dtkit.rpc import handshake
from dtkit.rpc.clocks import ClockComparison
from dtkit.rpc.host_devices import choose_devices
from dtkit.rpc.protocol import GroupOperations, make_call
from dtkit.types import EngineLoss, Failure, NodeInfo

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dtkit._util.process import ProcessId
    from dtkit.messages import EngineDescription
    from dtkit.rpc.cluster_folder import ClusterFolder
    from dtkit.rpc.protocol import Call
    from dtkit.rpc.transport import Hosts, Transport

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """Settings of the process group, equal in every generation."""

    file_owner: ProcessId
    """The process whose end allows to delete the shared files."""
    devices: tuple[str, ...]
    """Device of each rank."""
    backend: str
    threads: int | None
    timeout: float
    """Seconds that forming the group may take."""
    step_timeout: float | None
    interface: str | None
    owner_id: int = dataclasses.field(default_factory=time.time_ns)
    """The notebook; later ones have larger numbers."""


class Caller(Protocol):
    """The part of its engine group that a :class:`Membership` needs."""

    lock: threading.RLock

    def check_open(self) -> None:
        """Raise ClusterClosedError if the cluster was closed."""

    def fan_out(
        self, call: Call[R] | Sequence[Call[R]], *, ranks: Sequence[int] | None = None
    ) -> list[Future[Reply[R]]]:
        """Send a call to every rank, or to `ranks`."""
        ...

    def gather_replies(
        self, futures: Sequence[Future[Reply[R]]], timeout: float, ranks: Sequence[int] | None = None
    ) -> list[Reply[R]]:
        """Wait for one reply per rank."""
        ...

    def call_independently(
        self, call: Call[R] | Sequence[Call[R]], ranks: Sequence[int], *, grace_from_first_reply: bool = False
    ) -> dict[int, R]:
        """Return the values of the ranks that answer without the group."""
        ...

    def wait_until_reformed(self) -> None:
        """Wait until a group that an interrupt broke is formed again."""


class Membership:
    """Engines by rank, with the state of their process group."""

    def __init__(self, caller: Caller, transport: Transport, folder: ClusterFolder, config: GroupConfig) -> None:
        self.config = config
        self.generation = -1
        """Number of the current process group."""
        self.is_formed = False
        """Whether all ranks have joined it."""
        self.uninitialized_ranks: set[int] = set()
        """Ranks of new engines, which hold no data and no model yet."""
        self.is_single_host = True
        """Whether all engines are on this host, so that they can map its files."""
        self.clocks: ClockComparison | None = None
        """Clocks of all ranks; None on one host, which has one clock."""
        self.engine_sys_path: list[str] = []
        """Folders from which an engine imports."""
        self._caller, self._transport, self._folder = caller, transport, folder
        self._nodes: list[NodeInfo] = []
        self._host_by_rank: dict[int, str] = {}
        self._inherited_generation = -1
        self._ended_engines: dict[int, str] = {}

    @property
    def nodes(self) -> list[NodeInfo]:
        """One row per rank, with the memory of the last formation or refresh."""
        return list(self._nodes)

    @property
    def hosts(self) -> Hosts | None:
        """Access to hosts that don't share the notebook's folder."""
        return self._transport.hosts

    def list_interfaces(self) -> set[str]:
        """Return the network interfaces that carry tensors, as far as they are known."""
        if self.hosts is None:
            return {self.config.interface} if self.config.interface is not None else set()
        return {self.hosts.get_interface(rank) for rank in self._list_ranks()}

    @property
    def can_share_memory(self) -> bool:
        """Whether the notebook can store one copy of data for all engines of a host to map."""
        return self.is_single_host or self.hosts is not None

    @property
    def backend(self) -> str:
        """Library of the collectives: "gloo" or "nccl"."""
        return "nccl" if "nccl" in self.config.backend else "gloo"

    def find_lost_ranks(self) -> list[int]:
        """Return the ranks whose engines have ended."""
        return self._transport.find_lost_ranks()

    def describe_ended_engines(self) -> Mapping[int, str]:
        """Return why the engine of each lost rank is gone, with the remedy. It asks once, since that may wait."""
        if (lost_ranks := self.find_lost_ranks()) != list(self._ended_engines):
            self._ended_engines = {rank: self._transport.explain_loss(rank) for rank in lost_ranks}
        return self._ended_engines

    def explain_losses(self, ranks: Sequence[int], failures: Sequence[Failure] = ()) -> dict[int, EngineLoss]:
        """Return why these ranks are lost. A rank's own last error may only say that another rank was gone."""
        losses = {rank: self._transport.describe_loss(rank) for rank in self.find_lost_ranks()}
        losses |= {failure.rank: failure.engine_loss for failure in failures if failure.is_engine_gone}
        silent = {rank: EngineLoss(f"its engine on {self._nodes[rank].host} does not answer") for rank in ranks}
        return {rank: losses.get(rank, silent[rank]) for rank in ranks}

    def set_nodes(self, descriptions: Sequence[EngineDescription]) -> None:
        """Store each engine's description."""
        ids = self._transport.engine_ids
        self._nodes = [NodeInfo(rank=rank, engine_id=ids[rank], **row) for rank, row in enumerate(descriptions)]
        if self.hosts is None:
            host = socket.gethostname()
            self._transport.track_processes({node.rank: node.pid for node in self._nodes if node.host == host})

    def handshake(self, ranks: Sequence[int] | None = None) -> None:
        """Compare versions with these engines, by default all, and store their hosts and import path."""
        ranks = self._list_ranks() if ranks is None else ranks
        replies = self._caller.gather_replies(
            self._caller.fan_out(make_call(GroupOperations.handshake), ranks=ranks), self.config.timeout, ranks
        )
        engines = {rank: handshake.check_reply(rank, reply) for rank, reply in zip(ranks, replies, strict=True)}
        self.engine_sys_path = list(engines[ranks[0]]["path"])
        self._host_by_rank |= {rank: str(engine["host"]) for rank, engine in engines.items()}
        self._check_hosts()

    def _check_hosts(self) -> None:
        hosts = set(self._host_by_rank.values())
        self.is_single_host = hosts == {socket.gethostname()} and self.hosts is None
        if len(hosts) > 1 and self.hosts is None and self.config.interface is None:
            raise ClusterError(
                f"the engines run on {len(hosts)} hosts ({', '.join(sorted(hosts))}), and dtkit uses the loopback "
                "interface by default; name the network between them, as in interface='eth0'. Tensor traffic on it is "
                "not encrypted"
            )

    # -- ownership --------------------------------------------------------------------------------------------

    def acquire_ownership(self) -> list[EngineInventory]:
        """Take over the engines of another notebook, and return the inventory of each."""
        present = self._list_present_ranks()
        # If the other notebook died while sending a dispatch, ranks that received it wait for the other ranks.
        call = make_call(GroupOperations.acquire_ownership, owner=self.config.owner_id)
        inventories = self._caller.call_independently(call, present, grace_from_first_reply=True)
        if not inventories or len(inventories) < len(present):
            total = len(self._transport.engine_ids)
            raise ClusterError(f"{len(inventories)} of {total} engines answered; the others are busy or stuck")
        self.generation = self._inherited_generation = max(inventory.generation for inventory in inventories.values())
        return list(inventories.values())

    def return_ownership(self, former_owner: int) -> None:
        """Return the engines to another notebook, in a group of the generation that it knows.

        Engines refuse if a third notebook has taken them over meanwhile. If the group can't be formed, DtkitError is
        raised. The engines stay, because no call of the other notebook could reach them.
        """
        inherited, latest = self._inherited_generation, self.generation
        present = self._list_present_ranks()
        if latest > inherited and len(present) == len(self._transport.engine_ids):
            self.generation = inherited - 1
            self._folder.remove_store(inherited)
            self.form_process_group()
            for generation in range(inherited + 1, latest + 1):
                self._folder.remove_store(generation)
        self._caller.call_independently(make_call(GroupOperations.return_ownership, owner=former_owner), present)

    # -- process group ----------------------------------------------------------------------------------------

    def form_process_group(self, *, ranks_changed: bool = False) -> None:
        """Form the next generation of the process group. If ranks have changed, all jobs end."""
        self._caller.wait_until_reformed()
        with self._caller.lock:
            self._caller.check_open()
            self.generation += 1
            self.is_formed = False
            generation, store = self.generation, self._folder.create_store(self.generation)
            futures = self._caller.fan_out(self._make_join_calls(store, ranks_changed=ranks_changed))
        abort_flag = store.with_name(store.name + ABORT_FLAG)
        for future in futures:
            # waits: already done here
            future.add_done_callback(lambda done: _flag_failure(abort_flag, done.result()))
        try:
            replies = self._caller.gather_replies(futures, self.config.timeout + 5)
        except KeyboardInterrupt:
            abort_flag.touch(mode=0o600)  # ranks that wait for a missing rank stop waiting
            raise
        self._folder.remove_store(generation - 1)
        self._folder.remove_store_marks(generation)
        if failures := [reply.failure for reply in replies if reply.failure is not None]:
            raise EngineError(failures)
        with self._caller.lock:
            self.is_formed = self.generation == generation  # another thread may have begun the next one
        self.set_nodes([reply.unwrap() for reply in replies])
        self.clocks = None if self.is_single_host else self._compare_clocks()

    def ensure_formed(self) -> None:
        """Form the group if an interrupt broke it, or if the last formation failed."""
        self._caller.wait_until_reformed()
        if not self.is_formed:
            self.form_process_group()

    def reform_if_broken(self, failures: Sequence[Failure]) -> None:
        """Form the group again after these failures, unless nothing was run or an engine is gone."""
        nothing_ran = self.is_formed and all(failure.kind == "refused" for failure in failures)
        if not nothing_ran and not any(failure.is_engine_gone for failure in failures):
            self.form_process_group()

    def mark_intact(self, generation: int) -> None:
        """Note that an abandoned call did not break its group, unless another one was formed since."""
        if self.generation == generation:
            self.is_formed = True

    def _make_join_calls(self, store: Path, *, ranks_changed: bool) -> list[Call[EngineDescription]]:
        config, world_size, hosts = self.config, len(self._transport.engine_ids), self.hosts
        interface = config.interface or resources.find_loopback_interface()
        meeting_point = None if hosts is None else hosts.open_store(self.generation)
        return [
            make_call(
                GroupOperations.join_group,
                spec=GroupSpec(
                    rank=rank,
                    world_size=world_size,
                    generation=self.generation,
                    backend=config.backend,
                    device=config.devices[rank],
                    store_path=str(store if hosts is None else hosts.get_folder(rank) / store.name),
                    interface=interface if hosts is None else hosts.get_interface(rank),
                    threads=config.threads,
                    timeout_s=config.timeout,
                    store=meeting_point,
                ),
                owner=config.owner_id,
                file_owner=config.file_owner if self.is_single_host else None,
                step_timeout=config.step_timeout,
                ranks_changed=ranks_changed,
            )
            for rank in range(world_size)
        ]

    @property
    def clock_offsets(self) -> Sequence[float] | None:
        """Seconds that each rank's clock is ahead of rank 0's; None on one host, which has one clock."""
        return None if self.clocks is None else self.clocks.offsets

    def _compare_clocks(self) -> ClockComparison:
        replies = self._caller.gather_replies(
            self._caller.fan_out(make_call(GroupOperations.read_clock)), self.config.timeout
        )
        if failures := [reply.failure for reply in replies if reply.failure is not None]:
            raise EngineError(drop_consequential_refusals(failures))
        return ClockComparison.from_readings([reply.unwrap() for reply in replies])

    # -- other engines ----------------------------------------------------------------------------------------

    def replace_engines(self, ranks: Sequence[int]) -> None:
        """Start new engines, without data or models, at these ranks. All jobs end."""
        self.uninitialized_ranks |= set(ranks)
        self._end_processes(ranks)
        self._replace(ranks)
        self.form_process_group(ranks_changed=True)

    def start_single_engines(self, ranks: Sequence[int], folder: Path) -> None:
        """Start new engines at these ranks while the others are busy. Each forms a process group of its own.

        These groups last until the group of all ranks is formed. They write into `folder`.
        """
        self._end_processes(ranks)
        self._replace(ranks)
        calls = []
        for rank in ranks:
            store = folder / f"engine-{rank}-{self._transport.engine_ids[rank]}" / "store"
            store.parent.mkdir(mode=0o700)
            store.touch(mode=0o600)
            joined = self._make_join_calls(store, ranks_changed=True)[rank]
            spec = dataclasses.replace(joined.args["spec"], rank=0, world_size=1)
            calls.append(dataclasses.replace(joined, args={**joined.args, "spec": spec}))
        replies = self._caller.gather_replies(self._caller.fan_out(calls, ranks=ranks), self.config.timeout + 5, ranks)
        if failures := [reply.failure for reply in replies if reply.failure is not None]:
            raise EngineError(failures)

    def _replace(self, ranks: Sequence[int]) -> None:
        self._transport.replace(ranks)
        self.handshake(ranks)
        if self.hosts is not None:
            by_rank = [self._host_by_rank[rank] for rank in self._list_ranks()]
            num_gpus = {by_rank[rank]: self.hosts.count_gpus(rank) for rank in ranks}
            devices = choose_devices(self.config.devices, by_rank, num_gpus, ranks, self.config.backend)
            self.config = dataclasses.replace(self.config, devices=devices)

    def drop_engines(self, ranks: Sequence[int]) -> None:
        """Continue without these ranks; higher ranks move down. All jobs end."""
        self._transport.kill(ranks)
        self._end_processes(ranks)
        self._transport.drop(ranks)
        devices = tuple(device for rank, device in enumerate(self.config.devices) if rank not in ranks)
        self.config = dataclasses.replace(self.config, devices=devices)
        hosts = [host for rank, host in sorted(self._host_by_rank.items()) if rank not in ranks]
        self._host_by_rank = dict(enumerate(hosts))
        self._check_hosts()
        self.form_process_group(ranks_changed=True)

    def clear_if_all_new(self) -> bool:
        """Return whether no engine holds data any more; if so, count all as initialized."""
        all_new = len(self.uninitialized_ranks) == len(self._transport.engine_ids)
        if all_new:
            self.uninitialized_ranks.clear()
        return all_new

    def _end_processes(self, ranks: Sequence[int]) -> None:
        if self.hosts is not None:
            self.hosts.end_processes({node.rank: node.pid for node in self._nodes if node.rank in ranks})
            return
        host = socket.gethostname()
        self._transport.end_processes([node.pid for node in self._nodes if node.rank in ranks and node.host == host])

    def _list_ranks(self) -> range:
        return range(len(self._transport.engine_ids))

    def _list_present_ranks(self) -> list[int]:
        lost_ranks = self.find_lost_ranks()
        return [rank for rank in self._list_ranks() if rank not in lost_ranks]


def _flag_failure(abort_flag: Path, reply: Reply[EngineDescription]) -> None:
    """Let the other ranks stop waiting for a rank that could not join."""
    if reply.failure is not None:
        with contextlib.suppress(OSError):  # the cluster may have been closed
            abort_flag.touch(mode=0o600)
