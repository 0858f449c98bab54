"""A thread that reports the engines of ended agents and connections, so that they count as lost at once.

An engine's nanny reports its end. If a scheduler kills a job, or a whole container ends, nannies end, too. Then only
missing heartbeats would tell.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts, torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.cluster.launchers.agent_link import AgentLink


class ConnectionWatcher:
    """Reports engines to the controller of one client."""

    def __init__(
        self, client: Any, list_agents: Callable[[], Sequence[AgentLink]], agent_by_engine: Mapping[int, AgentLink]
    ) -> None:
        self._client, self._list_agents, self._agent_by_engine = client, list_agents, agent_by_engine
        self._reported: set[int] = set()
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Begin to watch, until `close`."""
        threading.Thread(target=self._watch, name="dtkit-connections", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(timeouts.JOB_POLL_S):
            for engine in self._list_cut_off():
                if engine not in self._reported:
                    self._reported.add(engine)
                    self._report(engine)

    def _list_cut_off(self) -> list[int]:
        """Return agents whose own connection has ended, and engines whose agent has ended, by ipyparallel's ids."""
        agents = [agent for agent in self._list_agents() if agent.connection is not None and agent.connection.has_ended]
        engines = [engine for engine, agent in list(self._agent_by_engine.items()) if not agent.is_alive]
        return [*(agent.engine_id for agent in agents), *engines]

    def _report(self, engine: int) -> None:
        """Send what an engine's nanny sends when the engine has ended. Idempotent."""
        stream = torch_private.get_query_stream(self._client)
        torch_private.get_client_loop(self._client).add_callback(
            self._client.session.send, stream, "unregistration_request", content={"id": engine}
        )
