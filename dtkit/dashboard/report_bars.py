"""Bars of a step's time for a report, in the colors and hatches of the live view. They are HTML and need no script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.report_page import escape
from dtkit.dashboard.summary.timing import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.dashboard.summary.timing import PhaseBar

_STRIPE = "color-mix(in srgb, var(--page) 70%, transparent)"
_UP, _DOWN, _FLAT = (f"repeating-linear-gradient({angle}deg, " for angle in (45, 135, 0))
_LOOKS = {
    "data": ("--s4", f"radial-gradient(circle at 2px 2px, {_STRIPE} 1.3px, transparent 1.6px) 0 0 / 6px 6px"),
    "forward": ("--s0", "none"),
    "backward": ("--s2", f"{_DOWN}{_STRIPE} 0 1.5px, transparent 1.5px 6px)"),
    "waiting": ("--card", f"{_UP}var(--muted) 0 1px, transparent 1px 6px)"),
    "communication": (
        "--s1",
        f"{_UP}{_STRIPE} 0 1.5px, transparent 0 7px), {_DOWN}{_STRIPE} 0 1.5px, transparent 0 7px)",
    ),
    "update": ("--s3", f"{_FLAT}{_STRIPE} 0 1.5px, transparent 1.5px 5px)"),
    "other": ("--page", "none"),
}
"""Color and hatching of each phase. The colors are variables of a report's page and its charts."""

_RULES = "\n".join(
    f".phase.{phase} {{ background: {hatching}; background-color: var({color}); }}"
    for phase, (color, hatching) in _LOOKS.items()
)
_CSS = f"""
.bars {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 8px 10px; align-items: center;
  font-size: 12.5px; font-variant-numeric: tabular-nums; margin: 0 0 8px; }}
.bars > .slow {{ color: var(--bad); font-weight: 700; }}
.bars > div {{ display: flex; align-items: center; padding-right: 64px; }}
.bars > div > span {{ flex: none; width: 56px; margin: 0 -64px 0 8px; color: var(--muted); white-space: nowrap; }}
.phase {{ box-sizing: border-box; height: 24px; overflow: hidden; text-align: center; line-height: 24px;
  white-space: nowrap; border-right: 1px solid var(--page); print-color-adjust: exact; }}
.bars .phase {{ container-type: inline-size; }}
.phase b {{ display: none; padding: 1px 5px; border-radius: 3px; font-weight: 400;
  background: color-mix(in srgb, var(--page) 88%, transparent); }} .phase i {{ display: none; font-style: normal; }}
@container (min-width: 42px) {{ .phase b {{ display: inline; }} }}
@container (min-width: 112px) {{ .phase i {{ display: inline; }} }} /* as in the live view */
.phases {{ display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 0 0 12px; font-size: 12.5px; color: var(--muted); }}
.phases .phase {{ display: inline-block; width: 20px; height: 12px; margin-right: 6px; }}
.phase:is(.waiting, .other) {{ border: 1px solid var(--muted); }}
{_RULES}
"""


def format_bars(bars: Sequence[PhaseBar], shown: Sequence[int]) -> str:
    """Return a bar for each node, as long as its step, with the phases `shown` and their legend."""
    longest = max(float(bar.seconds.sum()) for bar in bars)
    rows = "".join(_format_bar(bar, longest, shown) for bar in bars)
    legend = "".join(f'<span><span class="phase {PHASES[k]}"></span>{PHASES[k]}</span>' for k in shown)
    return f'<style>{_CSS}</style><div class="bars">{rows}</div><div class="phases">{legend}</div>'


def _format_bar(bar: PhaseBar, longest: float, shown: Sequence[int]) -> str:
    total = float(bar.seconds.sum())
    parts = "".join(_format_phase(PHASES[k], float(bar.seconds[k]), total, longest) for k in shown)
    name = (
        f'<span class="slow">▲ {escape(bar.label)}</span>' if bar.is_straggler else f"<span>{escape(bar.label)}</span>"
    )
    return f"{name}<div>{parts}<span>{formatting.format_duration(total)}</span></div>"


def _format_phase(phase: str, seconds: float, total: float, longest: float) -> str:
    """Return a segment. Its share is shown where there is room for it, and its time where there is more."""
    duration, share = formatting.format_duration(seconds), formatting.format_percent(seconds / total)
    width = f"flex: 0 1 {100 * seconds / longest:.2f}%"
    return (
        f'<div class="phase {phase}" style="{width}" title="{phase}: {duration}, {share}">'
        f"<b><i>{duration} · </i>{share}</b></div>"
    )
