"""Start of an agent: ``python -m dtkit.cluster.agent``. See :mod:`dtkit.cluster.launchers.hosts` for its input."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit.cluster import ipv6
from dtkit.cluster.agent import hangup, host_agent
from dtkit.cluster.launchers.hosts import AGENT_FILE_VARIABLE, REFUSAL
from dtkit.cluster.remote_engine import RemoteEngine

if TYPE_CHECKING:
    from collections.abc import Mapping


def main() -> None:
    """Read the input, prepare this host's folder, and become an ipyparallel engine."""
    path = os.environ.get(AGENT_FILE_VARIABLE)
    fields = json.loads(sys.stdin.readline() if path is None else Path(path).read_text())
    engine = RemoteEngine(fields["connection"]["interface"], is_silent=True)
    agent = host_agent.start_agent(host=fields["host"], cluster=fields["cluster"])
    check_controller(agent, fields["connection"])
    hangup.exit_on_hangup()
    os.environ.update(agent.make_variables(fields["connection"]))
    engine.run()


def check_controller(agent: host_agent.HostAgent, connection: Mapping[str, Any]) -> None:
    """End this process with one line if the notebook's controller can't be reached from here."""
    address, port = ipv6.strip_brackets(connection["interface"]), connection["registration"]
    reason = agent.try_to_reach(address, port)
    if reason is not None:
        agent.stop()
        sys.exit(
            f"{REFUSAL}{socket.gethostname()} can't reach the notebook's machine at {address}, port {port}: {reason}. "
            "Name an address that this host reaches with address=, or open the network between the two"
        )


if __name__ == "__main__":
    main()
