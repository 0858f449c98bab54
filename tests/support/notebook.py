"""Execution of notebooks as with Run All, without a browser, and checks that hold for all of them.

Binder guarantees one gigabyte and kills at two, so the memory of all processes together is checked. It is the sum of
their PSS, where each page is divided among the processes that map it, sampled during the execution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default

from dtkit.cluster.forkserver.engine import ENGINE_NAME
from tests.support.kernel import TRANSPORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbformat import NotebookNode

MOST_BYTES = 1.5e9
SAMPLE_S = 0.25
CLAIM = re.compile(
    r"^(theory holds ✓|theory fails ✗|limit kept ✓|limit exceeded ✗)  (.+): measured .+; .+$", re.MULTILINE
)
"""First line of a claim as text: see `dtkit.lessons`."""
MOST_LINES = 14
"""Of a cell."""


def execute(path: str | Path, timeout: float, cwd: str | Path | None = None) -> NotebookNode:
    """Run all cells of the notebook at `path` and return it with their outputs; the file is not changed.

    A cell may take `timeout` seconds. The kernel starts in `cwd`, by default the notebook's folder. It is the
    Python of the tests, with a temporary IPython profile. Raises nbclient's CellExecutionError, which shows the failing
    cell's source and traceback, CellTimeoutError, or DeadKernelError.
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
        store_widget_state=False,  # outputs only, without the state of widgets
        resources={"metadata": {"path": str(cwd or path.parent)}},
    )
    with tempfile.TemporaryDirectory(prefix="ipython-") as profile:
        client.create_kernel_manager().ip = f"{profile}/socket"  # a relative path would be one of the kernel's folder
        client.execute(env=os.environ | {"IPYTHONDIR": profile})
    return notebook


class _ThisPython(AsyncKernelManager):
    """Manager of one kernel, "python3": ipykernel's own, which starts ``sys.executable``."""

    @default("transport")
    def _sockets_in_files(self) -> str:
        return TRANSPORT

    @default("kernel_spec_manager")
    def _no_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)


@dataclasses.dataclass
class Footprint:
    """Processes started during an execution, and the peak of their memory together."""

    seen: set[psutil.Process] = dataclasses.field(default_factory=set)
    peak: int = 0
    max_engines: int = 0
    """Largest number of engines at a time."""
    _others: set[psutil.Process] = dataclasses.field(default_factory=lambda: set(psutil.Process().children()))
    """Children of the tests that were there before, such as those of a cluster that several tests share."""

    def sample(self) -> None:
        # A process whose parent has ended is no longer a descendant, so earlier ones are kept.
        for child in set(psutil.Process().children()) - self._others:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen |= {child, *child.children(recursive=True)}
        total, parents = 0, {}
        for process in self.seen:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss if sys.platform == "linux" else 0
                if process.name() == ENGINE_NAME or "ipyparallel.engine" in process.cmdline():
                    parents[process.pid] = process.ppid()
        # A process that an engine forked has its name and command line until it starts another program.
        engines = sum(parent not in parents for parent in parents.values())
        self.peak, self.max_engines = max(self.peak, total), max(self.max_engines, engines)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(SAMPLE_S):
                self.sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@dataclasses.dataclass(frozen=True)
class ExecutedNotebook:
    """An executed notebook, whose cells are found by a part of their source."""

    notebook: NotebookNode
    footprint: Footprint

    def outputs(self, source: str) -> list[NotebookNode]:
        """Return the cell's outputs without the empty places of live views."""
        cells = [cell for cell in list_code_cells(self.notebook) if source in cell.source]
        assert len(cells) == 1, f"{len(cells)} cells have {source!r}"
        return [
            output for output in cells[0].outputs if "dtkit-live" not in output.get("data", {}).get("text/html", "")
        ]

    def text(self, source: str) -> str:
        """Return the cell's printed text, and its outputs as plain text."""
        return "".join(
            output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"
            for output in self.outputs(source)
        )


def execute_and_watch(path: str | Path, timeout: float = 120) -> ExecutedNotebook:
    """Execute a notebook as `execute` does, and watch its processes."""
    footprint = Footprint()
    with footprint.watching():
        notebook = execute(path, timeout)
    return ExecutedNotebook(notebook, footprint)


def list_code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def join_stream(notebook: NotebookNode, stream: str) -> str:
    """Return all text written to "stdout" or "stderr"."""
    outputs = [output for cell in list_code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == stream)


def list_claims(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Return (verdict, quantity) of all claims that an executed notebook shows."""
    texts = [
        output.get("data", {}).get("text/plain", "") for cell in list_code_cells(notebook) for output in cell.outputs
    ]
    return [claim for text in texts for claim in CLAIM.findall(text)]


def check_as_committed(notebook: NotebookNode) -> None:
    """Check that the notebook is valid, for the python3 kernel, and without outputs."""
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(cell.outputs == [] and cell.execution_count is None for cell in list_code_cells(notebook))


def check_links(notebook: NotebookNode, folder: Path, least: int) -> None:
    """Check at least `least` links, each to a heading of the notebook or a file relative to `folder`."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) >= least
    for link in links:
        assert link[1:] in headings if link.startswith("#") else (folder / link).is_file(), link


def check_cell_lengths(notebook: NotebookNode) -> None:
    """Check that a reader can take in each cell of code at a glance. Files that a cell writes are not counted."""
    cells = [cell.source for cell in list_code_cells(notebook) if not cell.source.startswith("%%writefile")]
    assert [source for source in cells if len(source.splitlines()) > MOST_LINES] == []


def check_guesses(notebook: NotebookNode, least: int) -> None:
    """Check at least `least` empty guesses, each in a cell before its use, with a folded solution after it."""
    typed: set[str] = set()
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        assigned = set(re.findall(r"^(guess_\w+) = None$", cell.source, re.MULTILINE))
        used = set(re.findall(r"\bguess_\w+", cell.source)) - assigned
        assert used <= typed, cell.source
        if assigned:
            assert len(assigned) == len(cell.source.splitlines()), "a cell with guesses has no other code"
            assert notebook.cells[place + 1].source.startswith("<details><summary>Solution</summary>"), cell.source
        typed |= assigned
    sources = "\n".join(cell.source for cell in list_code_cells(notebook))
    assert len(typed) >= least
    assert {name for name in typed if f"guess={name}" not in sources} == set()


def check_claims(done: ExecutedNotebook, least: int) -> None:
    """Check that each claim of the notebook is shown once and holds, and that the score counts them all."""
    sources = "\n".join(cell.source for cell in list_code_cells(done.notebook))
    num_claims = len(re.findall(r"^lesson\.(?:claim|at_most)\(", sources, re.MULTILINE))
    claims = list_claims(done.notebook)
    assert len(claims) == num_claims >= least
    assert [claim for claim in claims if not claim[0].endswith("✓")] == []
    assert f"{num_claims} of {num_claims} claims hold; you made no guess" in done.text("lesson.score()")


def check_nothing_is_left(done: ExecutedNotebook, engines: int = 2) -> None:
    """Check that the notebook had that many engines at a time, and that no process is left."""
    assert done.footprint.max_engines == engines
    _, alive = psutil.wait_procs(done.footprint.seen, timeout=15)
    assert alive == []


def check_memory(done: ExecutedNotebook) -> None:
    """Check that all processes together stay below Binder's limit."""
    if sys.platform != "linux":
        pytest.skip("PSS is available on Linux only")
    print(f"peak PSS of all processes: {done.footprint.peak / 1e6:.0f} MB")
    assert 0.5e9 < done.footprint.peak < MOST_BYTES
