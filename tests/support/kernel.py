"""A Jupyter kernel as a notebook has it: a process of its own that executes cells, restarts and is interrupted."""

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


class CellFailed(AssertionError):  # noqa: N818 - reads as a state
    """A cell ended in an error."""


class Kernel:
    """The Python that runs the tests, in a kernel; with an IPython profile of its own."""

    def __init__(self, manager: KernelManager) -> None:
        self._manager = manager
        self._client: Any = None
        self._connect()

    @classmethod
    @contextlib.contextmanager
    def started(cls, runtime: Path, cwd: Path) -> Iterator[Self]:
        """One that keeps what lives as long as a session in `runtime`, and begins in `cwd`."""
        specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)  # ipykernel's own: sys.executable
        signed = Session(key=secrets.token_hex().encode())
        manager = KernelManager(kernel_name="python3", kernel_spec_manager=specs, session=signed)
        with tempfile.TemporaryDirectory(prefix="ipython-") as profile:
            places = {"IPYTHONDIR": profile, "JUPYTER_RUNTIME_DIR": str(runtime)}
            manager.start_kernel(env=os.environ | places, cwd=str(cwd))
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
        """Speak to it no more."""
        self._client.stop_channels()

    def restart(self, *, now: bool) -> None:
        """As the menu's *Restart Kernel* does (it asks the kernel to end), or `now`: by SIGKILL."""
        self.disconnect()
        self._manager.restart_kernel(now=now)
        self._connect()

    def interrupt(self) -> float:
        """As the stop button does, by SIGINT. Returns when that was, as time.time()."""
        pressed = time.time()
        self._manager.interrupt_kernel()
        return pressed

    def run(self, code: str) -> str:
        """Execute a cell; what it printed. Raises CellFailed."""
        return self.finish(self.begin(code))

    def begin(self, code: str) -> str:
        """Start a cell, to be finished later."""
        return str(self._client.execute(code, store_history=False))

    def finish(self, cell: str, until: str | None = None) -> str:
        """Wait for the end of a cell, or until it has printed `until`; what it printed meanwhile."""
        said, deadline = "", time.monotonic() + CELL_S
        while until is None or until not in said:
            try:
                message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell did not end within {CELL_S:g} s; it printed {said!r}") from None
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "stream" and content["name"] == "stdout":
                said += content["text"]
            elif kind == "error":
                raise CellFailed(f"{content['ename']}: {content['evalue']}\n" + "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                break
        return said
