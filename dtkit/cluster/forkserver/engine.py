"""What a forked process does to become one of ipyparallel's engines."""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import secrets
import sys
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.process import end_with_parent
from dtkit.cluster import nanny
from dtkit.cluster.engine_arguments import make_engine_arguments
from dtkit.cluster.remote_engine import RemoteEngine
from dtkit.engine.warmup import load_modules, without_collection

if TYPE_CHECKING:
    from pathlib import Path

_MODULES = (
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "dtkit.engine.comm.torchrun",
    "dtkit.engine.entrypoint",
    "dtkit.engine.memory",
    "dtkit.engine.server",
    "ipyparallel.engine.kernel",
    "ipyparallel.engine.nanny",
    "sqlite3",
    "tornado.platform.asyncio",
    "zmq.utils.garbage",
)
"""What an engine imports until it has served its first call, besides what `load_modules` imports."""

ENGINE_NAME = "dtkit-engine"
"""Name of the process, of at most 15 bytes: Linux cuts longer ones."""


def load() -> None:
    """Import what ipyparallel's engine and the first training step need, and leave a single thread."""
    with without_collection():
        for name in _MODULES:
            importlib.import_module(name)
        _load_kernel_without_debugger()
    load_modules()
    gc.freeze()  # without a collection, which takes longer than its few thousand objects are worth


def _load_kernel_without_debugger() -> None:
    """Import ipykernel's debugger without debugpy, which takes long: an ipyparallel engine can't use it."""
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]


def become_remote_engine(logs: Path, server_pid: int) -> None:
    """Turn this forked process into an engine that ends with its fork server. Its controller is on another host."""
    end_with_parent(server_pid)
    _separate(logs)
    RemoteEngine(json.loads(os.environ["IPP_CONNECTION_INFO"])["interface"]).run()


def become_engine(logs: Path) -> None:
    """Turn this forked process into an engine. Returns when the engine ends."""
    _separate(logs)
    nanny.use_forked_nanny()
    # Where the heartbeat is slower, the engine waits up to 1.7 times as long.
    sys.argv[1:] = make_engine_arguments(timeouts.CONTROLLER_GONE_S, timeouts.MIN_HEARTBEAT_PERIOD_S)
    runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)


def _separate(logs: Path) -> None:
    """Give this process a session, a name, a log and random numbers of its own."""
    os.setsid()  # no signals of the terminal
    nanny.show_name(ENGINE_NAME)
    _redirect_output(logs / f"ipengine-{secrets.token_hex(4)}.log")
    _reseed()


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _reseed() -> None:
    """Give this process random numbers of its own, as a fresh one has. Python's own generators do it themselves."""
    import numpy as np

    np.random.seed()  # noqa: NPY002 - users' code draws from it
