"""Interface between the notebook and the engine processes.

All calls to engines go through these methods. :mod:`dtkit.cluster.transport` implements them with ipyparallel, and
:mod:`dtkit.testing` without processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dtkit._util import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dtkit.checkpoint.remote_files import HostFiles
    from dtkit.messages import Reply, StoreAddress
    from dtkit.rpc.shared_memory import SharedBuffer
    from dtkit.types import EngineLoss

REPAIR_REMEDY = "cluster.repair() starts another one in its place"
"""What to do about a lost engine, outside of a run."""


class Hosts(Protocol):
    """Hosts that share no folder, each with an agent that acts for the notebook."""

    @property
    def checkpoint_files(self) -> HostFiles:
        """Files of checkpoints on the hosts."""

    def get_folder(self, rank: int) -> Path:
        """Return the cluster's folder on the host of a rank."""

    def get_interface(self, rank: int) -> str:
        """Return the name of the interface through which the other hosts reach the host of a rank."""

    def count_gpus(self, rank: int) -> int:
        """Return the number of usable GPUs on the host of a rank."""

    def open_store(self, generation: int) -> StoreAddress:
        """Open the store at which a generation of the process group meets, and return its address."""

    def write_buffers(self, buffers: Sequence[Any]) -> dict[str, SharedBuffer]:
        """Write one copy of the buffers into each host's shared memory. Return their addresses by hostname."""

    def remove_buffers(self, places: Mapping[str, SharedBuffer]) -> None:
        """Delete the files of such copies."""

    def end_processes(self, pids: Mapping[int, int]) -> None:
        """End the engines with these pids by rank. Works for stopped engines too."""

    def inspect_process(self, rank: int, pid: int, start_time: float) -> tuple[str, str]:
        """Return the state of an engine's process and the text of its stacks, which is empty if it can't write them."""

    def exchange(self) -> None:
        """Synchronize the notebook's folder with those of the hosts now."""


class Transport(Protocol):
    """Engines, in order of rank."""

    hosts: Hosts | None
    """Access to hosts that don't share the notebook's folder."""
    on_queue: Callable[[str], object]
    """Called with the state of a job again and again, while `replace` waits in a scheduler's queue."""

    @property
    def engine_ids(self) -> Sequence[int]:
        """Id of each rank's engine."""

    def send(
        self, rank: int, message: bytes, listen: Callable[[int, list[object]], None] | None = None
    ) -> Future[Reply[Any]]:
        """Send one pickled Request. The future never raises: a lost engine is a Reply with a Failure.

        `listen(first, items)` is called, in any thread, with the output that the engine publishes meanwhile.
        """

    def interrupt(self, ranks: Sequence[int], *, wake: bool = False) -> None:
        """Send SIGINT to these engines, without waiting; with `wake`, SIGCONT first, for stopped ones."""

    def check_reachable(self) -> None:
        """Raise ClusterError if no message can reach the engines any more. Does not wait."""

    def find_lost_ranks(self) -> list[int]:
        """Return the ranks whose engines have ended."""

    def explain_loss(self, rank: int) -> str:
        """Return where the engine of a rank was, why it may be gone, and the remedy, as a text for the user."""

    def describe_loss(self, rank: int) -> EngineLoss:
        """Return the same as fields, without the remedy."""

    def track_processes(self, pids: Mapping[int, int]) -> None:
        """Store which processes of this host are the engines of these ranks, so that a loss can be explained."""

    def kill(self, ranks: Sequence[int], timeout: float = timeouts.KILL_TIMEOUT_S) -> bool:
        """End these engines at once, and wait until they are gone. Return whether they are, after `timeout` seconds."""

    def end_processes(self, pids: Sequence[int]) -> None:
        """End these processes of this host, if the transport started them. Works for stopped engines too."""

    def replace(self, ranks: Sequence[int]) -> None:
        """Start a new engine at each of these ranks, and end the old ones. Raise ClusterError if that fails."""

    def set_aside(self, ranks: Sequence[int]) -> None:
        """Treat the engines of these ranks as lost. `replace` reuses them."""

    def drop(self, ranks: Sequence[int]) -> None:
        """Continue without these ranks; higher ranks move down."""

    def close(self) -> None:
        """End the processes that this transport started, and no others. Idempotent."""

    def detach(self) -> None:
        """Stop using the engines, which now belong to another notebook."""
