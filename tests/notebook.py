"""Execute a notebook as a person would with Run All, without a browser."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default

if TYPE_CHECKING:
    from nbformat import NotebookNode


def execute(path: str | Path, timeout: float, cwd: str | Path | None = None) -> NotebookNode:
    """Run all cells of the notebook at `path` and return it with their outputs; the file is not touched.

    A cell may take `timeout` seconds. `cwd` is where the kernel starts: by default beside the notebook. The
    kernel is the Python that runs the tests, with an IPython profile of its own: nothing of the user's takes
    part. Raises nbclient's CellExecutionError, which shows the failing cell's source and its traceback,
    CellTimeoutError, or DeadKernelError.
    """
    path = Path(path)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=_ThisPython,
        timeout=timeout,
        startup_timeout=60,
        shutdown_kernel="graceful",
        store_widget_state=False,  # the outputs are what a notebook keeps, not a dump of every widget
        resources={"metadata": {"path": str(cwd or path.parent)}},
    )
    with tempfile.TemporaryDirectory(prefix="ipython-") as profile:
        client.execute(env=os.environ | {"IPYTHONDIR": profile})
    return notebook


class _ThisPython(AsyncKernelManager):
    """Knows one kernel, "python3": ipykernel's own, which starts ``sys.executable``."""

    @default("kernel_spec_manager")
    def _no_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
