"""Agents and their engines as ipyparallel's engines, whose controller is on another host."""

from __future__ import annotations

import runpy
import sys

from dtkit._util import timeouts
from dtkit.cluster import ipv6, nanny
from dtkit.cluster.engine_arguments import make_engine_arguments


class RemoteEngine:
    """What this process becomes."""

    def __init__(self, interface: str, *, is_silent: bool = False) -> None:
        """Prepare this process, before it has any thread. `interface` is the controller's, in ipyparallel's form.

        The nanny of a silent process doesn't keep its output open.
        """
        if ipv6.is_ipv6(interface):
            ipv6.allow_ipv6_in_engine()
        is_linux = sys.platform == "linux"
        self._nanny = nanny.use_forked_nanny(outlives_sigterm=True, is_silent=is_silent) if is_linux else None

    def run(self) -> None:
        """Become an ipyparallel engine. Returns when the engine ends, as by SIGTERM, and its nanny has reported that.

        Slurm kills nannies as soon as the job's own process has ended.
        """
        sys.argv[1:] = make_engine_arguments(timeouts.CONTROLLER_SILENT_S, timeouts.HEARTBEAT_PERIOD_S)
        runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)
        if self._nanny is not None:
            self._nanny.finish(timeouts.TERM_GRACE_S)
