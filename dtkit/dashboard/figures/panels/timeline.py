"""The phases of one of the last steps: a strip for each node, and the planned schedule hollow behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch

from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.panels.step_time import PHASE_STYLES, list_legend_names
from dtkit.dashboard.summary.step_strip import BOX_KINDS, NUMBERED_KINDS, make_step_strip

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from matplotlib.axes import Axes

    from dtkit.dashboard.summary.step_strip import StepStrip
    from dtkit.history.history import History
    from dtkit.history.timeline import Timeline

_KIND_STYLES: dict[str, dict[str, Any]] = {
    **PHASE_STYLES,
    "backward input": PHASE_STYLES["backward"],
    "backward weight": {"facecolor": "#8A8A00", "hatch": "||||", "edgecolor": "white"},
    # Often narrower than an edge, so they have none.
    "send": {"facecolor": "#D55E00", "hatch": "||||", "edgecolor": "white", "linewidth": 0},
    "receive": {"facecolor": "#F0E442", "hatch": "....", "edgecolor": "#6b6300", "linewidth": 0},
}
_MAX_NUMBERED_BOXES = 200  # more boxes have no numbers
_MIN_NUMBERED_WIDTH = 0.018  # of the step; a narrower box has no number


def make_panel(timeline: Timeline | None) -> Callable[[Axes, History], None]:
    """Return the panel of a timeline, which a history doesn't have."""

    def draw(ax: Axes, history: History) -> None:
        step_strip = make_step_strip(timeline, history=history)
        style.style_axes(ax)
        style.set_title(ax, "Timeline", "" if step_strip is None else step_strip.note)
        if step_strip is None:
            style.show_placeholder(ax)
            ax.set(xticks=[], yticks=[])
        else:
            _draw_strip(ax, step_strip)
            _draw_legend(ax, step_strip, list_legend_names(history))

    return draw


def _draw_strip(ax: Axes, step_strip: StepStrip) -> None:
    for place, rank in enumerate(step_strip.ranks):
        planned = [_get_begin_and_width(box) for box in step_strip.plan[step_strip.plan["rank"] == rank]]
        ax.broken_barh(
            planned, (place - 0.46, 0.92), facecolor="none", edgecolor=style.MUTED_COLOR, linestyle=":", gid="plan"
        )
        boxes = step_strip.boxes[step_strip.boxes["rank"] == rank]
        for kind, name in enumerate(BOX_KINDS):
            bars = [_get_begin_and_width(box) for box in boxes[boxes["kind"] == kind]]
            ax.broken_barh(bars, (place - 0.36, 0.72), gid=f"{name}-{rank}", **{"linewidth": 0.5, **_KIND_STYLES[name]})
    passes = step_strip.boxes[np.isin(step_strip.boxes["kind"], [BOX_KINDS.index(name) for name in NUMBERED_KINDS])]
    if len(passes) <= _MAX_NUMBERED_BOXES:
        for place, rank in enumerate(step_strip.ranks):
            _write_micro_batches(ax, place, passes[passes["rank"] == rank], step_strip.duration_s)
    _label_axes(ax, step_strip)


def _get_begin_and_width(box: np.void) -> tuple[float, float]:
    """Return (begin, width) in milliseconds."""
    return 1e3 * float(box["begin"]), 1e3 * float(box["end"] - box["begin"])


def _write_micro_batches(ax: Axes, row: int, boxes: np.ndarray, seconds: float) -> None:
    """Write the numbers of micro-batches into boxes that are wide enough."""
    for box in boxes[(boxes["micro_batch"] >= 0) & (boxes["end"] - boxes["begin"] > _MIN_NUMBERED_WIDTH * seconds)]:
        begin, width = _get_begin_and_width(box)
        ax.text(
            begin + width / 2, row, str(box["micro_batch"]), ha="center", va="center", fontsize=8,
            color=style.TEXT_COLOR, gid="micro-batch",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip


def _label_axes(ax: Axes, step_strip: StepStrip) -> None:
    ax.set_yticks(range(len(step_strip.ranks)), [f"node {rank}" for rank in step_strip.ranks])
    ax.set_ylim(len(step_strip.ranks) - 0.45, -0.55)
    ax.set_xlim(0, 1e3 * step_strip.duration_s)
    ax.set_xlabel("ms", fontsize=8, color=style.MUTED_COLOR)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)


def _draw_legend(ax: Axes, step_strip: StepStrip, explained: Collection[str]) -> None:
    """Draw the legend of what the bars above don't explain already."""
    used = [name for kind, name in enumerate(BOX_KINDS) if (step_strip.boxes["kind"] == kind).any()]
    used = [name for name in used if name not in explained]
    patches = [Patch(label=name, **{"linewidth": 0.6, **_KIND_STYLES[name]}) for name in used]
    if len(step_strip.plan):
        patches.append(Patch(label="planned", facecolor="none", edgecolor=style.MUTED_COLOR, linestyle=":"))
    if patches:
        style.draw_legend_below(ax, patches)
