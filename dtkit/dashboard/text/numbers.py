"""Numbers and names in the text of an explained step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RANKS = 16
"""Ranks, or stages, with a line of their own."""
MAX_NAME_CHARS = 44
"""Characters of a parameter's name in a table."""
TIMES_SIGN = "\N{MULTIPLICATION SIGN}"


def format_number(value: float | None) -> str:
    """Return four significant digits, enough to check a sum by hand; a dash for None."""
    if value is None:
        return formatting.UNKNOWN
    if not value or not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}"
    return f"{value:#.4g}".rstrip(".")


def format_shape(shape: Sequence[int]) -> str:
    """Return the lengths of a shape, or ``scalar``."""
    return TIMES_SIGN.join(map(str, shape)) or "scalar"


def shorten_name(name: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return a parameter's name, safe to show. Of a long name the end is kept, which differs from its neighbors."""
    clean = formatting.sanitize_text(name)
    return clean if len(clean) <= max_chars else "…" + clean[1 - max_chars :]


def describe_remaining(count: int, noun: str, max_shown: int = MAX_RANKS) -> list[str]:
    """Return a note such as ``and 3 more ranks`` where some have no line; else an empty list."""
    remaining = count - max_shown
    return [f"and {formatting.format_count(remaining, f'more {noun}')}"] if remaining > 0 else []


def describe_clipping(clip: float | None, norm: str, *, updated: bool) -> list[str]:
    """Return a note on gradient clipping. `norm` names the norm, such as ``the norm over all stages``."""
    if clip is None or not updated:
        return []
    if clip >= 1:
        return [f"Clipping: {norm} is within the limit, so the gradient stays as it is."]
    return [f"Clipping: {norm} is over the limit: all is multiplied by {clip:.4g}."]
