"""The result of ``run.report()``: a link with headline numbers in a notebook, a line of text elsewhere."""

from __future__ import annotations

import html
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from dtkit._util import formatting
from dtkit._util.arguments import check_no_folder, check_path
from dtkit._util.suffixes import WEB_PAGE, check_suffix

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SHOWN_CARDS = 6
_CARD = (  # as the headline numbers of a run's picture
    "flex: 1 1 128px; max-width: 260px; padding: 7px 10px; border-radius: 8px; background: rgba(128, 128, 128, 0.14)"
)


class WrittenReport(os.PathLike[str]):
    """A report that was written: an HTML file of its own, at `path`. ``open(report)`` and ``Path(report)`` take it."""

    def __init__(self, title: str, path: str | Path, cards: Sequence[tuple[str, str, str]] = ()) -> None:
        self.path = Path(path).absolute()
        """Where the file is."""
        self._title, self._cards = title, tuple(cards)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"{self._title}: {self.path} ({self._format_size()})"

    def _repr_html_(self) -> str:
        """Return a link, relative to the notebook's folder as JupyterLab needs it, over the headline numbers."""
        cards = "".join(
            f'<div style="{_CARD}"><div style="opacity: 0.72">{_escape(label)}</div>'
            f'<strong style="font-size: 1.45em">{_escape(value)}</strong>'
            f'<div style="opacity: 0.72">{_escape(note)}</div></div>'
            for label, value, note in [card for card in self._cards if card[1] != formatting.UNKNOWN][:_MAX_SHOWN_CARDS]
        )
        relative = Path(os.path.relpath(self.path)).as_posix()
        shown = str(self.path) if relative.startswith("..") else relative
        return (
            f'<div><p><a href="{html.escape(quote(relative))}" target="_blank" title="{_escape(str(self.path))}">'
            f"{_escape(self._title)}</a>: {_escape(shown)} ({self._format_size()})</p>"
            f'<div style="display: flex; flex-wrap: wrap; gap: 8px; line-height: 1.45">{cards}</div></div>'
        )

    def _format_size(self) -> str:
        return formatting.format_bytes(self.path.stat().st_size) if self.path.exists() else "no longer there"


def _escape(text: str) -> str:
    return html.escape(formatting.sanitize_text(text, 500))


def check_folder(path: str | Path) -> None:
    """Raise FileNotFoundError if the folder of a report does not exist, before the report is made."""
    check_path(path)
    check_no_folder("report", path)
    check_suffix("report(", path, WEB_PAGE)
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"report({str(path)!r}): the folder {folder} does not exist. Create it, or name another"
        )


def check_description(description: str) -> None:
    """Raise TypeError for a description that is not a text, before the report is made."""
    if not isinstance(description, str):
        raise TypeError(f'description={description!r}: a text, as in report(description="batch size doubled")')


def make_file_name(name: str, started_at: float | None = None) -> str:
    """Return the default name of a report: the same for the same run, and another for each run."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:60].strip("-.") or "run"
    moment = "" if started_at is None else time.strftime("-%Y%m%d-%H%M%S", time.localtime(started_at))
    return f"{stem}{moment}.html"
