"""Files of checkpoints on hosts, through their agents: see :class:`dtkit.checkpoint.remote_files.HostFiles`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit.checkpoint.remote_files import CHUNK_BYTES
from dtkit.checkpoint.validation import METADATA_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.cluster.launchers.agent_link import AgentLink


class HostCheckpoints:
    """The files of checkpoints on one cluster's hosts."""

    def __init__(self, list_agents: Callable[[], Sequence[AgentLink]], get_agent: Callable[[int], AgentLink]) -> None:
        """`get_agent` returns the agent of a rank."""
        self._list_agents, self._get_agent = list_agents, get_agent

    def list_sizes(self, rank: int, token: str) -> dict[str, int]:
        """Return {name: bytes} on the host of a rank."""
        sizes: dict[str, int] = _call(self._get_agent(rank), "list_sizes", token=token)
        return sizes

    def read(self, rank: int, token: str, name: str, offset: int) -> bytes:
        """Return the next bytes of a file; empty at its end."""
        data: bytes = _call(self._get_agent(rank), "read", token=token, name=name, offset=offset, size=CHUNK_BYTES)
        return data

    def remove(self, token: str) -> None:
        """Delete a checkpoint's files on all hosts, without waiting."""
        for agent in self._list_agents():
            agent.send("checkpoint_files", method="remove", token=token)

    def place(self, folder: Path, names: Sequence[str], token: str, num_ranks: int) -> Mapping[int, str]:
        """Send files to hosts that don't see `folder`, to all at once. Return the folder to use by rank."""
        agents = [self._get_agent(rank) for rank in range(num_ranks)]
        targets = list(dict.fromkeys(agents))
        with ThreadPoolExecutor(len(targets)) as pool:
            placed = pool.map(lambda agent: _place(agent, folder, names, token), targets)
            folders = dict(zip(targets, placed, strict=True))
        return {rank: folders[agent] for rank, agent in enumerate(agents)}


def _place(agent: AgentLink, folder: Path, names: Sequence[str], token: str) -> str:
    """Return the checkpoint's folder on one host, after sending the files if the host doesn't see them."""
    metadata = (folder / METADATA_FILE).read_text(encoding="utf-8")
    if _call(agent, "sees", folder=str(folder), metadata=metadata):
        return str(folder)
    for name in names:
        with (folder / name).open("rb") as file:
            offset = 0
            while chunk := file.read(CHUNK_BYTES):
                _call(agent, "write", token=token, name=name, offset=offset, data=chunk)
                offset += len(chunk)
    path: str = _call(agent, "get_path", token=token)
    return path


def _call(agent: AgentLink, method: str, **arguments: Any) -> Any:
    return agent.call("checkpoint_files", timeouts.AGENT_DATA_TIMEOUT_S, method=method, **arguments)
