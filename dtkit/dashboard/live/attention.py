"""What a person may see of a run's pages. Where a training pays for messages, a page that nobody watches gets fewer.

A page reports its level whenever that is another one (``static/attention.js``): somebody uses it, it is in sight, or no
view of it is in sight. With it comes how often a person wants updates.
"""

from __future__ import annotations

import enum
import math
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
        self._refresh_s: dict[str, float] = {}

    def begin(self) -> None:
        """Forget pages that may be closed, since another one was opened."""
        self._levels.clear()
        self._refresh_s.clear()
        self.level = Level.WATCHED

    @property
    def refresh_s(self) -> float:
        """Shortest time between two updates that persons chose on pages of the highest level; 0 without a choice."""
        shown = [page for page, level in self._levels.items() if level is self.level]
        return min((self._refresh_s[page] for page in shown), default=0.0)

    def note(self, report: Any) -> None:
        """Note a report, ``{"page": id, "level": "watched", "open" or "hidden", "refresh": seconds}``.

        Anything else is ignored.
        """
        page, name = (report.get("page"), report.get("level")) if isinstance(report, dict) else (None, None)
        if isinstance(page, str) and isinstance(name, str) and name in _LEVELS:
            self._levels[page] = _LEVELS[name]
            self._refresh_s[page] = _read_refresh(report.get("refresh"))
            self.level = max(self._levels.values())


def _read_refresh(seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return 0.0
    return max(0.0, float(seconds))
