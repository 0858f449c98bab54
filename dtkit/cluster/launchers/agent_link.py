"""The notebook's calls to one agent."""

from __future__ import annotations

import concurrent.futures
import pickle
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts, torch_private
from dtkit.cluster.agent.agent_call import AgentCall, IdentifyCall, dump_call
from dtkit.cluster.transport import LOSS_ERROR
from dtkit.errors import ClusterError, HostLostError

if TYPE_CHECKING:
    import ipyparallel as ipp

    from dtkit.cluster.agent.protocol import AgentInfo
    from dtkit.cluster.launchers.hosts import AgentJob


class AgentLink:
    """One agent, by ipyparallel's id. It serves one call after the other."""

    info: AgentInfo
    """Set after the agent has described its host."""

    connection: AgentJob | None = None
    """The connection to its host, if it has one of its own."""

    def __init__(self, client: ipp.Client, engine_id: int) -> None:
        self._client, self.engine_id = client, engine_id

    @property
    def is_alive(self) -> bool:
        """Whether the controller receives its heartbeats."""
        return self.engine_id in self._client.ids

    def send(self, operation: str, **arguments: Any) -> Future[Any]:
        """Send a call. The future returns the call's value, or raises ClusterError; HostLostError if it ended."""
        return self._send(operation, AgentCall(), [dump_call(operation, arguments)])

    def send_identify(self) -> Future[Any]:
        """Ask an engine, not an agent, for (hostname, pid)."""
        return self._send("identify", IdentifyCall(), [])

    def _send(self, operation: str, function: Any, arguments: list[bytes]) -> Future[Any]:
        future: Future[Any] = Future()
        engine = torch_private.get_client_engines(self._client).get(self.engine_id)
        if engine is None:
            future.set_exception(self._make_loss())
            return future
        result = self._client.send_apply_request(
            torch_private.get_main_stream(self._client), function, arguments, ident=engine.encode()
        )
        result.add_done_callback(lambda done: self._read(operation, done, future))
        return future

    def call(self, operation: str, timeout: float = timeouts.AGENT_CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Send a call and return its value. Raises ClusterError."""
        return self.wait_for(self.send(operation, **arguments), operation, timeout)

    def wait_for(self, future: Future[Any], operation: str, timeout: float = timeouts.AGENT_CALL_TIMEOUT_S) -> Any:
        """Return the value of a call that was sent. Raises ClusterError; HostLostError if no answer comes."""
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            raise HostLostError(f"{self._name} did not answer within {timeout:g} s ({operation})") from None

    def _make_loss(self) -> HostLostError:
        return HostLostError(f"{self._name} is gone: its agent has ended or was cut off")

    @property
    def _name(self) -> str:
        return self.info.host if hasattr(self, "info") else f"agent {self.engine_id}"

    def _read(self, operation: str, done: Any, future: Future[Any]) -> None:
        if done.msg_id in self._client.history:
            self._client.history.remove(done.msg_id)  # it would grow without end
        result = done.result(timeout=0)
        if getattr(result, "ename", type(result).__name__) == LOSS_ERROR:
            future.set_exception(self._make_loss())  # during the call
            return
        if not isinstance(result, list):
            text = getattr(result, "evalue", str(result))
            future.set_exception(ClusterError(f"{self._name} could not answer ({operation}): {text}"))
            return
        # unpickles: an agent's reply; agents are trusted like engines (docs/guides/security.md)
        succeeded, value = pickle.loads(result.pop())
        if succeeded:
            future.set_result(value)
        else:
            future.set_exception(ClusterError(f"{self._name}: {value}"))
