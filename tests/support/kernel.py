"""Jupyter kernel of a notebook: a process that executes cells and can be restarted and interrupted."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import tempfile
import time
from typing import TYPE_CHECKING, Any, Self

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_client.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_S = 60.0
CELL_S = 120.0
TRANSPORT = "ipc"
"""Sockets in files. Jupyter's client looks for free ports, and another test may take one before the kernel does."""


class CellFailedError(AssertionError):
    """A cell ended in an error."""


class Kernel:
    """Kernel with the Python of the tests and a temporary IPython profile."""

    def __init__(self, manager: KernelManager) -> None:
        self._manager = manager
        self._client: Any = None
        self._connect()

    @classmethod
    @contextlib.contextmanager
    def started(cls, runtime: Path, cwd: Path) -> Iterator[Self]:
        """Start a kernel in the folder `cwd`, with `runtime` as Jupyter's runtime folder."""
        specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)  # ipykernel's own: sys.executable
        signed = Session(key=secrets.token_hex().encode())
        manager = KernelManager(kernel_name="python3", kernel_spec_manager=specs, session=signed, transport=TRANSPORT)
        with tempfile.TemporaryDirectory(prefix="ipython-") as profile:
            folders = {"IPYTHONDIR": profile, "JUPYTER_RUNTIME_DIR": str(runtime)}
            manager.start_kernel(env=os.environ | folders, cwd=str(cwd))
            try:
                kernel = cls(manager)
                yield kernel
                kernel.disconnect()
            finally:
                manager.shutdown_kernel(now=True)
                manager.cleanup_resources()

    def _connect(self) -> None:
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_S)

    def disconnect(self) -> None:
        """Close the connections to the kernel."""
        self._client.stop_channels()

    def restart(self, *, now: bool) -> None:
        """Restart the kernel as the menu does, which asks it to end; with `now`, by SIGKILL."""
        self.disconnect()
        self._manager.restart_kernel(now=now)
        self._connect()

    def shut_down(self) -> None:
        """Shut the kernel down for good, as the menu does."""
        self.disconnect()
        self._manager.shutdown_kernel()

    def interrupt(self) -> float:
        """Send SIGINT as the stop button does, and return the time (time.time())."""
        pressed = time.time()
        self._manager.interrupt_kernel()
        return pressed

    def run(self, code: str) -> str:
        """Execute a cell and return its printed text. Raises CellFailedError."""
        return self.finish(self.begin(code))

    def begin(self, code: str) -> str:
        """Start a cell and return its id for `finish`."""
        return str(self._client.execute(code, store_history=False))

    def finish(self, cell: str, until: str | None = None) -> str:
        """Wait for the end of a cell, or until it has printed `until`, and return its printed text."""
        printed, deadline = "", time.monotonic() + CELL_S
        while until is None or until not in printed:
            try:
                message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell did not end within {CELL_S:g} s; it printed {printed!r}") from None
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "stream" and content["name"] == "stdout":
                printed += content["text"]
            elif kind == "error":
                raise CellFailedError(f"{content['ename']}: {content['evalue']}\n" + "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                break
        return printed
