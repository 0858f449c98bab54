"""The figure of an explained pipeline step: transfers between stages in the order of sending, and norms below.

Each arrow is a tensor sent from stage to stage: activations go down and gradients come up. The number at its tail is
the micro-batch. Below are the norms of these tensors, and of each micro-batch's part in each stage's gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.ticker import MaxNLocator

from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import FIT_WIDTH_IN, create_figure
from dtkit.dashboard.figures.style import ALERT_COLOR, COLORS, GRID_COLOR, MUTED_COLOR, TEXT_COLOR
from dtkit.dashboard.text import pipeline_text
from dtkit.dashboard.text.numbers import describe_remaining, format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.explain.pipeline import PipelineExplanation, StageRecord, StageTransfer

_LANE_HEIGHT_IN, _MIN_LANES_HEIGHT_IN = 0.42, 1.3  # of one stage, and of all stages
_LOWER_HEIGHT_IN, _FRAME_HEIGHT_IN = 1.7, 2.3
_MAX_NUMBERED_ARROWS = 48  # more arrows have no numbers
_LOG_SCALE_RATIO = 30.0  # from this ratio of norms on, the axis is logarithmic
_MAX_SHOWN_STAGES = 8  # stages, and pairs of stages, with lines or bars of their own
_KIND_COLORS = {"activation": COLORS[0], "gradient": COLORS[5]}


def draw_pipeline_step(explanation: PipelineExplanation) -> Figure:
    """Draw the step of the first replica with samples: transfers, their norms, and gradients of the stages."""
    transfers_by_replica = pipeline_text.sort_by_replica(explanation)
    shown_replica = transfers_by_replica[0][0] if transfers_by_replica else 0
    transfers = [transfer for replica, transfer in transfers_by_replica if replica == shown_replica]
    ranks = explanation.replicas[shown_replica]
    stages = sorted((stage for stage in explanation.stages if stage.rank in ranks), key=lambda stage: stage.stage)
    upper = max(_MIN_LANES_HEIGHT_IN, _LANE_HEIGHT_IN * len(stages))
    figure = create_figure(FIT_WIDTH_IN, upper + 2 * _LOWER_HEIGHT_IN + _FRAME_HEIGHT_IN)
    style.set_figure_title(figure, pipeline_text.format_headline(explanation))
    grid = figure.add_gridspec(3, 1, height_ratios=(upper, _LOWER_HEIGHT_IN, _LOWER_HEIGHT_IN))
    num_replicas = len(explanation.replicas)
    replica = f": replica {shown_replica + 1:,} of {num_replicas:,}" if num_replicas > 1 else ""
    _draw_arrows(figure.add_subplot(grid[0]), transfers, stages, f"Transfers between stages{replica}")
    _draw_transfer_norms(figure.add_subplot(grid[1]), transfers)
    _draw_micro_batch_norms(figure.add_subplot(grid[2]), stages)
    is_correct = explanation.is_intact and explanation.is_sum_of_micro_batches
    note = f"{pipeline_text.describe_integrity(explanation)} {pipeline_text.describe_gradient_sums(explanation)}"
    style.set_figure_note(figure, note, TEXT_COLOR if is_correct else ALERT_COLOR)
    return figure


def _draw_arrows(ax: Axes, transfers: Sequence[StageTransfer], stages: Sequence[StageRecord], title: str) -> None:
    """Draw a line for each stage, and an arrow for each transfer, left to right in the order of sending."""
    _style_panel(ax, title, None)
    lanes = {stage.stage: k for k, stage in enumerate(stages)}
    for lane in lanes.values():
        ax.axhline(lane, color=GRID_COLOR, linewidth=6, zorder=1, solid_capstyle="butt")
    is_numbered = len(transfers) <= _MAX_NUMBERED_ARROWS
    for x, transfer in enumerate(transfers):
        start, end = lanes[transfer.from_stage], lanes[transfer.to_stage]
        color = _KIND_COLORS[transfer.kind] if transfer.is_intact else ALERT_COLOR
        arrow = {
            "arrowstyle": "-|>",
            "color": color,
            "linewidth": 1.4,
            "shrinkA": 7 if is_numbered else 0,
            "shrinkB": 1,
        }
        ax.annotate("", (x + 0.45, end), (x, start), arrowprops=arrow, zorder=3)
        if is_numbered:
            ax.text(
                x, start, str(transfer.micro_batch), ha="center", va="center", fontsize=8, fontweight="bold",
                color=color, zorder=4,
            )  # fmt: skip
    ax.set_xlim(-0.8, max(1, len(transfers)) + 0.2)
    ax.set_ylim(len(stages) - 0.6, -0.4)
    ax.set_yticks(range(len(stages)), [f"stage {stage.stage}, node {stage.rank}" for stage in stages])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xticks([])
    ax.set_xlabel("in the order of sending; numbers are micro-batches", fontsize=8, color=MUTED_COLOR)
    for kind, color in _KIND_COLORS.items():
        ax.plot([], [], color=color, linewidth=2, label=f"{kind}s {'down' if kind == 'activation' else 'up'}")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, labelcolor=TEXT_COLOR)


def _draw_transfer_norms(ax: Axes, transfers: Sequence[StageTransfer]) -> None:
    """Draw the norms of transfers on a logarithmic scale: a line for each pair of stages and kind."""
    _style_panel(ax, "Norms of the transfers, by pair of stages")
    lines = {(t.kind, t.from_stage, t.to_stage) for t in transfers}
    pairs = sorted({tuple(sorted(stages)) for _, *stages in lines})
    shown_pairs = pairs[:_MAX_SHOWN_STAGES]
    for kind, start, end in sorted(line for line in lines if tuple(sorted(line[1:])) in shown_pairs):
        points = [t for t in transfers if (t.kind, t.from_stage, t.to_stage) == (kind, start, end) and not t.tensor]
        points.sort(key=lambda transfer: transfer.micro_batch)
        dashes = "-" if kind == "activation" else (0, (3, 1.6))
        ax.plot(
            [t.micro_batch for t in points], [t.norm or np.nan for t in points], color=_KIND_COLORS[kind],
            linestyle=dashes, marker="o", markersize=4, linewidth=1.3, gid=f"{kind} {start} → {end}",
        )  # fmt: skip
        ax.annotate(
            f"{start} → {end}", (points[-1].micro_batch, points[-1].norm or np.nan), va="center",
            xytext=(7, 5 if kind == "activation" else -5), textcoords="offset points", fontsize=8, fontweight="bold",
            color=_KIND_COLORS[kind], annotation_clip=False,
        )  # fmt: skip
    _write_remaining(ax, len(pairs), "pair")
    _format_micro_batch_axis(ax)
    if lines:
        ax.set_yscale("log")
        style.format_log_axis(ax.yaxis, format_number)
        ax.margins(x=0.08, y=0.12)


def _draw_micro_batch_norms(ax: Axes, stages: Sequence[StageRecord]) -> None:
    """Draw a bar for each micro-batch and stage, and a line at the norm of each stage's sum."""
    _style_panel(ax, "Gradient of each stage: parts, and their sum")
    shown = stages[:_MAX_SHOWN_STAGES]
    width = 0.8 / max(1, len(shown))
    for k, stage in enumerate(shown):
        positions = np.arange(len(stage.micro_batch_norms)) + (k - (len(shown) - 1) / 2) * width
        color = COLORS[k % len(COLORS)]
        ax.bar(positions, [norm or 0.0 for norm in stage.micro_batch_norms], width * 0.92, color=color)
        ax.plot([], [], color=color, linewidth=5, label=f"stage {stage.stage}: sum {format_number(stage.norm)}")
        ax.axhline(stage.norm, color=color, linewidth=1.3, linestyle=(0, (3, 1.6)))
    _write_remaining(ax, len(stages), "stage")
    _format_micro_batch_axis(ax)
    ax.set_ylabel("norm; dashed: of the sum", fontsize=8, color=MUTED_COLOR)
    norms = [norm for stage in shown for norm in (stage.norm, *stage.micro_batch_norms) if norm and np.isfinite(norm)]
    if norms and max(norms) > _LOG_SCALE_RATIO * min(norms):  # a linear axis would hide the small ones
        ax.set_yscale("log")
        style.format_log_axis(ax.yaxis, format_number)
        ax.set_ylim(min(norms) / 3, max(norms) * (max(norms) / min(norms)) ** 0.35)
    elif norms:
        ax.set_ylim(0, 1.45 * max(norms))
    ax.legend(fontsize=7.5, frameon=False, labelcolor=TEXT_COLOR, loc="upper left", ncols=2)


def _write_remaining(ax: Axes, count: int, noun: str) -> None:
    """Write how many stages or pairs are not shown."""
    for note in describe_remaining(count, noun, _MAX_SHOWN_STAGES):
        ax.set_title(note, loc="right", fontsize=8, color=MUTED_COLOR)


def _format_micro_batch_axis(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    ax.set_xlabel("micro-batch", fontsize=8, color=MUTED_COLOR)


def _style_panel(ax: Axes, title: str, grid: Literal["y"] | None = "y") -> None:
    style.style_axes(ax, grid, TEXT_COLOR)
    style.set_title(ax, title)
