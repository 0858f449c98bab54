"""Titles and units of numbers by name: the user's own, and those of the machines."""

from __future__ import annotations

import re

from dtkit._util import formatting
from dtkit.history.scalars import SYSTEM_PREFIX

MAX_TITLE_CHARS = 60
"""Characters of a chart's title, which wraps in a page, and shrinks in a picture."""


def is_system_name(name: str) -> bool:
    """Return whether engines reported the number of themselves."""
    return name.startswith(SYSTEM_PREFIX)


def split_unit(name: str) -> tuple[str, str]:
    """Return (title, unit); the unit of ``system/CPU (cores)`` is in parentheses. A user's number has none."""
    if not is_system_name(name):
        return formatting.sanitize_text(name, MAX_TITLE_CHARS), ""
    name = name.removeprefix(SYSTEM_PREFIX)
    match = re.fullmatch(r"(.+) \((.+)\)", name)
    title, unit = (match[1], match[2]) if match else (name, "")
    return title[0].upper() + title[1:], unit
