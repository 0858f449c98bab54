"""Execute a notebook as a person would with Run All, without a browser; and what holds for every one of them.

Binder promises one gigabyte and kills at two, so the memory of all processes together is part of what a notebook says.
It is the sum of their PSS (pages that several processes map are divided among them), sampled meanwhile.
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
from typing import TYPE_CHECKING, Any

import nbformat
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import default

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbformat import NotebookNode

MOST_BYTES = 1.5e9
SAMPLE_S = 0.25
CLAIM = re.compile(r"^(PASS|FAIL)  (.+): measured (\S+); expected (\S+) \((.+)\), tolerance (\S+)$", re.MULTILINE)
PREDICTION = re.compile(r"^      you predicted (\S+): (right|off by \S+)$", re.MULTILINE)
"""What a claim prints: see :func:`check_claims`."""


def execute(
    path: str | Path, timeout: float, cwd: str | Path | None = None, restart_before: str | None = None
) -> NotebookNode:
    """Run all cells of the notebook at `path` and return it with their outputs; the file is not touched.

    A cell may take `timeout` seconds. `cwd` is where the kernel starts: by default beside the notebook. The kernel is
    restarted before the cell that has `restart_before` in its source. It is the Python that runs the tests, with an
    IPython profile of its own: nothing of the user's takes part. Raises nbclient's CellExecutionError, which shows the
    failing cell's source and its traceback, CellTimeoutError, or DeadKernelError.
    """
    path = Path(path)
    notebook = nbformat.read(path, as_version=4)
    client = _Client(
        notebook,
        restart_before,
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


class _Client(NotebookClient):
    """Restarts the kernel before one cell, as the menu does."""

    def __init__(self, notebook: NotebookNode, restart_before: str | None, **options: Any) -> None:
        super().__init__(notebook, **options)
        self._restart_before = restart_before

    async def async_execute_cell(self, cell: NotebookNode, *args: Any, **options: Any) -> NotebookNode:
        if self._restart_before is not None and self._restart_before in cell.source:
            await self.km.restart_kernel()
            await self.kc.wait_for_ready(timeout=self.startup_timeout)
        return await super().async_execute_cell(cell, *args, **options)


class _ThisPython(AsyncKernelManager):
    """Knows one kernel, "python3": ipykernel's own, which starts ``sys.executable``."""

    @default("kernel_spec_manager")
    def _no_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)


@dataclasses.dataclass
class Footprint:
    """All processes that this one started meanwhile, and the most memory that they took together."""

    seen: set[psutil.Process] = dataclasses.field(default_factory=set)
    peak: int = 0
    engines: int = 0
    """The most engines at a time."""

    def sample(self) -> None:
        # Once seen, always counted: a process whose parent has ended is no longer among the descendants.
        self.seen |= set(psutil.Process().children(recursive=True))
        total, parents = 0, {}
        for process in self.seen:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss if sys.platform == "linux" else 0
                if "ipyparallel.engine" in process.cmdline():
                    parents[process.pid] = process.ppid()
        # What an engine has forked has its command line, until it begins a program of its own.
        engines = sum(parent not in parents for parent in parents.values())
        self.peak, self.engines = max(self.peak, total), max(self.engines, engines)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(SAMPLE_S):
                self.sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@dataclasses.dataclass(frozen=True)
class Done:
    """The executed notebook; cells are found by something in their source."""

    notebook: NotebookNode
    footprint: Footprint

    def outputs(self, source: str) -> list[NotebookNode]:
        found = [cell for cell in code_of(self.notebook) if source in cell.source]
        assert len(found) == 1, f"{len(found)} cells have {source!r}"
        return found[0].outputs

    def text(self, source: str) -> str:
        """What the cell printed, and its outputs as plain text."""
        return "".join(
            output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"
            for output in self.outputs(source)
        )


def watched(path: str | Path, timeout: float = 120, restart_before: str | None = None) -> Done:
    """As :func:`execute`, with an eye on all processes."""
    footprint = Footprint()
    with footprint.watching():
        notebook = execute(path, timeout, restart_before=restart_before)
    return Done(notebook, footprint)


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: NotebookNode, stream: str) -> str:
    """All that went to "stdout" or "stderr"."""
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == stream)


def check_as_committed(notebook: NotebookNode) -> None:
    """It is valid, for any Python's kernel, and without outputs."""
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_of(notebook))


def check_links(notebook: NotebookNode, folder: Path, least: int) -> None:
    """So many links at least, each to a heading of its own or to a file as seen from `folder`."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) >= least
    for link in links:
        assert link[1:] in headings if link.startswith("#") else (folder / link).is_file(), link


def check_predictions(notebook: NotebookNode, least: int) -> None:
    """So many numbers at least that the reader types, in cells of their own, each before it is used."""
    typed: set[str] = set()
    for cell in code_of(notebook):
        assigned = set(re.findall(r"^(predicted_\w+) = [\d_./ ]+$", cell.source, re.MULTILINE))
        used = set(re.findall(r"\bpredicted_\w+", cell.source)) - assigned
        assert used <= typed, cell.source
        assert not assigned or len(assigned) == len(cell.source.splitlines()), "predictions have a cell of their own"
        typed |= assigned
    sources = "\n".join(cell.source for cell in code_of(notebook))
    assert len(typed) >= least
    assert {name for name in typed if len(re.findall(rf"\b{name}\b", sources)) < 2} == set()


def check_claims(done: Done, least: int) -> None:
    """Every claim that the notebook's cells make is printed once, and passes; so does what the reader types first.

    A claim is a number that the reader types, a measurement, and a formula with a tolerance.
    """
    text = printed(done.notebook, "stdout")
    made = sum(len(re.findall(r"^claim\(", cell.source, re.MULTILINE)) for cell in code_of(done.notebook))
    claims, predictions = CLAIM.findall(text), PREDICTION.findall(text)
    assert len(claims) == len(predictions) == made >= least
    assert [claim for claim in claims if claim[0] != "PASS"] == []
    assert [prediction for prediction in predictions if prediction[1] != "right"] == []
    assert f"{made} of {made} claims PASS" in done.text("verdicts.count(")


def check_nothing_is_left(done: Done, engines: int = 2) -> None:
    """It had so many engines at a time, and none of its processes is alive."""
    assert done.footprint.engines == engines  # and the watch did see them
    _, left = psutil.wait_procs(done.footprint.seen, timeout=15)
    assert left == []


def check_memory(done: Done) -> None:
    """All processes together stay under what Binder gives."""
    if sys.platform != "linux":
        pytest.skip("PSS is Linux's")
    print(f"peak PSS of all processes: {done.footprint.peak / 1e6:.0f} MB")
    assert 0.5e9 < done.footprint.peak < MOST_BYTES
