"""What a forked process does to become one of ipyparallel's engines."""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import secrets
import sys
from pathlib import Path
from typing import Any, BinaryIO

from dtkit._util import timeouts
from dtkit.cluster.engine_arguments import make_engine_arguments
from dtkit.engine.warmup import preload, without_collection

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
"""What an engine imports until it has served its first call, besides what `preload` imports."""

ENGINE_NAME = "dtkit-engine"
NANNY_NAME = "dtkit-nanny"
"""Names of processes, of at most 15 bytes: Linux cuts longer ones."""


def load() -> None:
    """Import what ipyparallel's engine and the first training step need, and leave a single thread."""
    with without_collection():
        for name in _MODULES:
            importlib.import_module(name)
        _load_kernel_without_debugger()
    preload()


def _load_kernel_without_debugger() -> None:
    """Import ipykernel's debugger without debugpy, which takes long: an ipyparallel engine can't use it."""
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]


def become_engine(logs: Path) -> None:
    """Turn this forked process into an engine. Returns when the engine ends."""
    os.setsid()  # no signals of the terminal
    _show_name(ENGINE_NAME)
    _redirect_output(logs / f"ipengine-{secrets.token_hex(4)}.log")
    _reseed()
    from dtkit._util.torch_private import START_NANNY, engine_app

    setattr(engine_app, START_NANNY, ForkedNanny().start)
    # Where the heartbeat is slower, the engine waits up to 1.7 times as long.
    sys.argv[1:] = make_engine_arguments(timeouts.CONTROLLER_GONE_S, timeouts.MIN_HEARTBEAT_PERIOD_S)
    runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)


def _show_name(name: str) -> None:
    """Give this process a name in ``ps``, ``top`` and ``htop``: its command line is the fork server's."""
    Path("/proc/self/comm").write_text(name)


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _reseed() -> None:
    """Give this process random numbers of its own, as a fresh one has. Python's own generators do it themselves."""
    import numpy as np

    np.random.seed()  # noqa: NPY002 - users' code draws from it


class ForkedNanny:
    """Ipyparallel's nanny of one engine, forked rather than started.

    The nanny forwards signals and reports the engine's end. It is forked before the engine has any thread or socket,
    and waits for its arguments.
    """

    def __init__(self) -> None:
        arguments_reader, arguments_writer = os.pipe()
        url_reader, url_writer = os.pipe()
        if os.fork() == 0:
            os.close(arguments_writer)
            os.close(url_reader)
            _run_nanny(os.fdopen(arguments_reader, "rb"), url_writer)
        os.close(arguments_reader)
        os.close(url_writer)
        self._arguments, self._url = os.fdopen(arguments_writer, "wb"), os.fdopen(url_reader, "rb")

    def start(self, **arguments: Any) -> tuple[str, BinaryIO]:
        """Pass the arguments on. Return the nanny's address, and the pipe by whose end it notices the engine's."""
        with self._arguments:
            pickle.dump({**arguments, "pid": os.getpid()}, self._arguments)
        url = self._url.readline().decode().strip()
        if not url:
            raise RuntimeError("the engine's nanny has ended before it could report its address")
        return url, self._url


def _run_nanny(arguments_file: BinaryIO, url_writer: int) -> None:
    """Run the nanny in this process, and end it."""
    try:
        os.setsid()
        _show_name(NANNY_NAME)
        with arguments_file:
            # unpickles: from the engine that forked this process
            arguments = pickle.load(arguments_file)
        from dtkit._util.torch_private import KernelNanny

        KernelNanny.main(**arguments, pipe=os.fdopen(url_writer, "w", buffering=1))
    except EOFError:  # the engine ended before it was connected
        pass
    finally:
        os._exit(0)
