"""The frame of a report: one HTML file without network, light or dark as the reader's system is."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Literal

from dtkit._util import formatting
from dtkit.dashboard import svg_chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dtkit._util.table import Table

MAX_OPEN_ROWS = 12
"""Rows of a table that is not folded."""

_LIGHT = (
    "--page: #fff; --ink: #1a1a1a; --muted: #5f5f5f; --line: #e4e4e4; --card: #f5f7f9; --accent: #0b62a0; "
    "--good: #00795a; --bad: #b84a00"
)
_DARK = (
    "--page: #16191d; --ink: #e8e8e8; --muted: #a3a9b0; --line: #343a41; --card: #1f242a; --accent: #74bdf0; "
    "--good: #35c79b; --bad: #ff8548"
)

_EDGE, _DARKER = "var(--page) 50%, transparent", "color-mix(in srgb, var(--ink) 40%, var(--page)), transparent"
_SHADOWS = (
    f"linear-gradient(90deg, {_EDGE}) 0 0 / 36px 100% local no-repeat, "
    f"linear-gradient(270deg, {_EDGE}) 100% 0 / 36px 100% local no-repeat, "
    f"linear-gradient(90deg, {_DARKER}) 0 0 / 18px 100% scroll no-repeat, "
    f"linear-gradient(270deg, {_DARKER}) 100% 0 / 18px 100% scroll no-repeat"
)
"""Shadows where a table goes on, covered by its ends, as in the live views."""

_MAX_CARDS_IN_A_ROW = {"wide": 6, "middle": 4, "narrow": 3}
"""The most cards in a row of a page, which its width sets."""

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
script-src 'unsafe-inline'; img-src data: blob:"><meta name="color-scheme" content="light dark"><title>{title}</title>
<style>
:root {{ color-scheme: light; {light}; }}
@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark}; }} }}
:root:has(#light:checked) {{ color-scheme: light; {light}; }}
:root:has(#dark:checked) {{ color-scheme: dark; {dark}; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1280px;
  margin: 24px auto; padding: 0 20px 40px; }}
h1 {{ font-size: 26px; margin: 0; display: flex; flex-wrap: wrap; align-items: center; gap: 4px 14px; }}
h2 {{ font-size: 18px; margin: 34px 0 10px; }}
h3 {{ font-size: 14px; margin: 0 0 4px; }} h3 small {{ font-weight: normal; color: var(--muted); margin-left: 8px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }}
th {{ color: var(--muted); font-weight: 600; }}
th, td {{ padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }}
.facts td:first-child {{ color: var(--muted); white-space: nowrap; min-width: 0 !important; }}
.facts td:last-child {{ min-width: 0 !important; overflow-wrap: anywhere; }}
.code td:last-child {{ font: 12.5px/1.5 ui-monospace, monospace; }}
.columns {{ columns: 2 600px; column-gap: 40px; }} .columns :is(tr, .scroll, details) {{ break-inside: avoid; }}
.columns :is(section, .facts):not(:has(tr:nth-child({first_split_row}))) {{ break-inside: avoid; }}
.columns h2 {{ break-after: avoid; }} .columns p {{ break-before: avoid; }} /* many facts go on in the next column */
.columns.balanced {{ columns: auto; display: flex; flex-direction: column; }} .balanced > div {{ display: contents; }}
@media screen and (min-width: 1300px) {{ .columns.balanced {{ display: grid; grid-template-columns: 1fr 1fr; }}
  .balanced > div {{ display: block; min-width: 0; }} }} /* columns.js */
.columns h2 {{ margin-top: 0; padding-top: 28px; }} .columns table {{ width: 100%; }}
.columns section {{ font-size: 14px; }} .columns :is(th, td) {{ padding-inline: 4px !important; }}
.columns .facts td:first-child {{ width: 190px; }}
.sortable button {{ all: unset; cursor: pointer; border-radius: 3px; }} .sortable td small {{ color: var(--muted); }}
.sortable button:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px; }}
.sortable button::after {{ content: "↕" / ""; display: inline-block; width: 1em; text-align: center; opacity: 0.45; }}
.sortable [aria-sort]:not([aria-sort=none]) button {{ color: var(--ink); }}
.sortable [aria-sort=ascending] button::after {{ content: "▲" / ""; opacity: 1; }}
.sortable [aria-sort=descending] button::after {{ content: "▼" / ""; opacity: 1; }}
.scroll {{ overflow-x: auto; scrollbar-width: thin; background: {shadows}; }}
p {{ max-width: 80ch; }} ul {{ max-width: 80ch; margin: 6px 0 12px; padding-left: 22px; }}
.lead {{ color: var(--muted); margin-top: 2px; max-width: none; }}
.description {{ white-space: pre-line; overflow-wrap: anywhere; }}
time {{ white-space: nowrap; }}
.state {{ font-size: 13px; font-weight: 700; padding: 1px 12px; border: 1.5px solid; border-radius: 99px;
  color: var(--muted); }} .state.good {{ color: var(--good); }} .state.bad {{ color: var(--bad); }}
.theme {{ float: right; font-size: 12px; color: var(--muted); border: 1px solid var(--line); border-radius: 7px;
  margin: 4px 0 0 12px; padding: 1px; }} .theme label {{ padding: 2px 9px; cursor: pointer; display: inline-block; }}
.theme input {{ position: absolute; opacity: 0; }} .theme label:has(:checked) {{ background: var(--card);
  color: var(--ink); border-radius: 6px; }} .theme label:has(:focus-visible) {{ outline: 2px solid var(--accent); }}
.cards {{ display: grid; grid-template-columns: repeat(var(--wide), 1fr); gap: 10px; margin: 16px 0; }}
@media (max-width: 1060px) {{ .cards {{ grid-template-columns: repeat(var(--middle), 1fr); }} }}
@media (max-width: 700px) {{ .cards {{ grid-template-columns: repeat(var(--narrow), 1fr); }}
  .card:last-child:nth-child(3n + 1) {{ grid-column: 1 / -1; }} }} /* seven */
.card {{ background: var(--card); border-radius: 8px; padding: 10px 14px; }}
.card b {{ font-size: 22px; display: block; line-height: 1.35; font-variant-numeric: tabular-nums; }}
.card span {{ color: var(--muted); font-size: 12.5px; display: block; line-height: 1.4; }}
.verdict, .notice {{ border-left: 3px solid var(--accent); padding: 4px 12px; }}
.notice.alert {{ border-left-color: var(--bad); max-width: none; }}
.notice code {{ font: 0.9em ui-monospace, monospace; }}
.verdict details {{ margin: 2px 0 0; font-size: 13.5px; }} .verdict details div {{ color: var(--muted);
  padding-left: 32px; text-indent: -16px; }} /* a line that wraps isn't taken for two */
.error {{ color: var(--bad); font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap;
  max-width: none; border-left: 3px solid; padding: 4px 12px; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 26px 32px; }}
.charts figure {{ max-width: 720px; }}
.marks {{ color: var(--muted); font-size: 13px; margin: 0 0 12px; max-width: none; }}
figure {{ margin: 0; min-width: 0; }} details {{ margin: 8px 0; }} summary {{ cursor: pointer; color: var(--accent); }}
.panel img {{ max-width: 100%; height: auto; }} .charts .panel.wide {{ grid-column: 1 / -1; max-width: none; }}
@media (max-width: 700px) {{ body {{ padding: 0 12px 40px; }} .scroll table {{ font-size: 12px !important; }}
  .scroll :is(th, td) {{ padding: 4px 3px !important; }} }}
@media print {{ .theme {{ display: none; }} figure, .card {{ break-inside: avoid; }} }}
{chart_css}
</style></head><body>
<div class="theme" role="radiogroup" aria-label="colors">
<label><input type="radio" name="theme" checked>auto</label
><label><input type="radio" name="theme" id="light">light</label
><label><input type="radio" name="theme" id="dark">dark</label></div>
{body}
</body></html>
"""


def format_page(title: str, parts: Iterable[str]) -> str:
    """Return the whole file."""
    return _TEMPLATE.format(
        title=escape(title), body="\n".join(parts), chart_css=svg_chart.make_css(),
        shadows=_SHADOWS, first_split_row=MAX_OPEN_ROWS + 1,
        light=f"{_LIGHT}; {svg_chart.make_color_variables('light')}",
        dark=f"{_DARK}; {svg_chart.make_color_variables('dark')}",
    )  # fmt: skip


_TYPED = re.compile(r"\b(?:run|cluster|dtkit|torch)\.\w[\w.]*(?:\([^()\n]*\))?|\b[a-z]\w*=(?:\S*[^\s.,:;)])?")
"""What a user types, in a sentence: ``run.set(lr=0.1)``, ``clip_grad_norm=1.0``."""


def format_notice(text: str, *, is_alert: bool = False) -> str:
    """Return a sentence about a run in a box. Only what a user types is in the font of code."""
    clean, parts, end = formatting.sanitize_text(text, 1000), [], 0
    for match in _TYPED.finditer(clean):
        parts += [html.escape(clean[end : match.start()]), f"<code>{html.escape(match[0])}</code>"]
        end = match.end()
    return f'<p class="notice{" alert" if is_alert else ""}">{"".join(parts)}{html.escape(clean[end:])}</p>'


def format_description(text: str) -> str:
    """Return the user's words about a report, in their lines; nothing without any."""
    lines = "\n".join(escape(line) for line in text.strip().splitlines())
    return f'<p class="description">{lines}</p>' if lines else ""


def format_columns(sections: Iterable[Iterable[str]]) -> str:
    """Return sections in two columns of about the same height where the page has room, and in one elsewhere.

    Where a page runs scripts, ``static/columns.js`` finds columns with a smaller hole below the shorter one.
    """
    parts = ("\n".join(section) for section in sections)
    return f'<div class="columns">{"".join(f"<section>{part}</section>" for part in parts if part)}</div>'


def format_cards(cards: Iterable[tuple[str, str, str]]) -> str:
    """Return the headline numbers: (label, value, note)."""
    items = [
        f'<div class="card"><span>{escape(label)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for label, value, note in cards
    ]
    columns = "; ".join(f"--{width}: {count}" for width, count in choose_card_columns(len(items)))
    return f'<div class="cards" style="{columns}">{"".join(items)}</div>'


def choose_card_columns(num_cards: int) -> list[tuple[str, int]]:
    """Return the columns of each width of a page: as few rows as it has room for, of about one length."""
    num_rows = {width: max(1, -(-num_cards // most)) for width, most in _MAX_CARDS_IN_A_ROW.items()}
    return [(width, max(1, -(-num_cards // rows))) for width, rows in num_rows.items()]


def format_table(table: Table, role: Literal["", "sortable", "follows"] = "") -> str:
    """Return a table that may scroll to the side.

    A page with scripts sorts a `sortable` one by its columns on demand. One that `follows` has the same runs, and is
    put into the same order.
    """
    return f'<div class="scroll{" " if role else ""}{role}">{table.to_html()}</div>'


def format_facts(table: Table, *, is_code: bool = False) -> str:
    """Return a table of names and values, which wrap; with `is_code` in the font of code."""
    return f'<div class="facts{" code" if is_code else ""}">{table.to_html()}</div>'


def fold_facts(summary: str, table: Table) -> str:
    """Return a table of names and values that a reader unfolds."""
    return f"<details><summary>{escape(summary)}</summary>{format_facts(table)}</details>"


def format_long_table(name: str, table: Table, notes: Sequence[str] = ()) -> str:
    """Return a table under a heading, folded where it is long."""
    if len(table.rows) <= MAX_OPEN_ROWS:
        return f"<h2>{escape(name)}</h2>{_format_noted_table(table, notes)}"
    return f"<h2>{escape(name)}</h2>{fold_table(formatting.format_count(len(table.rows), 'row'), table, notes)}"


def fold_table(summary: str, table: Table, notes: Sequence[str] = ()) -> str:
    """Return a table that a reader unfolds."""
    return f"<details><summary>{escape(summary)}</summary>{_format_noted_table(table, notes)}</details>"


def _format_noted_table(table: Table, notes: Sequence[str]) -> str:
    return format_table(table) + "".join(f"<p>{escape(note)}</p>" for note in notes)


def escape(text: str) -> str:
    """Return text of users and engines, safe for HTML."""
    return html.escape(formatting.sanitize_text(text, 1000))
