"""The source of a lambda, without the statement around it."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types


def read_body(code: types.CodeType) -> str | None:
    """Return the source of a lambda's body, found by the positions of its instructions; None without a source."""
    spans = [
        (line, column, end_line, end_column)
        for line, end_line, column, end_column in code.co_positions()
        if line is not None and column is not None and end_line is not None and end_column and end_column > column >= 0
    ]
    if not spans:
        return None
    first = min(span[:2] for span in spans)
    last = max(span[2:] for span in spans)
    lines = [linecache.getline(code.co_filename, number) for number in range(first[0], last[0] + 1)]
    if not all(lines):
        return None
    # Columns count the bytes of UTF-8.
    parts = [line.encode() for line in lines]
    parts[-1] = parts[-1][: last[1]]
    parts[0] = parts[0][first[1] :]
    return " ".join(b" ".join(parts).decode(errors="replace").split())
