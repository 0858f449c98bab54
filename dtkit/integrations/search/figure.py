"""The figure of a search: values by trial, and the intermediate values that trials reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dtkit.integrations.search.trial_record import TrialRecord


def draw_search(trials: Sequence[TrialRecord], best: TrialRecord | None, title: str, *, maximize: bool) -> Figure:
    """Draw the value of each trial with the best so far, and next to it the reported values, if there are any."""
    has_reports = any(trial.reports for trial in trials)
    figure = create_figure(11.0 if has_reports else 5.5, 3.4)
    axes = figure.subplots(1, 2 if has_reports else 1, squeeze=False)[0]
    _draw_values(axes[0], trials, maximize=maximize)
    if has_reports:
        _draw_reports(axes[1], trials, best)
    style.set_figure_title(figure, title)
    return figure


def _draw_values(ax: Axes, trials: Sequence[TrialRecord], *, maximize: bool) -> None:
    style.style_axes(ax)
    style.set_title(ax, "Trials", "value; the line is the best so far")
    ax.set_xlabel("trial", fontsize=8)
    complete = [(t.number, t.value) for t in trials if t.state == "complete" and t.value is not None]
    if not complete:
        style.show_placeholder(ax, "no trial is complete")
        return
    choose = max if maximize else min
    numbers, values = zip(*complete, strict=True)
    best = [choose(values[: k + 1]) for k in range(len(values))]
    ax.plot(numbers, values, "o", color=style.COLORS[0], markersize=4)
    ax.step(numbers, best, where="post", color=style.COLORS[5], linewidth=1.2)
    pruned = [(t.number, t.last_report) for t in trials if t.state == "pruned" and t.last_report is not None]
    if pruned:
        ax.plot(*zip(*pruned, strict=True), "x", color=style.MUTED_COLOR, markersize=4)


def _draw_reports(ax: Axes, trials: Sequence[TrialRecord], best: TrialRecord | None) -> None:
    style.style_axes(ax)
    style.set_title(ax, "On the way", "reported values; gray: ended early")
    ax.set_xlabel("step", fontsize=8)
    for trial in trials:
        is_best = best is not None and trial.number == best.number
        color = style.COLORS[5] if is_best else style.MUTED_COLOR if trial.state == "pruned" else style.COLORS[0]
        ax.plot(
            list(trial.reports),
            list(trial.reports.values()),
            color=color,
            linewidth=1.8 if is_best else 0.8,
            alpha=1.0 if is_best else 0.6,
        )
