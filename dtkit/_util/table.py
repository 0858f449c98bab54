"""A table, as aligned text and as HTML: the only place that lays out and escapes cells."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import textwrap
from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_MAX_UNBROKEN_CHARS = 14  # a longer text may wrap; a shorter one stays on one line
_MAX_NARROW_CHARS, _MAX_WIDE_COLUMNS = 9, 6  # of a narrow table: more columns have headers with hyphens
_MIN_TEXT_CHARS, _GAP = 10, "  "  # of a column of wrapped text; between columns
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
    is_narrow: bool = False
    """Whether HTML joins the leading columns of text into one, which wraps as headers do: for many columns."""
    caption: str = ""
    """What HTML writes above the columns of a narrow table; by default the name of its first column."""
    values: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    """Numbers of cells (row, column), by which a page sorts them."""
    small_texts: Mapping[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    """What HTML writes below the text of cells (row, column), small."""
    row_marks: Sequence[str] = ()
    """Trusted HTML before the first cell of each row, such as a sample of a line."""
    high_columns: Collection[str] = ()
    """Names of the columns whose highest number is the best: a page sorts by them downwards first."""
    sorted_column: tuple[str, str] | None = None
    """The column by which the rows are sorted, and its direction: "ascending" or "descending"."""

    def to_text(self, indent: str = "", max_width: int = 0) -> str:
        """Return the table as lines of text, with two spaces between columns.

        Headers and texts wrap where a line would be longer than `max_width` characters; 0 is no limit.
        """
        lines = [*([self.header] if self.header else []), *self.rows]
        if not lines:
            return ""
        cells = [[_clean(cell) for cell in line] for line in lines]
        left_aligned = [k for k in range(len(cells[0])) if self._is_text(k)]
        if max_width:
            cells = _wrap_cells(cells, left_aligned, max_width - len(indent))
        return "\n".join(indent + line for line in formatting.format_columns(cells, left_aligned))

    def to_html(self) -> str:
        """Return the table as HTML with every cell escaped."""
        table, caption = self, ""
        if self.is_narrow:
            table, caption = self._join_text_columns(), html.escape(self.caption or self.header[0])
            style = f"text-align: left; {_PADDING}"
            caption = f'<tr><th colspan="{len(table.header)}" style="{style}">{caption}</th></tr>'
        head = f"<thead>{caption}{table._format_row(table.header, 'th')}</thead>" if self.header else ""  # noqa: SLF001 - a table of this class
        body = "".join(table._format_rows())  # noqa: SLF001 - as above
        return f"<table style='font-size: 0.92em'>{head}<tbody>{body}</tbody></table>"

    def _join_text_columns(self) -> Table:
        """Return the table with one column of text; a further one is named, unless it is "all"."""
        num = sum(1 for _ in itertools.takewhile(self._is_text, range(len(self.header))))
        rows = []
        for row in self.rows:
            others = [f"{self.header[k]} {row[k]}" for k in range(1, num) if row[k] != "all"]
            rows.append([", ".join([row[0], *others]), *row[num:]])
        bold = {(row, max(0, column - num + 1)) for row, column in self.bold_cells}
        return dataclasses.replace(
            self, header=[self.header[0], *self.header[num:]], rows=rows, text_columns=self.header[:1], bold_cells=bold
        )

    def _is_text(self, column: int) -> bool:
        return not self.header or self.header[column] in self.text_columns

    def _format_row(self, cells: Sequence[str], tag: str, row: int = -1) -> str:
        return f"<tr>{''.join(self._format_cell(k, cell, tag, row) for k, cell in enumerate(cells))}</tr>"

    def _format_rows(self) -> Iterator[str]:
        for index, row in enumerate(self.rows):
            yield self._format_row(row, "td", index)

    def _format_cell(self, column: int, cell: str, tag: str, row: int) -> str:
        style = "text-align: right"
        if tag == "td":
            style += "; white-space: nowrap"  # a number is never cut from its unit
        text = html.escape(_clean(cell))
        if self._is_text(column):
            unbroken = _MAX_NARROW_CHARS if self.is_narrow else _MAX_UNBROKEN_CHARS
            width = f"{min(len(cell), unbroken)}ch"
            if column == 0 and self.row_marks:
                width = f"calc({width} + var(--mark-width, 36px))"
            style = f"text-align: left; min-width: {width}"
            text = _add_breaks(text)
            if self.is_narrow:
                style += "; overflow-wrap: anywhere"
                text = text.replace("=", "=<wbr>")
        elif self.is_narrow and tag == "th" and len(self.header) > _MAX_WIDE_COLUMNS:
            text = _add_hyphens(text)
        text = f"<b>{text}</b>" if (row, column) in self.bold_cells else text
        text += self._format_small_text(row, column)
        if column == 0 and 0 <= row < len(self.row_marks):
            text = f"{self.row_marks[row]} {text}"
        value = f' data-value="{self.values[row, column]!r}"' if (row, column) in self.values else ""
        value = self._format_column_marks(cell) if tag == "th" else value
        style += "; vertical-align: baseline" if self.small_texts else ""
        return f'<{tag} style="{style}; {_PADDING}"{value}>{text}</{tag}>'

    def _format_column_marks(self, name: str) -> str:
        """Return the attributes of a column's head for pages that sort, and for screen readers."""
        best = ' data-best="highest"' if name in self.high_columns else ""
        column, direction = self.sorted_column or (None, "")
        return f'{best} aria-sort="{direction}"' if name == column else best

    def _format_small_text(self, row: int, column: int) -> str:
        text = self.small_texts.get((row, column), "")
        return f'<br><small style="opacity: 0.7">{html.escape(text)}</small>' if text else ""


def _add_breaks(text: str) -> str:
    """Let a name break after a bracket and between its words, as in ``ParameterAveraging(every=8)``."""
    return re.sub(r"\(|(?<=[a-z]{3})(?=[A-Z][a-z]{2})", lambda match: f"{match[0]}<wbr>", text)


def _add_hyphens(text: str) -> str:
    """Let a long word of a header break, as in "activa-tions", which else is wider than the numbers below it."""
    middle = ((word, (len(word[0]) + 1) // 2) for word in re.finditer("[a-z]{8,}", text))
    for word, length in reversed(list(middle)):
        text = f"{text[: word.start() + length]}&shy;{text[word.start() + length :]}"
    return text


def _wrap_cells(lines: Sequence[Sequence[str]], text_columns: Collection[int], max_width: int) -> list[list[str]]:
    """Return lines that fit into `max_width`, as far as wrapped headers and texts allow it. Numbers stay whole."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    gaps = len(_GAP) * (len(widths) - 1)
    if sum(widths) + gaps <= max_width:
        return [list(line) for line in lines]
    for k, (header, *cells) in enumerate(zip(*lines, strict=True)):
        if k not in text_columns:
            widths[k] = max(map(len, [*header.split(), *cells]), default=1)
    while sum(widths) + gaps > max_width:
        widest = max(text_columns, key=lambda k: widths[k], default=None)
        if widest is None or widths[widest] <= _MIN_TEXT_CHARS:
            break
        widths[widest] -= 1
    wrapped = []
    for line in lines:
        parts = [
            textwrap.wrap(cell, max(1, width), break_on_hyphens=False) for cell, width in zip(line, widths, strict=True)
        ]
        wrapped += [list(part) for part in itertools.zip_longest(*parts, fillvalue="")]
    return wrapped


def _clean(cell: str) -> str:
    """Replace control characters: cells hold text of users and of engines."""
    return "".join(character if character.isprintable() else " " for character in cell)
