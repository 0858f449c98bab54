"""Which of the user's panels no page has in sight: the notebook doesn't draw these (``static/picture_sight.js``).

Each page reports this on every change, and again while it is open. A report that is old counts no more: its page may be
closed, or a blocking cell keeps the notebook from reading newer ones.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_PAGES = 32
_MAX_WIDTHS, _MAX_WIDTH = 200, 10_000


class PageSight:
    """Reports of pages, also on how wide they show panels. Panels are named by their titles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, frozenset[str]]] = {}  # by page: (time, titles of panels out of sight)
        self._widths: dict[str, int] = {}  # by title

    def note(self, report: Any) -> None:
        """Note a report, ``{"page": id, "away": titles, "widths": {title: pixels}}``. Anything else is ignored."""
        page, away = (report.get("page"), report.get("away")) if isinstance(report, dict) else (None, None)
        if isinstance(page, str) and isinstance(away, list):
            self._reports.pop(page, None)
            self._reports[page] = self._clock(), frozenset(title for title in away if isinstance(title, str))
            while len(self._reports) > _MAX_PAGES:
                self._reports.pop(next(iter(self._reports)))

            self._note_widths(report.get("widths"))

    def forget(self) -> None:
        """Forget what pages reported, as a page was opened: it reports nothing until it has a picture."""
        self._reports.clear()

    def _note_widths(self, widths: Any) -> None:
        for title, width in widths.items() if isinstance(widths, dict) and len(widths) <= _MAX_WIDTHS else ():
            if isinstance(width, int) and 0 < width <= _MAX_WIDTH and not isinstance(width, bool):
                self._widths[title] = width

    def get_width(self, title: str) -> int | None:
        """Return the CSS pixels of a panel's width on the page that reported last; None before a report."""
        return self._widths.get(title)

    def is_away(self, title: str) -> bool:
        """Return whether all open pages have this panel out of sight."""
        oldest = self._clock() - timeouts.SIGHT_REPORT_LIFE_S
        known = [away for at, away in list(self._reports.values()) if at >= oldest]
        return bool(known) and all(title in away for away in known)
