"""A page of a headline, tables, and notes, as text and as HTML from the same parts."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit._util.table import Table


@dataclasses.dataclass(frozen=True)
class TablePage:
    """Parts of a page, from top to bottom."""

    headline: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    lead: Sequence[str] = ()
    """Lines below the headline."""

    def to_text(self) -> str:
        """Return the page as text."""
        return "\n".join([self.headline, *self.lead, *(table.to_text() for table in self.tables), *self.notes])

    def to_html(self) -> str:
        """Return the page as HTML."""
        tables = "".join(table.to_html() for table in self.tables)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        head = "".join(f"<p>{html.escape(line)}</p>" for line in [self.headline, *self.lead])
        return f"{head}{tables}{notes}"
