"""Operators of a profile as text and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.text.numbers import describe_remaining, shorten_name
from dtkit.dashboard.text.table_page import TablePage

if TYPE_CHECKING:
    from dtkit.history.profile import Profile

MAX_OPERATORS = 15
"""Operators with a row of their own."""
_MAX_RANKS = 8


def format_text(profile: Profile) -> str:
    """Return the table as text."""
    return make_page(profile).to_text()


def format_html(profile: Profile) -> str:
    """Return the table as HTML."""
    return make_page(profile).to_html()


def format_headline(profile: Profile) -> str:
    """Return a headline such as ``Profile of Net: steps 8 to 10 on 2 ranks``."""
    last = profile.first_step + profile.num_steps - 1
    steps = f"step {last:,}" if profile.num_steps == 1 else f"steps {profile.first_step:,} to {last:,}"
    name = formatting.sanitize_text(profile.name, 60)
    return f"Profile of {name}: {steps} on {formatting.format_count(len(profile.ranks), 'node')}"


def make_page(profile: Profile) -> TablePage:
    """Return the table of the operators that take longest."""
    rows, steps = profile.operators, max(1, profile.num_steps)
    shown_ranks = range(min(len(profile.ranks), _MAX_RANKS))
    cells = [
        (
            shorten_name(row.name),
            f"{row.calls / steps / len(profile.ranks):,.3g}",
            formatting.format_percent(row.share),
            *(formatting.format_duration(row.self_s[rank] / steps) for rank in shown_ranks),
        )
        for row in rows[:MAX_OPERATORS]
    ]
    header = ("operator", "calls a step", "share", *(f"node {rank}" for rank in shown_ranks))
    notes = [
        *describe_remaining(len(rows), "operator", MAX_OPERATORS),
        *describe_remaining(len(profile.ranks), "node", _MAX_RANKS),
        (
            "time of each node in a step, without operators that it calls; share: of all operators' time; "
            'profile.export_chrome_trace("trace.json.gz") writes the trace for ui.perfetto.dev'
        ),
    ]
    return TablePage(format_headline(profile), [Table(header, cells, {"operator"})], notes)
