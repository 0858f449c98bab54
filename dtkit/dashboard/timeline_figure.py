"""The kept picture of a timeline: a strip per rank, micro-batches numbered, what no rank computes left white."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dtkit.dashboard.axes import INK, MUTED
from dtkit.timeline import COMPUTING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.timeline import Timeline

# (colour, hatch, word): told apart without colours too. What is not here is waiting, and stays white.
STYLES = {
    "data": ("#56B4E9", "...", "data"),
    "forward": ("#0072B2", "", "forward"),
    "backward": ("#009E73", "", "backward"),
    "backward input": ("#009E73", "", "backward, of the input"),
    "backward weight": ("#8A8A00", "///", "backward, of the weights"),
    "sync": ("#E69F00", "xx", "collective"),
    "update": ("#CC79A7", "--", "update"),
}
_NUMBERED = 200  # boxes at most that carry their micro-batch's number


def draw(timeline: Timeline) -> Figure:
    """The last step of a timeline."""
    ranks = timeline.ranks
    figure = Figure(figsize=(10.8, 1.5 + 0.5 * max(1, len(ranks))), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    if not ranks:
        ax.text(0.5, 0.5, "no step yet", transform=ax.transAxes, ha="center", color=MUTED)
        ax.set_axis_off()
        return figure
    step = timeline.steps[-1]
    start = float(timeline.of(step)["begin"].min())
    for place, rank in enumerate(ranks):
        _strip(ax, timeline, step, rank, place, start)
    _tidy(ax, timeline, step)
    return figure


def _strip(ax: Axes, timeline: Timeline, step: int, rank: int, place: int, start: float) -> None:
    spans = timeline.of(step, rank)
    numbered = timeline.piped and len(timeline.of(step)) <= _NUMBERED
    for phase, (colour, hatch, _) in STYLES.items():
        own = spans[spans["phase"] == phase]
        bars = [(1e3 * (s["begin"] - start), 1e3 * (s["end"] - s["begin"])) for s in own]
        ax.broken_barh(
            bars, (place - 0.4, 0.8), facecolors=colour, hatch=hatch, edgecolor="white", linewidth=0.6, gid=phase
        )
        for (left, width), span in zip(bars, own, strict=True):
            if numbered and phase in COMPUTING and span["micro_batch"] >= 0:
                ax.text(
                    left + width / 2, place, str(span["micro_batch"]), ha="center", va="center", fontsize=7,
                    color="white", clip_on=True,
                )  # fmt: skip


def _tidy(ax: Axes, timeline: Timeline, step: int) -> None:
    used = [phase for phase in STYLES if (timeline.of(step)["phase"] == phase).any()]
    patches = [Patch(facecolor=STYLES[p][0], hatch=STYLES[p][1], edgecolor="white", label=STYLES[p][2]) for p in used]
    patches.append(Patch(facecolor="white", edgecolor=MUTED, label="waiting"))
    ax.legend(
        handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=len(patches), fontsize=8, frameon=False
    )
    ranks = timeline.ranks
    ax.set_yticks(range(len(ranks)), [f"node {rank}" for rank in ranks])
    ax.set_ylim(len(ranks) - 0.4, -0.6)
    ax.set_xlim(left=0)
    ax.set_xlabel("ms", color=MUTED)
    ax.set_facecolor("white")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.set_title(f"Step {step}{timeline.title}", loc="left", fontsize=11.5, fontweight="bold", color=INK)
    if timeline.piped:
        text = f"bubble: {timeline.bubble(step):.1%} of the time as measured, {timeline.ideal_bubble():.1%} by formula"
        ax.set_title(text, loc="right", fontsize=8.5, color=MUTED)
