"""An account in numbered chapters (a sentence, a table, notes) as text and as HTML.

Both are made of the same sentences and tables of cells, so that they can't tell two stories.
"""

from __future__ import annotations

import dataclasses
import html
import textwrap
from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

_LINE_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells of a table; `left` are the columns of words, the others are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Section:
    """One of the things that happen, one after the other."""

    title: str
    table: Table
    notes: Sequence[str]


def format_text(headline: str, sections: Sequence[Section]) -> str:
    """The account in a page of text."""
    parts = [headline]
    for k, chapter in enumerate(sections, 1):
        parts += ["", *_wrap(chapter.title, f"{k}. "), "", *_format_table_lines(chapter.table), ""]
        parts += [line for note in chapter.notes for line in _wrap(note, "   ")]
    return "\n".join(parts).rstrip()


def format_html(headline: str, sections: Sequence[Section]) -> str:
    """The same as HTML."""
    parts = [f"<p><b>{html.escape(headline)}</b></p>"]
    for k, chapter in enumerate(sections, 1):
        parts += [f"<p>{k}. {html.escape(chapter.title)}</p>", _format_html_table(chapter.table)]
        parts += [f"<p>{html.escape(note)}</p>" for note in chapter.notes]
    return "".join(parts)


def _wrap(sentence: str, indent: str) -> list[str]:
    return textwrap.wrap(sentence, _LINE_WIDTH, initial_indent=indent, subsequent_indent="   ", break_on_hyphens=False)


def _format_table_lines(table: Table) -> list[str]:
    """Columns two spaces apart, words to the left and numbers to the right."""
    left = [k for k, name in enumerate(table.header) if name in table.text_columns]
    return ["   " + line for line in formatting.format_columns([table.header, *table.rows], left)]


def _format_html_table(table: Table) -> str:
    head = "".join(_format_html_cell("th", table, name, name) for name in table.header)
    body = "".join(
        "<tr>"
        + "".join(_format_html_cell("td", table, *pair) for pair in zip(table.header, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _format_html_cell(tag: str, table: Table, column: str, content: str) -> str:
    side = "left" if column in table.text_columns else "right"
    return f'<{tag} style="text-align:{side}">{html.escape(content)}</{tag}>'
