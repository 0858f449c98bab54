"""The charts of a report that can be zoomed: the modules of the live views, with the messages that those would get.

A page without scripts, such as one that JupyterLab doesn't trust, keeps the charts of
:mod:`~dtkit.dashboard.svg_chart`. A printer gets those too.
"""

from __future__ import annotations

import base64
import functools
import json
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.live.bundle import STATIC_FOLDER, bundle_modules
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.dashboard.summary.best_marks import list_best_marks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dtkit.dashboard.live.comparison_messages import ComparisonView
    from dtkit.dashboard.live.messages import Message
    from dtkit.dashboard.run_view import RunView

_CSS = """
body { --jp-layout-color0: var(--page); --jp-layout-color1: var(--page); --jp-ui-font-color0: var(--ink); }
#dtk-live, .dtk-is-live .drawn { display: none; } .dtk-is-live #dtk-live { display: block; }
#dtk-live .dtkit { border: 0; max-width: none; } #dtk-live .dtk-body { padding: 0; }
#dtk-live [data-testid="report-charts"] .dtk-lone { grid-column: 1 / -1; } /* no panel appears beside it later */
#dtk-live .dtk-small { display: grid; grid-column: 1 / -1; gap: 12px 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(250px, 100%), 1fr)); }
#dtk-live .dtk-small .dtk-wide { grid-column: auto; }
#dtk-live .dtk-small .dtk-flat { background: var(--card); border-radius: 8px; padding: 8px 12px; }
#dtk-live .dtk-small .dtk-flat > h3 { float: none; margin: 0; }
#dtk-live .dtk-small .dtk-flat .dtk-note { display: block; margin: 0; }
@media print { .dtk-is-live #dtk-live { display: none; } .dtk-is-live .drawn { display: block; } }
"""
_UNUSED = ("events", "nodes", "notices", "verdict", "time", "table", "settings")
"""Parts of messages that no chart shows, and that the page has elsewhere. Labels of lines have numbers of the tiles."""
_EMPTY: dict[str, list[object]] = {"events": [], "nodes": [], "notices": []}


def format_run_charts(run: RunView, drawn: str) -> str:
    """Return the charts of a run; those `drawn` are for pages without scripts and for paper."""
    messages = [MessageBuilder(run).build_snapshot()]
    marks = {formatting.sanitize_text(name, 40): mark for name, mark in list_best_marks(run.history).items()}
    messages[0].content["head"]["best"] = marks  # the tiles of a live view have it
    feed = SeriesFeed(run.history)
    while (message := feed.build_message(is_last=True)) is not None:
        messages.append(message)
    return _format(messages, drawn)


def format_comparison_charts(comparison: ComparisonView, drawn: str) -> str:
    """Return the charts of a comparison; those `drawn` are for pages without scripts and for paper."""
    return _format([ComparisonMessageBuilder(comparison).build_snapshot()], drawn)


def _format(messages: Iterable[Message], drawn: str) -> str:
    data = json.dumps([_encode(message) for message in messages], allow_nan=False).replace("<", "\\u003c")
    return (
        f'<style>{_read_css()}{_CSS}</style><div id="dtk-live"></div><div class="drawn">{drawn}</div>'
        f'<script type="application/json" id="dtk-messages">{data}</script>'
        f'<script type="module">\n{_bundle()}</script>'
    )


def _encode(message: Message) -> dict[str, object]:
    content = {name: part for name, part in message.content.items() if name not in _UNUSED}
    if content["kind"] == "snapshot":
        content |= {**_EMPTY, "error": None}
    return {"content": content, "buffers": [base64.b64encode(buffer).decode() for buffer in message.buffers]}


@functools.cache
def _bundle() -> str:
    """Return the modules, without what would end the script's element."""
    return bundle_modules(STATIC_FOLDER / "report.js").replace("</", "<\\/")


@functools.cache
def _read_css() -> str:
    return (STATIC_FOLDER / "dashboard.css").read_text(encoding="utf-8")
