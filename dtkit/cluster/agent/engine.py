"""Start of an engine by an agent that can't fork it: ``python -m dtkit.cluster.agent.engine AGENT_PID``."""

from __future__ import annotations

import json
import os
import sys

from dtkit._util.process import end_with_parent
from dtkit.cluster.remote_engine import RemoteEngine


def main() -> None:
    """End with the agent, and become an ipyparallel engine."""
    end_with_parent(int(sys.argv[1]))
    RemoteEngine(json.loads(os.environ["IPP_CONNECTION_INFO"])["interface"]).run()


if __name__ == "__main__":
    main()
