"""Ipyparallel's nanny of one engine, forked rather than started.

The nanny forwards signals to its engine. It reports the engine's end to the controller, so that the notebook notices it
at once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from pathlib import Path
from typing import Any, BinaryIO

import psutil

NANNY_NAME = "dtkit-nanny"
"""Name of the process, of at most 15 bytes: Linux cuts longer ones."""


class ForkedNanny:
    """The nanny of this process, which is or becomes an engine. Linux only.

    It is forked before the engine has any thread or socket, and waits for its arguments.
    """

    def __init__(self, *, outlives_sigterm: bool = False, is_silent: bool = False) -> None:
        """A nanny that outlives SIGTERM reports the end of an engine that a scheduler sends this signal, too.

        A silent one doesn't keep the output of this process open.
        """
        arguments_reader, arguments_writer = os.pipe()
        url_reader, url_writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(arguments_writer)
            os.close(url_reader)
            if outlives_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its engine
            if is_silent:
                _discard_output()
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

    def finish(self, timeout: float) -> None:
        """Let the nanny report the engine's end, and wait until it has."""
        self._url.close()
        with contextlib.suppress(psutil.Error):
            psutil.Process(self._pid).wait(timeout)


def use_forked_nanny(*, outlives_sigterm: bool = False, is_silent: bool = False) -> ForkedNanny:
    """Fork the nanny of this process now. The engine that it becomes uses this nanny instead of starting one."""
    from dtkit._util.torch_private import START_NANNY, engine_app

    nanny = ForkedNanny(outlives_sigterm=outlives_sigterm, is_silent=is_silent)
    setattr(engine_app, START_NANNY, nanny.start)
    return nanny


def show_name(name: str) -> None:
    """Give this process a name in ``ps``, ``top`` and ``htop``: its command line is that of the forking process."""
    Path("/proc/self/comm").write_text(name)


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def _run_nanny(arguments_file: BinaryIO, url_writer: int) -> None:
    """Run the nanny in this process, and end it."""
    try:
        os.setsid()
        show_name(NANNY_NAME)
        with arguments_file:
            # unpickles: from the engine that forked this process
            arguments = pickle.load(arguments_file)
        from dtkit._util.torch_private import KernelNanny

        KernelNanny.main(**arguments, pipe=os.fdopen(url_writer, "w", buffering=1))
    except EOFError:  # the engine ended before it was connected
        pass
    finally:
        os._exit(0)
