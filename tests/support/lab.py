"""JupyterLab for tests: a page, driven by JupyterLab's commands and read from its models.

Tests read the notebook's model, not the DOM, which holds only what is on screen. `run_all` and `run_cell` only start
cells; a test then waits for the kernel (`wait_idle`) or for an output.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import nbformat

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from playwright.sync_api import Locator, Page

    from tests.support.server import Server

# Milliseconds, Playwright's unit.
START_MS = 60_000
STEP_MS = 15_000

# Installed once per page: queries for tests, and a count of the cell runs that haven't ended.
_BRIDGE = """
() => {
  const app = window.jupyterapp;
  const lab = window.dtkitLab = {
    running: 0,
    panel: () => app.shell.currentWidget,
    cells: () => lab.panel().content.model.sharedModel.toJSON().cells,
    ready: () => {
      const panel = lab.panel();
      if (!panel?.context?.isReady) return false;
      const kernel = panel.sessionContext?.session?.kernel;
      return kernel?.connectionStatus === "connected" && kernel.status === "idle";
    },
    idle: () => lab.running === 0 && lab.panel().sessionContext.session?.kernel?.status === "idle",
    run: (command) => {
      lab.running += 1;
      // A failing cell raises no error here: its output shows the error.
      app.commands.execute(command).finally(() => { lab.running -= 1; });
    },
  };
}
"""


class CellFailedError(AssertionError):
    """A cell of the notebook ended in an error."""


@dataclasses.dataclass(frozen=True)
class Look:
    """Appearance of JupyterLab; tests change it by parametrizing "look" indirectly."""

    theme: str = "JupyterLab Light"
    width: int = 1280
    height: int = 900
    app: str = "jupyterlab"
    """Application: "jupyterlab" or "notebook"."""


class Lab:
    """JupyterLab in a browser page, with one notebook open at a time."""

    def __init__(self, page: Page, server: Server, theme: str, app: str = "jupyterlab") -> None:
        self.page = page
        self._route = {"jupyterlab": "lab/tree", "notebook": "notebooks"}[app]
        self._server = server
        self._theme = theme
        self._file: Path | None = None
        page.set_default_timeout(STEP_MS)

    # -- a notebook ---------------------------------------------------------------------------------------

    def open(self, notebook: NotebookNode | Path) -> None:
        """Open a copy of the notebook in a new folder and wait for its kernel.

        With a Path, the Python files next to it are copied, too. The original is never written to.
        """
        folder = self._server.root / uuid.uuid4().hex[:8]
        folder.mkdir()
        if isinstance(notebook, Path):
            self._file = folder / notebook.name
            for source in [notebook, *notebook.parent.glob("*.py")]:
                (folder / source.name).write_bytes(source.read_bytes())
        else:
            self._file = folder / "test.ipynb"
            nbformat.write(notebook, self._file)
        self.reload()

    def reload(self) -> None:
        """Load the page again, with the notebook as last saved. Its kernel keeps running."""
        assert self._file is not None
        path = quote(self._file.relative_to(self._server.root).as_posix())
        self.page.goto(f"{self._server.url}/{self._route}/{path}?reset&token={self._server.token}", timeout=START_MS)
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.context", timeout=START_MS)
        self.page.evaluate(_BRIDGE)
        self.page.wait_for_function("() => window.dtkitLab.ready()", timeout=START_MS)
        self.set_theme(self._theme)  # the server remembers the theme of the last test

    def run_all(self) -> None:
        """Start all cells, as the menu does, without waiting for them."""
        self._run("notebook:run-all-cells")

    def run_cell(self, index: int) -> None:
        """Start one cell, without waiting for it."""
        self.select(index)
        self._run("notebook:run-cell")

    def wait_idle(self, timeout: float = 60) -> None:
        """Wait until all started cells have ended, for at most `timeout` seconds.

        Raises CellFailedError when cells of the notebook show errors.
        """
        self.page.wait_for_function("() => window.dtkitLab.idle()", timeout=timeout * 1000)
        failed = [
            f"cell {index}: {output['ename']}: {output['evalue']}"
            for index in range(self.page.evaluate("() => window.dtkitLab.cells().length"))
            for output in self.outputs(index)
            if output["output_type"] == "error"
        ]
        if failed:
            raise CellFailedError("\n".join(failed))

    def wait_text(self, index: int, text: str, timeout: float = 15) -> None:
        """Wait until a cell, running or not, has printed `text`, for at most `timeout` seconds."""
        self.page.wait_for_function(
            "([index, text]) => JSON.stringify(window.dtkitLab.cells()[index].outputs).includes(text)",
            arg=[index, text],
            timeout=timeout * 1000,
        )

    @property
    def folder(self) -> Path:
        """Folder of the open notebook."""
        assert self._file is not None
        return self._file.parent

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """Return a cell's outputs from the notebook's model, in nbformat's form."""
        outputs: list[dict[str, Any]] = self._cell(index).get("outputs", [])
        return outputs

    def text(self, index: int) -> str:
        """Return a cell's printed text and outputs as plain text, in order."""
        parts = [o.get("text", o.get("data", {}).get("text/plain", "")) for o in self.outputs(index)]
        return "".join("".join(part) for part in parts)

    def source(self, index: int) -> str:
        """Return a cell's source."""
        return "".join(self._cell(index)["source"])

    def select(self, index: int) -> None:
        """Make a cell the active one and scroll it into view."""
        self.page.evaluate(
            """async (index) => {
                 const notebook = window.dtkitLab.panel().content;
                 notebook.activeCellIndex = index;
                 await notebook.scrollToItem(index, "smart");
               }""",
            index,
        )

    def cell(self, index: int) -> Locator:
        """Return a cell on screen, to locate its buttons, pictures and widgets."""
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{index}"]')

    def save(self) -> NotebookNode:
        """Save the notebook and return the file's content."""
        assert self._file is not None
        self.command("docmanager:save")
        self.page.wait_for_function("() => !window.dtkitLab.panel().context.model.dirty")
        return nbformat.read(self._file, as_version=4)

    # -- JupyterLab ---------------------------------------------------------------------------------------

    def command(self, name: str, **arguments: object) -> None:
        """Execute a command of JupyterLab and wait for its end."""
        self.page.evaluate(
            "async ([name, arguments]) => { await window.jupyterapp.commands.execute(name, arguments); }",
            [name, arguments],
        )

    def interrupt(self) -> None:
        """Press the kernel's interrupt button."""
        self.command("notebook:interrupt-kernel")

    def restart(self) -> None:
        """Choose *Restart Kernel* in the menu, confirm, and wait for the new kernel."""
        self._run("kernelmenu:restart")
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()
        self.page.wait_for_function("() => window.dtkitLab.idle()", timeout=START_MS)

    def set_theme(self, name: str) -> None:
        """Change JupyterLab's theme ("JupyterLab Light", "JupyterLab Dark") and wait until it is shown."""
        self._theme = name
        self.command("apputils:change-theme", theme=name)
        shown = f"() => document.body.dataset.jpThemeName === {json.dumps(name)}"
        self.page.wait_for_function(shown, timeout=STEP_MS)

    def screenshot(self, path: str | Path) -> None:
        """Write a picture of the window to a PNG file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, animations="disabled")

    def close(self) -> None:
        """End all kernels of this server."""
        self.page.evaluate("async () => { await window.jupyterapp?.serviceManager.sessions.shutdownAll(); }")

    def _cell(self, index: int) -> dict[str, Any]:
        cell: dict[str, Any] = self.page.evaluate("(index) => window.dtkitLab.cells()[index]", index)
        if cell is None:
            raise IndexError(f"the notebook has no cell {index}")
        return cell

    def _run(self, command: str) -> None:
        self.page.evaluate("(command) => window.dtkitLab.run(command)", command)
