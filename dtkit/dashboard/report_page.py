"""The frame of a report: one HTML file without network or scripts, light or dark as the reader's system is."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard import svg_chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dtkit._util.table import Table

MAX_OPEN_ROWS = 12
"""Rows of a table that is not folded."""

_LIGHT = "--page: #fff; --ink: #1a1a1a; --muted: #5f5f5f; --line: #e4e4e4; --card: #f5f7f9; --accent: #0b62a0"
_DARK = "--page: #16191d; --ink: #e8e8e8; --muted: #a3a9b0; --line: #343a41; --card: #1f242a; --accent: #74bdf0"

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>
:root {{ {light}; }}
{light_colors}
@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} {dark_colors} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1120px;
  margin: 24px auto; padding: 0 16px; }}
h1 {{ font-size: 24px; margin-bottom: 2px; }} h2 {{ font-size: 18px; margin-top: 30px; }}
h3 {{ font-size: 14px; margin: 0 0 4px; }} h3 small {{ font-weight: normal; color: var(--muted); margin-left: 8px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }}
th, td {{ padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }}
.scroll {{ overflow-x: auto; }} p {{ max-width: 80ch; }} .lead {{ color: var(--muted); margin-top: 0; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 14px 0; }}
.card {{ background: var(--card); border-radius: 8px; padding: 10px 14px; }}
.card b {{ font-size: 21px; display: block; }}
.card span {{ color: var(--muted); font-size: 12.5px; display: block; }}
.verdict {{ border-left: 3px solid var(--accent); padding: 4px 12px; }}
.error {{ color: light-dark(#b84a00, #ff8548); font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap;
  max-width: none; border-left: 3px solid; padding: 4px 12px; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 22px 28px; }}
figure {{ margin: 0; }} details {{ margin: 8px 0; }} summary {{ cursor: pointer; color: var(--accent); }}
details img {{ max-width: 100%; height: auto; border-radius: 6px; }}
{chart_css}
</style></head><body>
{body}
</body></html>
"""


def format_page(title: str, parts: Iterable[str]) -> str:
    """Return the whole file."""
    return _TEMPLATE.format(
        title=escape(title), body="\n".join(parts), light=_LIGHT, dark=_DARK, chart_css=svg_chart.CSS,
        light_colors=svg_chart.make_color_css("light"), dark_colors=svg_chart.make_color_css("dark"),
    )  # fmt: skip


def format_cards(cards: Iterable[tuple[str, str, str]]) -> str:
    """Return the headline numbers: (label, value, note)."""
    items = "".join(
        f'<div class="card"><span>{escape(label)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for label, value, note in cards
    )
    return f'<div class="cards">{items}</div>'


def format_table(table: Table) -> str:
    """Return a table that may scroll to the side."""
    return f'<div class="scroll">{table.to_html()}</div>'


def format_long_table(name: str, table: Table, notes: Sequence[str] = ()) -> str:
    """Return a table under a heading, folded where it is long."""
    body = format_table(table) + "".join(f"<p>{escape(note)}</p>" for note in notes)
    if len(table.rows) <= MAX_OPEN_ROWS:
        return f"<h2>{escape(name)}</h2>{body}"
    rows = formatting.format_count(len(table.rows), "row")
    return f"<h2>{escape(name)}</h2><details><summary>{rows}</summary>{body}</details>"


def escape(text: str) -> str:
    """Return text of users and engines, safe for HTML."""
    return html.escape(formatting.sanitize_text(text, 1000))
