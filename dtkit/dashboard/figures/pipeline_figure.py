"""A step of a pipeline taken apart, as a picture: arrows between stages in the order of sending, and norms below.

Each arrow is a tensor that crossed a border: activations go down, gradients come up, and the number at its tail is the
micro-batch. Below, how large these tensors were, and what each micro-batch gave to each stage's gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.ticker import MaxNLocator

from dtkit._util import formatting
from dtkit.dashboard.figures.run_figure import create_figure
from dtkit.dashboard.figures.style import ALERT_COLOR, COLORS, GRID_COLOR, MUTED_COLOR, TEXT_COLOR, style_axes
from dtkit.dashboard.text import pipeline_text
from dtkit.dashboard.text.data_parallel_text import format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.explain.pipeline import PipelineExplanation, StageRecord, StageTransfer

_WIDTH_IN = 11.0
_LANE_HEIGHT_IN, _MIN_LANES_HEIGHT_IN = 0.42, 1.3  # inches: a stage's line, and all of them at least
_LOWER_HEIGHT_IN, _FRAME_HEIGHT_IN = 2.1, 1.7
_MAX_NUMBERED_ARROWS = 48  # crossings from which on arrows have no numbers
_LOG_SCALE_RATIO = 30.0  # the ratio of norms from which their axis is logarithmic
_MAX_SHOWN_STAGES = 8  # stages, or borders, with bars of their own
_TITLE_STYLE: dict[str, Any] = {"loc": "left", "fontsize": 10, "fontweight": "bold", "color": TEXT_COLOR}
_KIND_COLORS = {"activation": COLORS[0], "gradient": COLORS[5]}


def draw_pipeline_step(explanation: PipelineExplanation) -> Figure:
    """Draw the step of one replica: what crossed, how large it was, what stages made of it."""
    found = pipeline_text.sort_by_replica(explanation)
    place = found[0][0] if found else 0  # the first one that had samples
    mates = explanation.replicas[place]
    crossings = [crossing for of, crossing in found if of == place]
    stages = [s for s in explanation.stages if s.rank in mates]
    stages.sort(key=lambda s: s.stage)
    upper = max(_MIN_LANES_HEIGHT_IN, _LANE_HEIGHT_IN * len(stages))
    figure = create_figure(_WIDTH_IN, upper + _LOWER_HEIGHT_IN + _FRAME_HEIGHT_IN)
    figure.suptitle(
        pipeline_text.format_headline(explanation), x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=TEXT_COLOR,
        parse_math=False,
    )  # fmt: skip
    grid = figure.add_gridspec(2, 2, height_ratios=(upper, _LOWER_HEIGHT_IN))
    arrows = figure.add_subplot(grid[0, :])
    _draw_arrows(arrows, crossings, stages)
    if len(explanation.replicas) > 1:
        which = f"replica {place + 1:,} of {len(explanation.replicas):,}"
        arrows.set_title(f"What crossed the borders between stages: {which}", **_TITLE_STYLE)
    _draw_transfer_norms(figure.add_subplot(grid[1, 0]), crossings)
    _draw_micro_batch_norms(figure.add_subplot(grid[1, 1]), stages)
    fine = explanation.is_intact and explanation.is_sum_of_micro_batches
    words = f"{pipeline_text.describe_integrity(explanation)} {pipeline_text.describe_gradient_sums(explanation)}"
    figure.supxlabel(
        words, x=0.012, ha="left", fontsize=9, fontweight="bold", color=TEXT_COLOR if fine else ALERT_COLOR
    )
    return figure


def _draw_arrows(ax: Axes, transfers: Sequence[StageTransfer], stages: Sequence[StageRecord]) -> None:
    """Time runs to the right, by the order of sending; a line a stage."""
    _style_panel(ax, "What crossed the borders between stages", None)
    lanes = {stage.stage: k for k, stage in enumerate(stages)}
    for lane in lanes.values():
        ax.axhline(lane, color=GRID_COLOR, linewidth=6, zorder=1, solid_capstyle="butt")
    numbered = len(transfers) <= _MAX_NUMBERED_ARROWS
    for x, crossing in enumerate(transfers):
        start, end = lanes[crossing.from_stage], lanes[crossing.to_stage]
        colour = _KIND_COLORS[crossing.kind] if crossing.is_intact else ALERT_COLOR
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.4, "shrinkA": 7 if numbered else 0, "shrinkB": 1}
        ax.annotate("", (x + 0.45, end), (x, start), arrowprops=style, zorder=3)
        if numbered:
            ax.text(
                x, start, str(crossing.micro_batch), ha="center", va="center", fontsize=8, fontweight="bold",
                color=colour, zorder=4,
            )  # fmt: skip
    ax.set_xlim(-0.8, max(1, len(transfers)) + 0.2)
    ax.set_ylim(len(stages) - 0.6, -0.4)
    ax.set_yticks(range(len(stages)), [f"stage {s.stage}, rank {s.rank}" for s in stages])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xticks([])
    ax.set_xlabel("in the order of sending; numbers are micro-batches", fontsize=8, color=MUTED_COLOR)
    for kind, colour in _KIND_COLORS.items():
        ax.plot([], [], color=colour, linewidth=2, label=f"{kind}s {'down' if kind == 'activation' else 'up'}")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, labelcolor=TEXT_COLOR)


def _draw_transfer_norms(ax: Axes, transfers: Sequence[StageTransfer]) -> None:
    """How large what crossed was: a line a border and kind, on a logarithmic scale."""
    _style_panel(ax, "How large these were: norm, by border")
    borders = sorted({(c.kind, c.from_stage, c.to_stage) for c in transfers})[: 2 * _MAX_SHOWN_STAGES]
    for kind, start, end in borders:
        found = [c for c in transfers if (c.kind, c.from_stage, c.to_stage) == (kind, start, end) and not c.tensor]
        found.sort(key=lambda c: c.micro_batch)
        style = "-" if kind == "activation" else (0, (3, 1.6))
        ax.plot(
            [c.micro_batch for c in found], [c.norm or np.nan for c in found], color=_KIND_COLORS[kind], linestyle=style,
            marker="o", markersize=4, linewidth=1.3, gid=f"{kind} {start} → {end}",
        )  # fmt: skip
        ax.annotate(
            f"{start} → {end}", (found[-1].micro_batch, found[-1].norm or np.nan), xytext=(7, 0), va="center",
            textcoords="offset points", fontsize=8, fontweight="bold", color=_KIND_COLORS[kind], annotation_clip=False,
        )  # fmt: skip
    _format_micro_batch_axis(ax)
    if borders:
        ax.set_yscale("log")
        ax.margins(x=0.08, y=0.12)


def _draw_micro_batch_norms(ax: Axes, stages: Sequence[StageRecord]) -> None:
    """A group of bars a micro-batch, a bar a stage, and a line at the norm of each stage's sum."""
    _style_panel(ax, "Gradient of each stage: parts, and their sum")
    shown = stages[:_MAX_SHOWN_STAGES]
    wide = 0.8 / max(1, len(shown))
    for k, stage in enumerate(shown):
        at = np.arange(len(stage.micro_batch_norms)) + (k - (len(shown) - 1) / 2) * wide
        colour = COLORS[k % len(COLORS)]
        ax.bar(at, [part or 0.0 for part in stage.micro_batch_norms], wide * 0.92, color=colour)
        ax.plot([], [], color=colour, linewidth=5, label=f"stage {stage.stage}: sum {format_number(stage.norm)}")
        ax.axhline(stage.norm, color=colour, linewidth=1.3, linestyle=(0, (3, 1.6)))
    rest = len(stages) - len(shown)
    if rest > 0:
        ax.set_title(f"and {formatting.format_count(rest, 'more stage')}", loc="right", fontsize=8, color=MUTED_COLOR)
    _format_micro_batch_axis(ax)
    ax.set_ylabel("norm; dashed: of the sum", fontsize=8, color=MUTED_COLOR)
    norms = [norm for s in shown for norm in (s.norm, *s.micro_batch_norms) if norm and np.isfinite(norm)]
    if norms and max(norms) > _LOG_SCALE_RATIO * min(norms):  # a linear axis would hide the small ones
        ax.set_yscale("log")
        ax.set_ylim(min(norms) / 3, max(norms) * (max(norms) / min(norms)) ** 0.35)
    elif norms:
        ax.set_ylim(0, 1.45 * max(norms))
    ax.legend(fontsize=7.5, frameon=False, labelcolor=TEXT_COLOR, loc="upper left", ncols=2)


def _format_micro_batch_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    ax.set_xlabel("micro-batch", fontsize=8, color=MUTED_COLOR)


def _style_panel(ax: Axes, title: str, grid: Literal["y"] | None = "y") -> None:
    style_axes(ax, grid, TEXT_COLOR)
    ax.set_title(title, **_TITLE_STYLE)
