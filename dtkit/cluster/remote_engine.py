"""Agents and their engines as ipyparallel's engines, whose controller is on another host."""

from __future__ import annotations

import runpy
import sys

from dtkit._util import timeouts
from dtkit.cluster import ipv6, nanny
from dtkit.cluster.engine_arguments import make_engine_arguments


def prepare(interface: str, *, is_silent: bool = False) -> None:
    """Prepare this process, before it has any thread. `interface` is that of the controller in ipyparallel's form.

    The nanny of a silent process doesn't keep its output open.
    """
    if ipv6.is_ipv6(interface):
        ipv6.allow_ipv6_in_engine()
    if sys.platform == "linux":
        nanny.use_forked_nanny(outlives_sigterm=True, is_silent=is_silent)


def run() -> None:
    """Become an ipyparallel engine. Returns when the engine ends."""
    sys.argv[1:] = make_engine_arguments(timeouts.CONTROLLER_SILENT_S, timeouts.HEARTBEAT_PERIOD_S)
    runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)
