"""Where a step's time goes: a bar a node, in phases, and who keeps the others waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch

from dtkit._util import formatting
from dtkit.dashboard import axes
from dtkit.dashboard.timing import PHASES, bars, timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.dashboard.timing import Bar
    from dtkit.history.history import History

STYLES: dict[str, dict[str, Any]] = {
    "data": {"facecolor": "#56B4E9", "hatch": "....", "edgecolor": "white"},
    "forward": {"facecolor": "#0072B2", "edgecolor": "white"},
    "backward": {"facecolor": "#009E73", "hatch": "////", "edgecolor": "white"},
    "waiting": {"facecolor": "#f4f4f4", "hatch": "\\\\\\\\", "edgecolor": "#9a9a9a"},
    "communication": {"facecolor": "#E69F00", "hatch": "xxxx", "edgecolor": "white"},
    "update": {"facecolor": "#CC79A7", "hatch": "----", "edgecolor": "white"},
    "other": {"facecolor": "white", "edgecolor": "#9a9a9a"},
}
"""Each phase by colour and by hatching; those of the live view are the same."""

_WIDE, _WIDER = 0.045, 0.11  # of the axis: a segment from here on has room for its share, and for its time as well
_LEGEND_FROM = 0.004  # of the longest bar: a phase that is shorter everywhere is left out


def draw(ax: Axes, history: History) -> None:
    """Draw the panel: the mean of the last steps."""
    parts = timing(history, max(history.ranks, default=-1) + 1)
    axes.tidy(ax)
    axes.title(ax, "Where a step's time goes")
    shown = bars(parts) if parts.measured else []
    if not shown:
        axes.nothing(ax, "the steps were not taken apart" if parts.steps else "no step yet")
        ax.set(xticks=[], yticks=[])
        return
    longest = max(float(bar.seconds.sum()) for bar in shown) * 1e3
    for row, bar in enumerate(shown):
        _draw_bar(ax, row, bar, longest)
    _label(ax, shown, longest)
    ax.set_xlabel(f"ms, mean of the last {formatting.plural(parts.steps, 'step')}", fontsize=8, color=axes.MUTED)
    seen = [PHASES[k] for k in _seen(shown, longest)]
    axes.legend_below(ax, [Patch(label=phase, linewidth=0.6, **STYLES[phase]) for phase in seen])
    if parts.straggler is not None:
        ax.set_title(f"▲ {parts.straggler.text}", loc="right", fontsize=9, fontweight="bold", color=axes.ALERT)


def _seen(shown: list[Bar], longest: float) -> list[int]:
    """The phases that are long enough to be seen in some bar."""
    most = np.max([bar.seconds for bar in shown], axis=0) * 1e3
    return [k for k in range(len(PHASES)) if most[k] >= _LEGEND_FROM * longest]


def _draw_bar(ax: Axes, row: int, bar: Bar, longest: float) -> None:
    """One node's step: a segment a phase, with its share where there is room, and the whole at the end."""
    left, whole = 0.0, float(bar.seconds.sum()) * 1e3
    for phase, seconds in zip(PHASES, bar.seconds * 1e3, strict=True):
        ax.barh(row, seconds, 0.66, left, linewidth=0.6, gid=f"{phase}-{bar.rank}", **STYLES[phase])
        if seconds >= _WIDE * longest:
            time = f"{formatting.duration(seconds / 1e3)} · " if seconds >= _WIDER * longest else ""
            ax.text(
                left + seconds / 2, row, time + formatting.share(seconds / whole), ha="center", va="center",
                fontsize=7.5, color=axes.INK, gid="share",
                bbox={"boxstyle": "round,pad=0.18", "facecolor": "white", "edgecolor": "none", "alpha": 0.88},
            )  # fmt: skip
        left += seconds
    ax.text(left + 0.01 * longest, row, formatting.duration(whole / 1e3), va="center", fontsize=8, color=axes.MUTED)


def _label(ax: Axes, shown: list[Bar], longest: float) -> None:
    """Names of the bars, milliseconds below them."""
    ax.set_yticks(range(len(shown)), [f"▲ {bar.label}" if bar.slow else bar.label for bar in shown])
    for tick, bar in zip(ax.get_yticklabels(), shown, strict=True):
        tick.set_color(axes.ALERT if bar.slow else axes.INK)
        tick.set_fontweight("bold" if bar.slow else "normal")
    ax.set_ylim(len(shown) - 0.45, -0.55)
    ax.set_xlim(0, 1.09 * longest)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
