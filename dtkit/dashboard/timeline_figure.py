"""The kept picture of a timeline: a strip per rank, boxes named as in a schedule, what no phase is of left white.

In a pipeline, what was planned stands behind: the schedule played through with the measured durations, as hollow boxes
a little higher than the measured ones. A box that came late has its empty outline to the left of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dtkit.dashboard.axes import INK, MUTED, columns
from dtkit.history.message_times import WAIT_PHASE, get_phase_kind
from dtkit.history.timeline import ACTION_KINDS, COMPUTE_PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from dtkit.history.timeline import Timeline

# (colour, hatch, word): told apart without colours too.
STYLES = {
    "data": ("#56B4E9", "...", "data"),
    "forward": ("#0072B2", "", "forward"),
    "backward": ("#009E73", "", "backward"),
    "backward input": ("#009E73", "\\\\", "its half of the input"),
    "backward weight": ("#8A8A00", "///", "its half of the weights"),
    WAIT_PHASE: ("#F4F4F4", "\\\\\\\\", "waiting"),
    "send": ("#D55E00", "||||", "send"),
    "receive": ("#F0E442", "...", "receive"),
    "sync": ("#E69F00", "xx", "collective"),
    "update": ("#CC79A7", "--", "update"),
}
_EDGES = {WAIT_PHASE: ("#9A9A9A", 0.6), "send": ("white", 0), "receive": ("#6B6300", 0)}
# (colour, width), also of the hatching; messages are often narrower than an edge is wide.
_EDGE = ("white", 0.6)
_NAMED = 64  # actions at most in a strip whose boxes carry names
_WIDE = 0.012  # of the whole: a box from here on has room for its name
_TOP, _ROW, _FOOT = 0.62, 0.5, 0.85  # inches: titles, a rank's strip, axis and legend


def draw(timeline: Timeline) -> Figure:
    """The last step of a timeline."""
    ranks = timeline.ranks
    figure, ax = sheet(max(1, len(ranks)))
    if not ranks:
        ax.text(0.5, 0.5, "no step yet", transform=ax.transAxes, ha="center", color=MUTED)
        ax.set_axis_off()
        return figure
    step = timeline.steps[-1]
    spans = timeline.select(step)
    start = float(spans["begin"].min())
    if timeline.is_pipelined and timeline.schedule is not None:
        outline(ax, timeline.simulate_schedule(step).spans, start, 1e3)
    strips(ax, spans, start, 1e3)
    legend(
        figure,
        ax,
        [*used(spans), *([] if (spans["phase"] == WAIT_PHASE).any() else [idle("waiting")]), *_hollow(timeline)],
    )
    axes(ax, len(ranks), "ms")
    titles(ax, f"Step {step}{timeline.title}", _note(timeline, step))
    return figure


def sheet(rows: int) -> tuple[Figure, Axes]:
    """A white figure with room for so many strips."""
    figure = Figure(figsize=(10.8, _TOP + _ROW * rows + _FOOT), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def strips(ax: Axes, spans: np.ndarray, start: float, scale: float) -> None:
    """The boxes of all ranks, in `scale` times a second from `start` on, rank 0 on top."""
    several = len({int(s) for s in spans["stage"][(spans["rank"] == 0) & (spans["stage"] >= 0)]}) > 1
    kinds, whole = _kinds(spans), scale * float(np.ptp(np.append(spans["begin"], spans["end"])))
    for phase, (colour, hatch, _) in STYLES.items():
        edge, wide = _EDGES.get(phase, _EDGE)
        for rank in sorted({int(r) for r in spans["rank"]}):
            own = spans[(kinds == phase) & (spans["rank"] == rank)]
            bars = [(scale * (s["begin"] - start), scale * (s["end"] - s["begin"])) for s in own]
            ax.broken_barh(
                bars, (rank - 0.34, 0.68), facecolors=colour, hatch=hatch, edgecolor=edge, linewidth=wide, gid=phase
            )
            if phase in ACTION_KINDS and _actions(spans, rank) <= _NAMED:
                _name(ax, own, bars, room=_WIDE * whole, several=several)


def _kinds(spans: np.ndarray) -> np.ndarray:
    return np.array([get_phase_kind(str(phase)) for phase in spans["phase"]], "U16")


def _actions(spans: np.ndarray, rank: int) -> int:
    return int(((spans["rank"] == rank) & np.isin(spans["phase"], COMPUTE_PHASES) & (spans["micro_batch"] >= 0)).sum())


def _name(ax: Axes, spans: np.ndarray, bars: Sequence[tuple[float, float]], *, room: float, several: bool) -> None:
    """Each wide box's action and micro-batch, once; where ranks have several stages, the stage below it in small."""
    told: set[tuple[int, int]] = set()
    for span, (left, width) in zip(spans, bars, strict=True):
        key = int(span["stage"]), int(span["micro_batch"])
        if key[1] < 0 or key in told or width < room:
            continue
        told.add(key)
        phase = str(span["phase"])
        patch = {"facecolor": STYLES[phase][0], "edgecolor": "none", "pad": 0.8} if STYLES[phase][1] else None
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "clip_on": True, "bbox": patch}
        ax.text(left + width / 2, span["rank"] - 0.1 * several, f"{ACTION_KINDS[phase]}{key[1]}", fontsize=7, **style)
        if several:
            ax.text(left + width / 2, span["rank"] + 0.2, f"st {key[0]}", fontsize=4.5, gid="stage", **style)


def outline(ax: Axes, spans: np.ndarray, start: float, scale: float) -> None:
    """The planned boxes, hollow and a little higher than the measured ones."""
    for rank in sorted({int(r) for r in spans["rank"]}):
        own = spans[spans["rank"] == rank]
        bars = [(scale * (s["begin"] - start), scale * (s["end"] - s["begin"])) for s in own]
        ax.broken_barh(bars, (rank - 0.44, 0.88), facecolors="none", edgecolor=MUTED, linewidth=0.9, gid="planned")


def used(spans: np.ndarray) -> list[Patch]:
    """What the legend has to explain."""
    there = set(_kinds(spans))
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor=_EDGES.get(phase, _EDGE)[0], label=word)
        for phase, (colour, hatch, word) in STYLES.items()
        if phase in there
    ]


def idle(word: str) -> Patch:
    """What is left white."""
    return Patch(facecolor="white", edgecolor="#d0d0d0", label=word)


def _hollow(timeline: Timeline) -> list[Patch]:
    if not timeline.is_pipelined or timeline.schedule is None:
        return []
    return [Patch(facecolor="none", edgecolor=MUTED, label="planned")]


def legend(figure: Figure, ax: Axes, patches: Sequence[Patch]) -> None:
    """Below the axis, in a place that does not depend on how many ranks there are."""
    figure.legend(
        handles=list(patches),
        loc="outside lower center",
        ncols=columns(len(patches)),
        fontsize=8,
        frameon=False,
        columnspacing=1.4,
    )
    ax.set_facecolor("white")


def axes(ax: Axes, ranks: int, unit: str) -> None:
    """A node per row, time along the bottom."""
    ax.set_yticks(range(ranks), [f"node {rank}" for rank in range(ranks)])
    ax.set_ylim(ranks - 0.45, -0.55)
    ax.set_xlim(left=0)
    ax.set_xlabel(unit, fontsize=8, color=MUTED)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.tick_params(axis="y", length=0, labelsize=9)
    ax.tick_params(axis="x", colors=MUTED, labelsize=8)


def titles(ax: Axes, name: str, note: str) -> None:
    """What is shown, and below it what it says."""
    ax.set_title(name, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=20 if note else 6, parse_math=False)
    ax.annotate(
        note, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=MUTED,
        gid="note",
    )  # fmt: skip


def _note(timeline: Timeline, step: int) -> str:
    if not timeline.is_pipelined:
        return ""
    formula, value = timeline.ideal_bubble_formula
    how = f"by formula, {formula}" if timeline.ideal_bubble_source == "formula" else "by simulation with equal stages"
    note = f"bubble: {timeline.measure_bubble(step):.1%} of the time as measured, {value:.1%} {how}"
    if timeline.schedule is None:
        return note
    return f"{timeline.schedule.name} · {note} · planned with these durations: {timeline.simulate_schedule(step).measure_bubble():.1%}"
