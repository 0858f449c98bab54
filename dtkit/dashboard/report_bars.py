"""Bars of a step's time for a report, in the colors and hatches of the live view. They are HTML and need no script."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.summary.timing import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.dashboard.summary.timing import PhaseBar

_MIN_SHARE_TEXT = 0.045  # of a step; a shorter segment has no room for its share

_STRIPE = "color-mix(in srgb, var(--page) 70%, transparent)"
_COLORS = {
    "data": "--s4",
    "forward": "--s0",
    "backward": "--s2",
    "waiting": "--card",
    "communication": "--s1",
    "update": "--s3",
    "other": "--page",
}
_UP, _DOWN, _FLAT = (f"repeating-linear-gradient({angle}deg, " for angle in (45, 135, 0))
_HATCHES = {
    "data": f"radial-gradient(circle at 2px 2px, {_STRIPE} 1.3px, transparent 1.6px) 0 0 / 6px 6px",
    "backward": f"{_DOWN}{_STRIPE} 0 1.5px, transparent 1.5px 6px)",
    "waiting": f"{_UP}var(--muted) 0 1px, transparent 1px 6px)",
    "communication": f"{_UP}{_STRIPE} 0 1.5px, transparent 0 7px), {_DOWN}{_STRIPE} 0 1.5px, transparent 0 7px)",
    "update": f"{_FLAT}{_STRIPE} 0 1.5px, transparent 1.5px 5px)",
}

_CSS = """
.bars { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 10px; align-items: center;
  font-size: 12.5px; font-variant-numeric: tabular-nums; margin: 0 0 6px; }
.bars > div { display: flex; align-items: center; padding-right: 64px; }
.bars > div > span { flex: none; width: 56px; margin: 0 -64px 0 8px; color: var(--muted); white-space: nowrap; }
.phase { box-sizing: border-box; height: 22px; overflow: hidden; text-align: center; line-height: 22px;
  white-space: nowrap; border-right: 1px solid var(--page); print-color-adjust: exact; }
.phase b { padding: 1px 5px; border-radius: 3px; font-weight: 400;
  background: color-mix(in srgb, var(--page) 88%, transparent); }
.phases { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 0 0 12px; font-size: 12.5px; color: var(--muted); }
.phases .phase { display: inline-block; width: 20px; height: 12px; margin-right: 6px; }
.phase:is(.waiting, .other) { border: 1px solid var(--muted); }
"""
_COLOR_RULES = (
    f".phase.{phase} {{ background: {_HATCHES.get(phase, 'none')}; background-color: var({color}); }}"
    for phase, color in _COLORS.items()
)
CSS = "\n".join([_CSS, *_COLOR_RULES])
"""Rules of the bars. The variables are those of a report's page and its charts."""


def format_bars(bars: Sequence[PhaseBar], shown: Sequence[int]) -> str:
    """Return a bar for each node, as long as its step, with the phases `shown` and their legend."""
    longest = max(float(bar.seconds.sum()) for bar in bars)
    rows = "".join(_format_bar(bar, longest, shown) for bar in bars)
    legend = "".join(f'<span><i class="phase {PHASES[k]}"></i>{PHASES[k]}</span>' for k in shown)
    return f'<div class="bars" aria-hidden="true">{rows}</div><div class="phases" aria-hidden="true">{legend}</div>'


def _format_bar(bar: PhaseBar, longest: float, shown: Sequence[int]) -> str:
    total = float(bar.seconds.sum())
    parts = "".join(_format_phase(PHASES[k], float(bar.seconds[k]), total, longest) for k in shown)
    label = html.escape(f"▲ {bar.label}" if bar.is_straggler else bar.label)
    return f"<span>{label}</span><div>{parts}<span>{formatting.format_duration(total)}</span></div>"


def _format_phase(phase: str, seconds: float, total: float, longest: float) -> str:
    share = formatting.format_percent(seconds / total)
    text = f"<b>{share}</b>" if seconds / longest >= _MIN_SHARE_TEXT else ""
    title = f"{phase}: {formatting.format_duration(seconds)}, {share}"
    width = f"flex: 0 1 {100 * seconds / longest:.2f}%"
    return f'<div class="phase {phase}" style="{width}" title="{title}">{text}</div>'
