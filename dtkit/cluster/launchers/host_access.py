"""Access to hosts through their agents: see :class:`dtkit.rpc.transport.Hosts`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import files, timeouts
from dtkit.cluster.agent.folder_mirror import list_flags, list_runs
from dtkit.cluster.agent.protocol import MirrorReply, MirrorRequest
from dtkit.cluster.launchers.host_checkpoints import HostCheckpoints
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.checkpoint.remote_files import HostFiles
    from dtkit.cluster.launchers.agent_link import AgentLink
    from dtkit.messages import StoreAddress
    from dtkit.rpc.shared_memory import SharedBuffer


class HostAccess:
    """The hosts of one cluster, and the thread that keeps their folders in step with the notebook's."""

    def __init__(
        self, folder: Path, list_agents: Callable[[], Sequence[AgentLink]], get_agent: Callable[[int], AgentLink]
    ) -> None:
        """`get_agent` returns the agent of a rank."""
        self._folder, self._list_agents, self._get_agent = folder, list_agents, get_agent
        self.checkpoint_files: HostFiles = HostCheckpoints(list_agents, get_agent)
        self._reader = secrets.token_hex(8)
        self._is_closed = threading.Event()
        # locks: while agents answer, which has a timeout
        self._mirror_lock = threading.Lock()

    def start(self) -> None:
        """Start to synchronize the folders, until `close`."""
        threading.Thread(target=self._mirror_loop, name="dtkit-mirror", daemon=True).start()

    def close(self) -> None:
        """Stop synchronizing."""
        self._is_closed.set()

    # -- Hosts ------------------------------------------------------------------------------------------------

    def get_folder(self, rank: int) -> Path:
        """Return the cluster's folder on the host of a rank."""
        return Path(self._get_agent(rank).info.folder)

    def get_interface(self, rank: int) -> str:
        """Return the interface through which the other hosts reach the host of a rank."""
        return self._get_agent(rank).info.interface

    def count_gpus(self, rank: int) -> int:
        """Return the number of usable GPUs on the host of a rank."""
        return self._get_agent(rank).info.gpus

    def open_store(self, generation: int) -> StoreAddress:
        """Open the store at which a generation meets, on the host of rank 0."""
        agent = self._get_agent(0)
        store: StoreAddress = agent.call("open_store", address=agent.info.address, generation=generation)
        return store

    def write_buffers(self, buffers: Sequence[Any]) -> dict[str, SharedBuffer]:
        """Send the buffers once to each host. Raises ClusterError if one of them lacks the memory."""
        data = [bytes(memoryview(buffer).cast("B")) if memoryview(buffer).nbytes else b"" for buffer in buffers]
        agents = self._list_agents()
        futures = [agent.send("write_buffers", buffers=data) for agent in agents]
        places: dict[str, SharedBuffer] = {}
        try:
            for agent, future in zip(agents, futures, strict=True):
                places[agent.info.hostname] = future.result(timeouts.AGENT_DATA_TIMEOUT_S)
        except BaseException:
            self.remove_buffers(places)
            raise
        return places

    def remove_buffers(self, places: Mapping[str, SharedBuffer]) -> None:
        """Delete the hosts' copies of buffers, without waiting."""
        for agent in self._list_agents():
            if (place := places.get(agent.info.hostname)) is not None:
                agent.send("remove_buffers", paths=[place.path])

    def end_processes(self, pids: Mapping[int, int]) -> None:
        """End engines, given as {rank: pid}, without waiting. They may be stopped processes."""
        for rank, pid in pids.items():
            self._get_agent(rank).send("kill_engines", pids=[pid])

    def inspect_process(self, rank: int, pid: int, start_time: float) -> tuple[str, str]:
        """Ask the host of a rank for its process and its stacks."""
        try:
            state, text = self._get_agent(rank).call("inspect_process", rank=rank, pid=pid, start_time=start_time)
        except ClusterError:  # the host is lost
            return "unknown", ""
        return state, text

    def exchange(self) -> None:
        """Synchronize the folders now. A host that doesn't answer is skipped; losses are noticed elsewhere."""
        with self._mirror_lock:
            request = MirrorRequest(
                self._reader, frozenset(list_flags(self._folder)), frozenset(list_runs(self._folder))
            )
            futures = [agent.send("mirror", request=request) for agent in self._list_agents()]
            with contextlib.suppress(concurrent.futures.TimeoutError):
                for future in concurrent.futures.as_completed(futures, timeout=timeouts.AGENT_CALL_TIMEOUT_S):
                    with contextlib.suppress(ClusterError, OSError):
                        # waits: already done here
                        self._store(future.result())

    def _store(self, reply: MirrorReply) -> None:
        for name, data in reply.files.items():
            with contextlib.suppress(FileNotFoundError):  # the run has been removed meanwhile
                files.replace_file(self._get_path(name), data)
        for name in reply.removed:
            self._get_path(name).unlink(missing_ok=True)

    def _get_path(self, name: str) -> Path:
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder.resolve()):
            raise ClusterError(f"a host sent a file {name!r} outside the cluster's folder")
        return path

    def _mirror_loop(self) -> None:
        while not self._is_closed.wait(timeouts.MIRROR_PERIOD_S):
            with contextlib.suppress(OSError):  # the client or the folder is gone: the cluster is closing
                self.exchange()
