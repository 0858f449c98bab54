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

_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells of a table; `left` are the columns of words, the others are numbers."""

    head: Sequence[str]
    body: Sequence[Sequence[str]]
    left: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Chapter:
    """One of the things that happen, one after the other."""

    title: str
    table: Table
    notes: Sequence[str]


def text(headline: str, chapters: Sequence[Chapter]) -> str:
    """The account in a page of text."""
    parts = [headline]
    for k, chapter in enumerate(chapters, 1):
        parts += ["", *_wrapped(chapter.title, f"{k}. "), "", *_lines(chapter.table), ""]
        parts += [line for note in chapter.notes for line in _wrapped(note, "   ")]
    return "\n".join(parts).rstrip()


def page(headline: str, chapters: Sequence[Chapter]) -> str:
    """The same as HTML."""
    parts = [f"<p><b>{html.escape(headline)}</b></p>"]
    for k, chapter in enumerate(chapters, 1):
        parts += [f"<p>{k}. {html.escape(chapter.title)}</p>", _html(chapter.table)]
        parts += [f"<p>{html.escape(note)}</p>" for note in chapter.notes]
    return "".join(parts)


def _wrapped(sentence: str, start: str) -> list[str]:
    return textwrap.wrap(sentence, _WIDTH, initial_indent=start, subsequent_indent="   ", break_on_hyphens=False)


def _lines(table: Table) -> list[str]:
    """Columns two spaces apart, words to the left and numbers to the right."""
    left = [k for k, name in enumerate(table.head) if name in table.left]
    return ["   " + line for line in formatting.columns([table.head, *table.body], left)]


def _html(table: Table) -> str:
    head = "".join(_cell("th", table, name, name) for name in table.head)
    body = "".join(
        "<tr>" + "".join(_cell("td", table, *pair) for pair in zip(table.head, row, strict=True)) + "</tr>"
        for row in table.body
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(tag: str, table: Table, name: str, content: str) -> str:
    side = "left" if name in table.left else "right"
    return f'<{tag} style="text-align:{side}">{html.escape(content)}</{tag}>'
