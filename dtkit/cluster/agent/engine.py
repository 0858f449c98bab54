"""Start of an engine by its host's agent: ``python -m dtkit.cluster.agent.engine AGENT_PID``."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys

from dtkit._util import timeouts
from dtkit.cluster import ipv6
from dtkit.cluster.engine_arguments import make_engine_arguments

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """End with the agent, and become an ipyparallel engine."""
    agent_pid = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:  # it has ended meanwhile
        return
    if ipv6.is_ipv6(json.loads(os.environ["IPP_CONNECTION_INFO"])["interface"]):
        ipv6.allow_ipv6_in_engine()
    sys.argv[1:] = make_engine_arguments(timeouts.CONTROLLER_SILENT_S, timeouts.HEARTBEAT_PERIOD_S)
    runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
