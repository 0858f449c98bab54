"""What each node did when, in the last step: a strip a node, and the planned schedule hollow behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch

from dtkit.dashboard import axes
from dtkit.dashboard.panels.step_time import STYLES
from dtkit.dashboard.strip import KINDS, NUMBERED, strip

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from dtkit.dashboard.strip import Strip
    from dtkit.history.history import History
    from dtkit.history.timeline import Timeline

_LOOKS: dict[str, dict[str, Any]] = {
    **STYLES,
    "backward input": STYLES["backward"],
    "backward weight": {"facecolor": "#8A8A00", "hatch": "||||", "edgecolor": "white"},
    # Often narrower than an edge is wide, so they have none.
    "send": {"facecolor": "#D55E00", "hatch": "||||", "edgecolor": "white", "linewidth": 0},
    "receive": {"facecolor": "#F0E442", "hatch": "....", "edgecolor": "#6b6300", "linewidth": 0},
}
_MOST = 200  # boxes at most that carry their micro-batch's number
_WIDE = 0.018  # of the step: a box from here on has room for a number
_BELOW = 0.3  # inches, of the legend below the axis' name


def panel(timeline: Timeline | None) -> Callable[[Axes, History], None]:
    """The panel of a timeline, which a history does not hold."""

    def draw(ax: Axes, _history: History) -> None:
        found = strip(timeline)
        axes.tidy(ax)
        axes.title(ax, "Timeline", "" if found is None else found.note)
        if found is None:
            axes.nothing(ax)
            ax.set(xticks=[], yticks=[])
        else:
            _draw(ax, found)

    return draw


def _draw(ax: Axes, found: Strip) -> None:
    for place, rank in enumerate(found.ranks):
        planned = [_bar(box) for box in found.plan[found.plan["rank"] == rank]]
        ax.broken_barh(planned, (place - 0.46, 0.92), facecolor="none", edgecolor=axes.MUTED, linestyle=":", gid="plan")
        own = found.boxes[found.boxes["rank"] == rank]
        for kind, name in enumerate(KINDS):
            bars = [_bar(box) for box in own[own["kind"] == kind]]
            ax.broken_barh(bars, (place - 0.36, 0.72), gid=f"{name}-{rank}", **{"linewidth": 0.5, **_LOOKS[name]})
    passes = found.boxes[np.isin(found.boxes["kind"], [KINDS.index(name) for name in NUMBERED])]
    if len(passes) <= _MOST:
        for place, rank in enumerate(found.ranks):
            _number(ax, place, passes[passes["rank"] == rank], found.seconds)
    _label(ax, found)


def _bar(box: np.void) -> tuple[float, float]:
    """(begin, width) in milliseconds."""
    return 1e3 * float(box["begin"]), 1e3 * float(box["end"] - box["begin"])


def _number(ax: Axes, place: int, boxes: np.ndarray, seconds: float) -> None:
    """The micro-batches' numbers, where there is room."""
    for box in boxes[(boxes["micro_batch"] >= 0) & (boxes["end"] - boxes["begin"] > _WIDE * seconds)]:
        begin, width = _bar(box)
        ax.text(
            begin + width / 2, place, str(box["micro_batch"]), ha="center", va="center", fontsize=6.5, color=axes.INK,
            gid="micro-batch", bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip


def _label(ax: Axes, found: Strip) -> None:
    ax.set_yticks(range(len(found.ranks)), [f"node {rank}" for rank in found.ranks])
    ax.set_ylim(len(found.ranks) - 0.45, -0.55)
    ax.set_xlim(0, 1e3 * found.seconds)
    ax.set_xlabel("ms", fontsize=8, color=axes.MUTED)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    used = [name for kind, name in enumerate(KINDS) if (found.boxes["kind"] == kind).any()]
    patches = [Patch(label=name, **{"linewidth": 0.6, **_LOOKS[name]}) for name in used]
    if len(found.plan):
        patches.append(Patch(label="planned", facecolor="none", edgecolor=axes.MUTED, linestyle=":"))
    axes.legend_below(ax, patches)
