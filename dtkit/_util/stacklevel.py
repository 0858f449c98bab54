"""Stack levels of warnings."""

from __future__ import annotations

import sys


def find_caller_stacklevel() -> int:
    """Return the stack level of the first caller outside this package, to which a warning should point."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - inspect.stack() reads every source file
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "dtkit":
        frame, level = frame.f_back, level + 1
    return level
