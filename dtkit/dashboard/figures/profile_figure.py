"""The figure of a profile: the longest operators, with a bar for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.text.numbers import shorten_name
from dtkit.dashboard.text.profile_text import format_headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dtkit.history.profile import Profile

_MAX_OPERATORS = 10
_MAX_RANKS = 8


def draw_profile(profile: Profile) -> Figure:
    """Draw the time of each operator in a step, by rank."""
    rows = profile.operators[:_MAX_OPERATORS]
    ranks = min(len(profile.ranks), _MAX_RANKS)
    seconds = np.array([row.self_s[:ranks] for row in rows]).reshape(len(rows), ranks) / max(1, profile.num_steps)
    unit, size = formatting.choose_unit(float(seconds.max(initial=0.0)), formatting.SECOND_UNITS)
    figure = create_figure(10.8, 1.3 + len(rows) * (0.16 + 0.12 * ranks))
    ax = figure.subplots()
    height = 0.8 / max(1, ranks)
    for rank in range(ranks):
        places = np.arange(len(rows)) - 0.4 + height * (rank + 0.5)
        color = style.COLORS[rank % len(style.COLORS)]
        ax.barh(places, seconds[:, rank] / size, height=0.9 * height, color=color, label=f"node {rank}")
    ax.set_yticks(range(len(rows)), [shorten_name(row.name, 34) for row in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    style.style_axes(ax, "x", style.TEXT_COLOR)
    style.set_title(ax, "Time of a step in each operator", unit)
    if ranks > 1:
        style.format_bar_axis(ax, ranks, fontsize=8)
    style.set_figure_title(figure, format_headline(profile))
    return figure
