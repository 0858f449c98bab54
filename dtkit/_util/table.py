"""A table, as aligned text and as HTML: the only place that lays out and escapes cells."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_MAX_UNBROKEN_CHARS = 14  # a longer text may wrap; a shorter one stays on one line
_PADDING = "padding: 0.3em 0.4em"  # JupyterLab's is wider, and a table of seven columns would be cut off


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells under a header. Text is aligned to the left, numbers to the right.

    A table without a header has columns of text only. Control characters in cells become spaces.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Collection[str] = ()
    """Names of the columns that hold text; the others hold numbers."""
    bold_cells: Collection[tuple[int, int]] = ()
    """Cells (row, column) that HTML shows in bold."""
    is_stacked: bool = False
    """Whether HTML shows the leading columns of text as a line of its own above each row: for many columns."""
    caption: str = ""
    """What HTML writes above the columns of a stacked table; by default the name of its first column."""

    def to_text(self, indent: str = "") -> str:
        """Return the table as lines of text, with two spaces between columns."""
        lines = [*([self.header] if self.header else []), *self.rows]
        if not lines:
            return ""
        cells = [[_clean(cell) for cell in line] for line in lines]
        left_aligned = [k for k in range(len(cells[0])) if self._is_text(k)]
        return "\n".join(indent + line for line in formatting.format_columns(cells, left_aligned))

    def to_html(self) -> str:
        """Return the table as HTML with every cell escaped."""
        head = f"<thead>{self._format_row(self.header, 'th')}</thead>" if self.header else ""
        body = "".join(self._format_stacks() if self.is_stacked else self._format_rows())
        head = f"<thead>{self._format_stacked_header()}</thead>" if self.is_stacked else head
        return f"<table style='font-size: 0.92em'>{head}<tbody>{body}</tbody></table>"

    def _is_text(self, column: int) -> bool:
        return not self.header or self.header[column] in self.text_columns

    def _format_row(self, cells: Sequence[str], tag: str, row: int = -1) -> str:
        return f"<tr>{''.join(self._format_cell(k, cell, tag, row) for k, cell in enumerate(cells))}</tr>"

    def _format_rows(self) -> Iterator[str]:
        for index, row in enumerate(self.rows):
            yield self._format_row(row, "td", index)

    @property
    def _num_stacked(self) -> int:
        """Leading columns of text, which a stacked table shows above the numbers."""
        return sum(1 for _ in itertools.takewhile(self._is_text, range(len(self.header))))

    def _format_stacked_header(self) -> str:
        names = list(enumerate(self.header))[self._num_stacked :]
        style = f"text-align: left; {_PADDING}"
        caption = (
            f'<tr><th colspan="{len(names)}" style="{style}">{html.escape(self.caption or self.header[0])}</th></tr>'
        )
        return f"{caption}<tr>{''.join(self._format_cell(k, name, 'th', -1) for k, name in names)}</tr>"

    def _format_stacks(self) -> Iterator[str]:
        num = self._num_stacked
        style = f"text-align: left; {_PADDING}; padding-bottom: 0"
        for index, row in enumerate(self.rows):
            others = [f"{self.header[k]} {row[k]}" for k in range(1, num) if row[k] != "all"]
            line = _add_breaks(html.escape(_clean(", ".join([row[0], *others]))))
            cells = (self._format_cell(k, cell, "td", index) for k, cell in list(enumerate(row))[num:])
            yield f'<tr><td colspan="{len(self.header) - num}" style="{style}">{line}</td></tr>'
            yield f"<tr>{''.join(cells)}</tr>"

    def _format_cell(self, column: int, cell: str, tag: str, row: int) -> str:
        style = "text-align: right"
        if tag == "td":
            style += "; white-space: nowrap"  # a number is never cut from its unit
        text = html.escape(_clean(cell))
        if self._is_text(column):
            style = f"text-align: left; min-width: {min(len(cell), _MAX_UNBROKEN_CHARS)}ch"
            text = _add_breaks(text)
        text = f"<b>{text}</b>" if (row, column) in self.bold_cells else text
        return f'<{tag} style="{style}; {_PADDING}">{text}</{tag}>'


def _add_breaks(text: str) -> str:
    """Let a name break after a bracket and between its words, as in ``ParameterAveraging(every=8)``."""
    return re.sub(r"\(|(?<=[a-z])(?=[A-Z])", lambda match: f"{match[0]}<wbr>", text)


def _clean(cell: str) -> str:
    """Replace control characters: cells hold text of users and of engines."""
    return "".join(character if character.isprintable() else " " for character in cell)
