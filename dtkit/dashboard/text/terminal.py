"""The live block of a run in a terminal, by rich: a bar, colored lines below it, and the scrolling log."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dtkit.dashboard.summary.notices import ALERT_KINDS, NOTICE_GLYPHS
from dtkit.dashboard.summary.verdict import VERDICT_GLYPH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import Status

_BAR_WIDTH = 24
_STATE_STYLES = {
    "running": "bold green",
    "paused": "bold yellow",
    "completed": "bold cyan",
    "failed": "bold red",
    "diverged": "bold red",
    "completed, diverged": "bold red",
    "stopped, diverged": "bold red",
    "stopped, not finite": "bold red",
    "completed, learned nothing": "bold yellow",
    "stopped, learned nothing": "bold yellow",
}
_GLYPH_STYLES = {
    **{NOTICE_GLYPHS[kind]: "bold red" for kind in ALERT_KINDS},
    "✓": "green",
    "▲": "yellow",
    "▼": "yellow",
    VERDICT_GLYPH: "cyan",
}


class TerminalBlock:
    """The lines at the bottom of a terminal, which each :meth:`show` replaces."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live: Live | None = None

    def show(self, new_lines: Sequence[str], status: Status, head: tuple[str, str], lines: Sequence[str]) -> None:
        """Print new lines of the log above, and replace the block: the bar, and `lines` below.

        The bar is between the texts of `head`: the word for the state, and the position.
        """
        block = Group(_make_head(status, *head), *(_color_line(line) for line in lines))
        if self._live is None:
            self._live = Live(
                block, console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
                vertical_overflow="crop", transient=True,
            )  # fmt: skip
            self._live.start()
        for line in new_lines:
            self._console.print(Text(line, no_wrap=True, overflow="ellipsis", style="dim"))
        self._live.update(block, refresh=True)

    def close(self, lines: Sequence[str]) -> None:
        """Replace the block by `lines`, which wrap, and give the cursor back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        for line in lines:
            self._console.print(_color_line(line), no_wrap=False, overflow="fold")


def _make_head(status: Status, state: str, position: str) -> Table:
    head = Table.grid(padding=(0, 1))
    for _ in range(3):
        head.add_column(no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(total=max(1, status.steps), completed=status.step, width=_BAR_WIDTH, complete_style="cyan")
    head.add_row(Text(state, style=_STATE_STYLES.get(state.split(",", maxsplit=1)[0], "bold")), bar, Text(position))
    return head


def _color_line(line: str) -> Text:
    style = _GLYPH_STYLES.get(line.strip()[:1], "")
    return Text(line, no_wrap=True, overflow="ellipsis", style=style)
