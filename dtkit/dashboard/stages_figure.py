"""A step of a pipeline taken apart, as a picture: arrows between stages in the order of sending, and norms below.

Each arrow is a tensor that crossed a border: activations go down, gradients come up, and the number at its tail is the
micro-batch. Below, how large these tensors were, and what each micro-batch gave to each stage's gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.ticker import MaxNLocator

from dtkit._util import formatting
from dtkit.dashboard import stages_text
from dtkit.dashboard.axes import ALERT, COLOURS, GRID, INK, MUTED, tidy
from dtkit.dashboard.figures import new_figure
from dtkit.dashboard.step_text import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.explain.pipeline import PipelineExplanation, StageRecord, StageTransfer

_WIDTH = 11.0
_LANE, _LEAST = 0.42, 1.3  # inches: a stage's line, and all of them at least
_LOWER, _FRAME = 2.1, 1.7
_NUMBERED = 48  # crossings from which on arrows have no numbers
_LOG_FROM = 30.0  # the ratio of norms from which their axis is logarithmic
_SHOWN = 8  # stages, or borders, with bars of their own
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10, "fontweight": "bold", "color": INK}
_KINDS = {"activation": COLOURS[0], "gradient": COLOURS[5]}


def stages_figure(explanation: PipelineExplanation) -> Figure:
    """Draw the step of one replica: what crossed, how large it was, what stages made of it."""
    found = stages_text.by_replica(explanation)
    place = found[0][0] if found else 0  # the first one that had samples
    mates = explanation.replicas[place]
    crossings = [crossing for of, crossing in found if of == place]
    stages = [s for s in explanation.stages if s.rank in mates]
    stages.sort(key=lambda s: s.stage)
    upper = max(_LEAST, _LANE * len(stages))
    figure = new_figure(_WIDTH, upper + _LOWER + _FRAME)
    figure.suptitle(
        stages_text.headline(explanation), x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=INK,
        parse_math=False,
    )  # fmt: skip
    grid = figure.add_gridspec(2, 2, height_ratios=(upper, _LOWER))
    arrows = figure.add_subplot(grid[0, :])
    _draw_arrows(arrows, crossings, stages)
    if len(explanation.replicas) > 1:
        which = f"replica {place + 1:,} of {len(explanation.replicas):,}"
        arrows.set_title(f"What crossed the borders between stages: {which}", **_TITLE)
    _draw_norms(figure.add_subplot(grid[1, 0]), crossings)
    _draw_parts(figure.add_subplot(grid[1, 1]), stages)
    fine = explanation.is_intact and explanation.is_sum_of_micro_batches
    words = f"{stages_text.verdict(explanation)} {stages_text.sums(explanation)}"
    figure.supxlabel(words, x=0.012, ha="left", fontsize=9, fontweight="bold", color=INK if fine else ALERT)
    return figure


def _draw_arrows(ax: Axes, crossings: Sequence[StageTransfer], stages: Sequence[StageRecord]) -> None:
    """Time runs to the right, by the order of sending; a line a stage."""
    _tidy(ax, "What crossed the borders between stages", None)
    lanes = {stage.stage: k for k, stage in enumerate(stages)}
    for lane in lanes.values():
        ax.axhline(lane, color=GRID, linewidth=6, zorder=1, solid_capstyle="butt")
    numbered = len(crossings) <= _NUMBERED
    for x, crossing in enumerate(crossings):
        start, end = lanes[crossing.from_stage], lanes[crossing.to_stage]
        colour = _KINDS[crossing.kind] if crossing.is_intact else ALERT
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.4, "shrinkA": 7 if numbered else 0, "shrinkB": 1}
        ax.annotate("", (x + 0.45, end), (x, start), arrowprops=style, zorder=3)
        if numbered:
            ax.text(
                x, start, str(crossing.micro_batch), ha="center", va="center", fontsize=8, fontweight="bold",
                color=colour, zorder=4,
            )  # fmt: skip
    ax.set_xlim(-0.8, max(1, len(crossings)) + 0.2)
    ax.set_ylim(len(stages) - 0.6, -0.4)
    ax.set_yticks(range(len(stages)), [f"stage {s.stage}, rank {s.rank}" for s in stages])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xticks([])
    ax.set_xlabel("in the order of sending; numbers are micro-batches", fontsize=8, color=MUTED)
    for kind, colour in _KINDS.items():
        ax.plot([], [], color=colour, linewidth=2, label=f"{kind}s {'down' if kind == 'activation' else 'up'}")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, labelcolor=INK)


def _draw_norms(ax: Axes, crossings: Sequence[StageTransfer]) -> None:
    """How large what crossed was: a line a border and kind, on a logarithmic scale."""
    _tidy(ax, "How large these were: norm, by border")
    borders = sorted({(c.kind, c.from_stage, c.to_stage) for c in crossings})[: 2 * _SHOWN]
    for kind, start, end in borders:
        found = [c for c in crossings if (c.kind, c.from_stage, c.to_stage) == (kind, start, end) and not c.tensor]
        found.sort(key=lambda c: c.micro_batch)
        style = "-" if kind == "activation" else (0, (3, 1.6))
        ax.plot(
            [c.micro_batch for c in found], [c.norm or np.nan for c in found], color=_KINDS[kind], linestyle=style,
            marker="o", markersize=4, linewidth=1.3, gid=f"{kind} {start} → {end}",
        )  # fmt: skip
        ax.annotate(
            f"{start} → {end}", (found[-1].micro_batch, found[-1].norm or np.nan), xytext=(7, 0), va="center",
            textcoords="offset points", fontsize=8, fontweight="bold", color=_KINDS[kind], annotation_clip=False,
        )  # fmt: skip
    _micro_batches(ax)
    if borders:
        ax.set_yscale("log")
        ax.margins(x=0.08, y=0.12)


def _draw_parts(ax: Axes, stages: Sequence[StageRecord]) -> None:
    """A group of bars a micro-batch, a bar a stage, and a line at the norm of each stage's sum."""
    _tidy(ax, "Gradient of each stage: parts, and their sum")
    shown = stages[:_SHOWN]
    wide = 0.8 / max(1, len(shown))
    for k, stage in enumerate(shown):
        at = np.arange(len(stage.micro_batch_norms)) + (k - (len(shown) - 1) / 2) * wide
        colour = COLOURS[k % len(COLOURS)]
        ax.bar(at, [part or 0.0 for part in stage.micro_batch_norms], wide * 0.92, color=colour)
        ax.plot([], [], color=colour, linewidth=5, label=f"stage {stage.stage}: sum {number(stage.norm)}")
        ax.axhline(stage.norm, color=colour, linewidth=1.3, linestyle=(0, (3, 1.6)))
    rest = len(stages) - len(shown)
    if rest > 0:
        ax.set_title(f"and {formatting.plural(rest, 'more stage')}", loc="right", fontsize=8, color=MUTED)
    _micro_batches(ax)
    ax.set_ylabel("norm; dashed: of the sum", fontsize=8, color=MUTED)
    norms = [norm for s in shown for norm in (s.norm, *s.micro_batch_norms) if norm and np.isfinite(norm)]
    if norms and max(norms) > _LOG_FROM * min(norms):  # a linear axis would hide the small ones
        ax.set_yscale("log")
        ax.set_ylim(min(norms) / 3, max(norms) * (max(norms) / min(norms)) ** 0.35)
    elif norms:
        ax.set_ylim(0, 1.45 * max(norms))
    ax.legend(fontsize=7.5, frameon=False, labelcolor=INK, loc="upper left", ncols=2)


def _micro_batches(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    ax.set_xlabel("micro-batch", fontsize=8, color=MUTED)


def _tidy(ax: Axes, title: str, grid: Literal["y"] | None = "y") -> None:
    tidy(ax, grid, INK)
    ax.set_title(title, **_TITLE)
