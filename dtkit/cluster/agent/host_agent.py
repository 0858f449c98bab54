"""One host's part of a cluster: its folder, its engines, its shared memory and its store.

The agent does no training, so it always answers. It holds the lock of its folder, which a reaper on the same host
(:mod:`dtkit.cluster.reaper`) watches. However the agent ends, the reaper then ends the engines and deletes all files.
The agent itself ends when the controller's heartbeats stop, or when the connection that started it closes. So nothing
stays on the host after the owner has ended or its link was cut.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import resources, timeouts
from dtkit.cluster import ipv6, reaper
from dtkit.cluster.agent import addresses
from dtkit.cluster.agent.checkpoint_files import CheckpointFiles
from dtkit.cluster.agent.folder_mirror import FolderMirror
from dtkit.cluster.agent.host_engines import HostEngines
from dtkit.cluster.agent.protocol import AgentInfo, MirrorReply, MirrorRequest
from dtkit.cluster.lease import Lease
from dtkit.engine.comm.store_server import StoreServer
from dtkit.health.stack_dump import dump_stacks, get_process_state
from dtkit.messages import StoreAddress
from dtkit.rpc import shared_memory
from dtkit.rpc.handshake import get_handshake

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class HostAgent:
    """State of the agent's process. The notebook calls its public methods."""

    def __init__(self, host: str, cluster: str, folder: Path) -> None:
        self._host, self._cluster, self._folder = host, cluster, folder
        self._engines = HostEngines(folder)
        self._connection: Mapping[str, Any] = {}
        self._store: StoreServer | None = None
        self._mirror = FolderMirror(folder)
        self._checkpoint_files = CheckpointFiles(folder)
        self._buffers: dict[str, shared_memory.SharedBuffer] = {}
        self._lease = Lease.start(folder, 0.0, 0.0)

    def make_variables(self, connection: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment of this process and its children: the controller, and the reaper's marker."""
        self._connection = connection
        return {
            "IPP_CONNECTION_INFO": json.dumps(dict(connection)),
            "IPP_CLUSTER_ID": "dtkit",
            reaper.MARKER_VARIABLE: str(self._folder),
        }

    # -- the host ---------------------------------------------------------------------------------------------

    def handshake(self) -> dict[str, object]:
        """Return the versions, which are compared before anything else."""
        return get_handshake()

    def describe(self, interface: str | None = None) -> AgentInfo:
        """Return this host's name, folder, address and resources. Raises LookupError for an unknown interface."""
        interfaces = addresses.list_interfaces()
        if interface is None:
            address = addresses.choose_address(ipv6.strip_brackets(self._connection["interface"]))
            interface = addresses.find_interface(address, interfaces)
        else:
            address = addresses.find_address(interface, interfaces)
        return AgentInfo(
            host=self._host or socket.gethostname(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            folder=str(self._folder),
            address=address,
            interface=interface,
            cores=resources.count_cores(),
            gpus=resources.count_gpus(),
        )

    def list_addresses(self) -> str:
        """Return this host's interfaces, for an error."""
        return addresses.describe_interfaces(addresses.list_interfaces())

    def try_to_reach(self, address: str, port: int) -> str | None:
        """Connect to another host. Return None, or why that failed."""
        try:
            with socket.create_connection((address, port), timeouts.REACH_TIMEOUT_S):  # port: a client
                return None
        except OSError as error:
            return error.strerror or str(error)

    # -- engines ----------------------------------------------------------------------------------------------

    def load_engines(self, environment: Mapping[str, str], timeout: float) -> bool:
        """Begin to load what engines need. Return whether that is done within `timeout` seconds."""
        return self._engines.load(self._complete(environment), timeout)

    def start_engines(self, count: int, environment: Mapping[str, str]) -> list[int]:
        """Start engines, which `load_engines` has prepared, and return their pids."""
        return self._engines.start(count, self._complete(environment))

    def _complete(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {**self.make_variables(self._connection), **environment}

    def count_engines(self) -> int:
        """Return how many engines run."""
        return len(self._engines.list_pids())

    def kill_engines(self, pids: Sequence[int]) -> None:
        """End engines of this agent at once, also stopped ones."""
        self._engines.kill(pids)

    def inspect_process(self, rank: int, pid: int, start_time: float) -> tuple[str, str]:
        """Return the state of a process, with its stacks if it is an engine of this agent and can write them."""
        state = get_process_state(pid, start_time)
        is_engine = pid in self._engines.list_pids()
        return state, dump_stacks(self._folder, rank, pid, state) if is_engine else ""

    def read_logs(self, max_bytes: int = 500) -> str:
        """Return the end of the newest engine log that has any text."""
        return self._engines.read_logs(max_bytes)

    # -- data -------------------------------------------------------------------------------------------------

    def write_buffers(self, buffers: Sequence[bytes]) -> shared_memory.SharedBuffer:
        """Write buffers into this host's shared memory. Raises OSError if it is full."""
        handle = shared_memory.write_buffers(buffers, file_owner=self._lease.reaper)
        self._buffers[handle.path] = handle
        return handle

    def remove_buffers(self, paths: Sequence[str]) -> None:
        """Delete files of shared memory; engines that have mapped them keep the data."""
        for path in paths:
            if (handle := self._buffers.pop(path, None)) is not None:
                shared_memory.remove_file(handle)

    def checkpoint_files(self, method: str, **arguments: Any) -> Any:
        """Call a method of :class:`~dtkit.cluster.agent.checkpoint_files.CheckpointFiles`."""
        return getattr(self._checkpoint_files, method)(**arguments)

    # -- process groups ---------------------------------------------------------------------------------------

    def open_store(self, address: str, generation: int) -> StoreAddress:
        """Open the store at which a generation of the process group meets, and close those of earlier generations."""
        if self._store is None or self._store.address != address:
            self._store = StoreServer(address)
        self._store.forget_before(generation)
        return StoreAddress(address, self._store.port, self._store.key, generation)

    def mirror(self, request: MirrorRequest) -> MirrorReply:
        """Follow the flags of the notebook's folder, and return what has changed in this one."""
        return self._mirror.exchange(request)

    # -- the end ----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the engines, delete all files, and end this process after the reply."""
        self._engines.kill(self._engines.list_pids())
        self._lease.end_cluster()
        timer = threading.Timer(timeouts.AGENT_EXIT_DELAY_S, os._exit, (0,))
        timer.daemon = True
        timer.start()


_agents: list[HostAgent] = []


def start_agent(host: str, cluster: str) -> HostAgent:
    """Make this process's agent, with a new private folder."""
    shared_memory.remove_orphans()
    folder = Path(tempfile.mkdtemp(prefix=f"{cluster}-"))
    _agents[:] = [HostAgent(host, cluster, folder)]
    return _agents[0]


def get_agent() -> HostAgent:
    """Return this process's agent."""
    return _agents[0]
