"""A page of numbered sections (a sentence, a table, notes), as text and as HTML from the same parts."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit._util.table import Table

_LINE_WIDTH = 100
_INDENT = "   "


@dataclasses.dataclass(frozen=True)
class Section:
    """One phase of a step: what happens, its numbers, and notes on them."""

    title: str
    table: Table
    notes: Sequence[str]


def format_text(headline: str, sections: Sequence[Section]) -> str:
    """Return the page as text."""
    parts = [headline]
    for number, section in enumerate(sections, 1):
        parts += ["", *_wrap(section.title, f"{number}. "), "", section.table.to_text(_INDENT), ""]
        parts += [line for note in section.notes for line in _wrap(note, _INDENT)]
    return "\n".join(parts).rstrip()


def format_html(headline: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    parts = [f"<p><b>{html.escape(headline)}</b></p>"]
    for number, section in enumerate(sections, 1):
        parts += [f"<p>{number}. {html.escape(section.title)}</p>", section.table.to_html()]
        parts += [f"<p>{html.escape(note)}</p>" for note in section.notes]
    return "".join(parts)


def _wrap(sentence: str, indent: str) -> list[str]:
    return textwrap.wrap(
        sentence, _LINE_WIDTH, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False
    )
