"""What a person may see of a run's pages. Where a training pays for messages, a page that nobody watches gets fewer.

A page reports its level whenever that is another one (``static/attention.js``): somebody uses it, it is in sight, or no
view of it is in sight.
"""

from __future__ import annotations

import enum
from typing import Any


class Level(enum.IntEnum):
    """What a person may see of a page."""

    HIDDEN = 0
    OPEN = 1
    WATCHED = 2


_LEVELS = {level.name.lower(): level for level in Level}


class PageAttention:
    """Reports of pages."""

    def __init__(self) -> None:
        self._levels: dict[str, Level] = {}
        self.level = Level.WATCHED
        """The highest level of any page; the highest of all while no page has reported."""

    def begin(self) -> None:
        """Forget pages that may be closed, since another one was opened."""
        self._levels.clear()
        self.level = Level.WATCHED

    def note(self, report: Any) -> None:
        """Note a report, ``{"page": id, "level": "watched", "open" or "hidden"}``. Anything else is ignored."""
        page, name = (report.get("page"), report.get("level")) if isinstance(report, dict) else (None, None)
        if isinstance(page, str) and isinstance(name, str) and name in _LEVELS:
            self._levels[page] = _LEVELS[name]
            self.level = max(self._levels.values())
