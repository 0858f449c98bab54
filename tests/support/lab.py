"""JupyterLab as a test sees it: a page, driven by JupyterLab's own commands, read from its models.

Nothing is read from the DOM that the notebook's model knows: the DOM holds what is on screen. Runs of cells
are *started* here, and a test waits for what it is about: the kernel (`wait_idle`), or something to show.
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

# Milliseconds, Playwright's unit. JupyterLab's first page takes 3 s on two cores, when they are idle.
START_MS = 60_000
STEP_MS = 15_000

# Once per page: what tests ask JupyterLab, and a count of the runs that were started and haven't ended.
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
      // A cell that fails ends the run without an error here: its output tells.
      app.commands.execute(command).finally(() => { lab.running -= 1; });
    },
  };
}
"""


class CellFailed(AssertionError):  # noqa: N818 - reads as a state
    """A cell of the notebook ended in an error."""


@dataclasses.dataclass(frozen=True)
class Look:
    """How JupyterLab is shown; for another, parametrize "look" indirectly."""

    theme: str = "JupyterLab Light"
    width: int = 1280
    height: int = 900
    app: str = "jupyterlab"
    """Or "notebook"."""


class Lab:
    """A JupyterLab in a browser page, with one notebook open at a time."""

    def __init__(self, page: Page, server: Server, theme: str, app: str = "jupyterlab") -> None:
        self.page = page
        self._route = {"jupyterlab": "lab/tree", "notebook": "notebooks"}[app]
        self._server = server
        self._theme = theme
        self._file: Path | None = None
        page.set_default_timeout(STEP_MS)

    # -- a notebook ---------------------------------------------------------------------------------------

    def open(self, notebook: NotebookNode | Path) -> None:
        """Open a copy of the notebook, in a folder of its own, and wait for its kernel.

        A Path brings the Python files beside it along. The file that was given is never written to.
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
        """Load the page anew, with the notebook as it was last saved; a kernel that it had goes on."""
        assert self._file is not None
        path = quote(self._file.relative_to(self._server.root).as_posix())
        self.page.goto(f"{self._server.url}/{self._route}/{path}?reset&token={self._server.token}", timeout=START_MS)
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.context", timeout=START_MS)
        self.page.evaluate(_BRIDGE)
        self.page.wait_for_function("() => window.dtkitLab.ready()", timeout=START_MS)
        self.set_theme(self._theme)  # the server remembers the last one, whichever test that was

    def run_all(self) -> None:
        """Start all cells, as the menu does; it doesn't wait for them."""
        self._run("notebook:run-all-cells")

    def run_cell(self, index: int) -> None:
        """Start one cell; it doesn't wait for it."""
        self.select(index)
        self._run("notebook:run-cell")

    def wait_idle(self, timeout: float = 60) -> None:
        """Wait until no cell that was started runs any more, for at most `timeout` seconds.

        Raises CellFailed when cells of the notebook show errors.
        """
        self.page.wait_for_function("() => window.dtkitLab.idle()", timeout=timeout * 1000)
        failed = [
            f"cell {index}: {output['ename']}: {output['evalue']}"
            for index in range(self.page.evaluate("() => window.dtkitLab.cells().length"))
            for output in self.outputs(index)
            if output["output_type"] == "error"
        ]
        if failed:
            raise CellFailed("\n".join(failed))

    def wait_text(self, index: int, text: str, timeout: float = 15) -> None:
        """Wait until a cell, running or not, has printed `text`, for at most `timeout` seconds."""
        self.page.wait_for_function(
            "([index, text]) => JSON.stringify(window.dtkitLab.cells()[index].outputs).includes(text)",
            arg=[index, text],
            timeout=timeout * 1000,
        )

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """A cell's outputs, as nbformat has them, from the notebook's model."""
        outputs: list[dict[str, Any]] = self._cell(index).get("outputs", [])
        return outputs

    def text(self, index: int) -> str:
        """What a cell printed and what its outputs are as plain text, in order."""
        parts = [o.get("text", o.get("data", {}).get("text/plain", "")) for o in self.outputs(index)]
        return "".join("".join(part) for part in parts)

    def source(self, index: int) -> str:
        """A cell's source."""
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
        """A cell on screen: its buttons, pictures and widgets are found from here."""
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{index}"]')

    def save(self) -> NotebookNode:
        """Save the notebook and return what is in the file."""
        assert self._file is not None
        self.command("docmanager:save")
        self.page.wait_for_function("() => !window.dtkitLab.panel().context.model.dirty")
        return nbformat.read(self._file, as_version=4)

    # -- JupyterLab ---------------------------------------------------------------------------------------

    def command(self, name: str, **arguments: object) -> None:
        """Execute a command of JupyterLab and wait until it is done."""
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
        """Change JupyterLab's theme ("JupyterLab Light", "JupyterLab Dark") and wait until it shows."""
        self._theme = name
        self.command("apputils:change-theme", theme=name)
        shown = f"() => document.body.dataset.jpThemeName === {json.dumps(name)}"
        self.page.wait_for_function(shown, timeout=STEP_MS)

    def screenshot(self, path: str | Path) -> None:
        """Write what the window shows to a PNG file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, animations="disabled")

    def close(self) -> None:
        """End all kernels that this server runs."""
        self.page.evaluate("async () => { await window.jupyterapp?.serviceManager.sessions.shutdownAll(); }")

    def _cell(self, index: int) -> dict[str, Any]:
        cell: dict[str, Any] = self.page.evaluate("(index) => window.dtkitLab.cells()[index]", index)
        if cell is None:
            raise IndexError(f"the notebook has no cell {index}")
        return cell

    def _run(self, command: str) -> None:
        self.page.evaluate("(command) => window.dtkitLab.run(command)", command)
