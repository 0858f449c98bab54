"""The time of a step by phase: a bar for each node, and which nodes keep the others waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.summary.timing import PHASES, compute_step_timing, select_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.dashboard.summary.timing import PhaseBar
    from dtkit.history.history import History

PHASE_STYLES: dict[str, dict[str, Any]] = {
    "data": {"facecolor": "#56B4E9", "hatch": "....", "edgecolor": "white"},
    "forward": {"facecolor": "#0072B2", "edgecolor": "white"},
    "backward": {"facecolor": "#009E73", "hatch": "////", "edgecolor": "white"},
    "waiting": {"facecolor": "#f4f4f4", "hatch": "\\\\\\\\", "edgecolor": "#9a9a9a"},
    "communication": {"facecolor": "#E69F00", "hatch": "xxxx", "edgecolor": "white"},
    "update": {"facecolor": "#CC79A7", "hatch": "----", "edgecolor": "white"},
    "other": {"facecolor": "white", "edgecolor": "#9a9a9a"},
}
"""Color and hatching of each phase, as in the live view."""

_MIN_SHARE_WIDTH, _MIN_TIME_WIDTH = 0.085, 0.24  # of the axis; shorter segments have no share, or no time
_MIN_LEGEND_LENGTH = 0.004  # of the longest bar; phases that are always shorter have no legend entry


def draw(ax: Axes, history: History) -> None:
    """Draw the mean of the last steps."""
    timing = compute_step_timing(history, history.num_ranks)
    style.style_axes(ax)
    style.set_title(ax, "Where a step's time goes")
    bars = select_bars(timing) if timing.is_measured else []
    if not bars:
        style.show_placeholder(ax, "phases were not measured" if timing.num_steps else "no step yet")
        ax.set(xticks=[], yticks=[])
        return
    longest = max(float(bar.seconds.sum()) for bar in bars) * 1e3
    for row, bar in enumerate(bars):
        _draw_bar(ax, row, bar, longest)
    _label_bars(ax, bars, longest)
    ax.set_xlabel(
        f"ms, mean of {'' if timing.is_whole else 'the '}{timing.steps_text}", fontsize=8, color=style.MUTED_COLOR
    )
    visible = [PHASES[k] for k in _find_visible_phases(bars, longest)]
    style.draw_legend_below(ax, [Patch(label=phase, linewidth=0.6, **PHASE_STYLES[phase]) for phase in visible])
    if timing.straggler is not None:
        ax.set_title(f"▲ {timing.straggler.text}", loc="right", fontsize=8, fontweight="bold", color=style.ALERT_COLOR)


def list_legend_names(history: History) -> list[str]:
    """Return the phases in the panel's legend."""
    timing = compute_step_timing(history, history.num_ranks)
    bars = select_bars(timing) if timing.is_measured else []
    if not bars:
        return []
    return [PHASES[k] for k in _find_visible_phases(bars, max(float(bar.seconds.sum()) for bar in bars) * 1e3)]


def _find_visible_phases(phase_bars: list[PhaseBar], longest: float) -> list[int]:
    """Return the phases that are long enough to be seen in some bar."""
    longest_by_phase = np.max([bar.seconds for bar in phase_bars], axis=0) * 1e3
    return [k for k in range(len(PHASES)) if longest_by_phase[k] >= _MIN_LEGEND_LENGTH * longest]


def _draw_bar(ax: Axes, row: int, bar: PhaseBar, longest: float) -> None:
    """Draw a node's step: a segment for each phase with its share, and the sum at the end."""
    left, total = 0.0, float(bar.seconds.sum()) * 1e3
    for phase, seconds in zip(PHASES, bar.seconds * 1e3, strict=True):
        ax.barh(row, seconds, 0.66, left, linewidth=0.6, gid=f"{phase}-{bar.rank}", **PHASE_STYLES[phase])
        if seconds >= _MIN_SHARE_WIDTH * longest:
            duration = f"{formatting.format_duration(seconds / 1e3)} · " if seconds >= _MIN_TIME_WIDTH * longest else ""
            ax.text(
                left + seconds / 2, row, duration + formatting.format_percent(seconds / total), ha="center",
                va="center", fontsize=8, color=style.TEXT_COLOR, gid="share",
                bbox={"boxstyle": "round,pad=0.18", "facecolor": "white", "edgecolor": "none", "alpha": 0.88},
            )  # fmt: skip
        left += seconds
    ax.text(
        left + 0.01 * longest,
        row,
        formatting.format_duration(total / 1e3),
        va="center",
        fontsize=8,
        color=style.MUTED_COLOR,
    )


def _label_bars(ax: Axes, phase_bars: list[PhaseBar], longest: float) -> None:
    """Write the names of the bars, and milliseconds below them."""
    ax.set_yticks(range(len(phase_bars)), [f"▲ {bar.label}" if bar.is_straggler else bar.label for bar in phase_bars])
    for tick, bar in zip(ax.get_yticklabels(), phase_bars, strict=True):
        tick.set_color(style.ALERT_COLOR if bar.is_straggler else style.TEXT_COLOR)
        tick.set_fontweight("bold" if bar.is_straggler else "normal")
    ax.set_ylim(len(phase_bars) - 0.45, -0.55)
    ax.set_xlim(0, 1.12 * longest)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
