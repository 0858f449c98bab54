"""Whether a person is at a page. Where a training pays for each message, one that nobody watches gets fewer.

A page reports when a person comes and when they have gone (``static/attention.js``).
"""

from __future__ import annotations

from typing import Any


class PageAttention:
    """Reports of pages."""

    def __init__(self) -> None:
        self._watched_pages: set[str] = set()
        self.is_watched = True
        """Whether a person may be at any page."""

    def begin(self) -> None:
        """Forget pages that may be closed, since another one was opened."""
        self._watched_pages.clear()
        self.is_watched = True

    def note(self, report: Any) -> None:
        """Note a report, ``{"page": id, "isWatched": bool}``. Anything else is ignored."""
        page, is_watched = (report.get("page"), report.get("isWatched")) if isinstance(report, dict) else (None, None)
        if not isinstance(page, str) or not isinstance(is_watched, bool):
            return
        if is_watched:
            self._watched_pages.add(page)
        else:
            self._watched_pages.discard(page)
        self.is_watched = bool(self._watched_pages)
