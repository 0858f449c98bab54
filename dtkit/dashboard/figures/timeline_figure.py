"""The figure of a timeline: a strip for each rank, with boxes named as in a schedule and white idle time.

For a pipeline, hollow boxes behind the measured ones show the plan: the schedule simulated with the measured durations.
A late box has its hollow box to the left.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch

from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.figures.style import MUTED_COLOR, TEXT_COLOR
from dtkit.history.comm_time import WAIT_PHASE, get_phase_kind
from dtkit.history.timeline import ACTION_KINDS, COMPUTE_PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.history.timeline import Timeline

PHASE_STYLES = {
    "data": ("#56B4E9", "...", "data"),
    "forward": ("#0072B2", "", "forward"),
    "backward": ("#009E73", "", "backward"),
    "backward input": ("#009E73", "\\\\", "backward of the input"),
    "backward weight": ("#8A8A00", "///", "backward of the weights"),
    WAIT_PHASE: ("#F4F4F4", "\\\\\\\\", "waiting"),
    "send": ("#D55E00", "||||", "send"),
    "receive": ("#F0E442", "...", "receive"),
    "sync": ("#E69F00", "xx", "collective"),
    "update": ("#CC79A7", "--", "update"),
}
"""(color, hatch, label) of each phase. Phases differ without colors too."""

_PHASE_EDGES = {WAIT_PHASE: ("#9A9A9A", 0.6), "send": ("white", 0), "receive": ("#6B6300", 0)}
# (color, width); boxes of messages are often narrower than an edge
_DEFAULT_EDGE = ("white", 0.6)
_MAX_NAMED_ACTIONS = 64  # in a strip with more actions, boxes have no names
_MIN_NAMED_WIDTH = 0.02  # of the whole; a narrower box has no name
_WIDTH_IN = 6.7  # more than others, for the names in the boxes
_TOP_HEIGHT_IN, _ROW_HEIGHT_IN, _BOTTOM_HEIGHT_IN = 0.8, 0.45, 1.0
_NOTE_CHARS, _NOTE_LINE_PT, _LEGEND_COLUMNS = 92, 13, 4


def draw_timeline(timeline: Timeline) -> Figure:
    """Draw the last step of a timeline."""
    ranks = timeline.ranks
    figure, ax = create_strip_figure(max(1, len(ranks)))
    if not ranks:
        style.show_placeholder(ax)
        ax.set_axis_off()
        return figure
    step = timeline.steps[-1]
    spans = timeline.select_spans(step)
    start = float(spans["begin"].min())
    if _has_plan(timeline):
        _draw_planned_boxes(ax, timeline.simulate_schedule(step).spans, start, 1e3)
    draw_strips(ax, spans, start, 1e3)
    has_waits = (spans["phase"] == WAIT_PHASE).any()
    waiting = [] if has_waits else [make_idle_patch("waiting")]
    draw_legend(figure, ax, [*make_legend_patches(spans), *waiting, *_make_planned_patches(timeline)])
    format_axes(ax, len(ranks), "ms")
    draw_titles(ax, f"Step {step}{timeline.title}", _describe_bubble(timeline, step))
    return figure


def create_strip_figure(rows: int) -> tuple[Figure, Axes]:
    """Return a figure with room for this number of strips."""
    figure = create_figure(_WIDTH_IN, _TOP_HEIGHT_IN + _ROW_HEIGHT_IN * rows + _BOTTOM_HEIGHT_IN)
    return figure, figure.subplots()


def draw_strips(ax: Axes, spans: np.ndarray, start: float, scale: float) -> None:
    """Draw the boxes of all ranks, with rank 0 on top. Times count from `start`; a second is `scale` units."""
    stages = spans["stage"][(spans["rank"] == 0) & (spans["stage"] >= 0)]
    show_stage = len(np.unique(stages)) > 1
    kinds, whole = _get_kinds(spans), scale * float(np.ptp(np.append(spans["begin"], spans["end"])))
    for phase, (color, hatch, _) in PHASE_STYLES.items():
        edge, wide = _PHASE_EDGES.get(phase, _DEFAULT_EDGE)
        for rank in sorted({int(r) for r in spans["rank"]}):
            phase_spans = spans[(kinds == phase) & (spans["rank"] == rank)]
            bars = [(scale * (s["begin"] - start), scale * (s["end"] - s["begin"])) for s in phase_spans]
            ax.broken_barh(
                bars, (rank - 0.34, 0.68), facecolors=color, hatch=hatch, edgecolor=edge, linewidth=wide, gid=phase
            )
            if phase in ACTION_KINDS and _count_actions(spans, rank) <= _MAX_NAMED_ACTIONS:
                _name_boxes(ax, phase_spans, bars, min_width=_MIN_NAMED_WIDTH * whole, show_stage=show_stage)


def _get_kinds(spans: np.ndarray) -> np.ndarray:
    return np.array([get_phase_kind(str(phase)) for phase in spans["phase"]], "U16")


def _count_actions(spans: np.ndarray, rank: int) -> int:
    return int(((spans["rank"] == rank) & np.isin(spans["phase"], COMPUTE_PHASES) & (spans["micro_batch"] >= 0)).sum())


def _name_boxes(
    ax: Axes, spans: np.ndarray, bars: Sequence[tuple[float, float]], *, min_width: float, show_stage: bool
) -> None:
    """Write action and micro-batch into wide boxes, once for each action, and the stage below if asked."""
    named: set[tuple[int, int]] = set()
    for span, (left, width) in zip(spans, bars, strict=True):
        key = int(span["stage"]), int(span["micro_batch"])
        if key[1] < 0 or key in named or width < min_width:
            continue
        named.add(key)
        phase = str(span["phase"])
        patch = (
            {"facecolor": PHASE_STYLES[phase][0], "edgecolor": "none", "pad": 0.8} if PHASE_STYLES[phase][1] else None
        )
        text_style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "clip_on": True, "bbox": patch}
        ax.text(
            left + width / 2,
            span["rank"] - 0.1 * show_stage,
            f"{ACTION_KINDS[phase]}{key[1]}",
            fontsize=7.5,
            fontweight="bold",
            **text_style,
        )
        if show_stage:
            ax.text(left + width / 2, span["rank"] + 0.2, f"st {key[0]}", fontsize=4.5, gid="stage", **text_style)


def _draw_planned_boxes(ax: Axes, spans: np.ndarray, start: float, scale: float) -> None:
    """Draw the planned boxes, hollow and higher than the measured ones."""
    for rank in sorted({int(r) for r in spans["rank"]}):
        rank_spans = spans[spans["rank"] == rank]
        bars = [(scale * (s["begin"] - start), scale * (s["end"] - s["begin"])) for s in rank_spans]
        ax.broken_barh(
            bars, (rank - 0.44, 0.88), facecolors="none", edgecolor=MUTED_COLOR, linewidth=0.9, gid="planned"
        )


def make_legend_patches(spans: np.ndarray) -> list[Patch]:
    """Return legend entries for the phases that occur."""
    present = set(_get_kinds(spans))
    return [
        Patch(facecolor=color, hatch=hatch, edgecolor=_PHASE_EDGES.get(phase, _DEFAULT_EDGE)[0], label=word)
        for phase, (color, hatch, word) in PHASE_STYLES.items()
        if phase in present
    ]


def make_idle_patch(label: str) -> Patch:
    """Return a legend entry for time that is left white."""
    return Patch(facecolor="white", edgecolor="#d0d0d0", label=label)


def _make_planned_patches(timeline: Timeline) -> list[Patch]:
    return [Patch(facecolor="none", edgecolor=MUTED_COLOR, label="planned")] if _has_plan(timeline) else []


def _has_plan(timeline: Timeline) -> bool:
    return timeline.is_pipelined and timeline.schedule is not None


def draw_legend(figure: Figure, ax: Axes, patches: Sequence[Patch]) -> None:
    """Draw the legend below the axis, at a position that doesn't depend on the number of ranks."""
    figure.legend(
        handles=list(patches),
        loc="outside lower center",
        ncols=min(_LEGEND_COLUMNS, len(patches)),
        fontsize=8,
        frameon=False,
        columnspacing=1.4,
    )
    ax.set_facecolor("white")


def format_axes(ax: Axes, num_ranks: int, unit: str) -> None:
    """Format the axes with a node for each row, and time along the bottom."""
    ax.set_yticks(range(num_ranks), [f"node {rank}" for rank in range(num_ranks)])
    ax.set_ylim(num_ranks - 0.45, -0.55)
    ax.set_xlim(left=0)
    ax.set_xlabel(unit, fontsize=8, color=MUTED_COLOR)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED_COLOR)
    ax.tick_params(axis="y", length=0, labelsize=9)
    ax.tick_params(axis="x", colors=MUTED_COLOR, labelsize=8)


def draw_titles(ax: Axes, name: str, note: str) -> None:
    """Write the name, and a note below it."""
    lines = textwrap.wrap(note, _NOTE_CHARS)
    pad = 6 + _NOTE_LINE_PT * len(lines)
    ax.set_title(name, loc="left", fontsize=11.5, fontweight="bold", color=TEXT_COLOR, pad=pad, parse_math=False)
    ax.annotate(
        "\n".join(lines), (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=8.5,
        color=MUTED_COLOR, gid="note",
    )  # fmt: skip


def _describe_bubble(timeline: Timeline, step: int) -> str:
    if not timeline.is_pipelined:
        return ""
    formula, ideal = timeline.ideal_bubble_formula
    is_formula = timeline.ideal_bubble_source == "formula"
    source = f"by formula, {formula}" if is_formula else "by simulation with equal stages"
    note = f"bubble: {100 * timeline.measure_bubble(step):.1f} % of the time as measured, {100 * ideal:.1f} % {source}"
    if timeline.schedule is None:
        return note
    planned = timeline.simulate_schedule(step).measure_bubble()
    return f"{timeline.schedule.name} · {note} · planned with these durations: {100 * planned:.1f} %"
