"""Samples of the lines of runs, next to their names in the table of a saved comparison."""

from __future__ import annotations

import base64

from dtkit.dashboard.summary.run_lines import NUM_COLORS, choose_dash

_WIDTH, _HEIGHT = 28, 8
_DASHES = ("none", "7.5 2.4", "1.8 2.1", "9 2.4 1.8 2.4")
"""As the picture of a comparison has them, whose dashes are in units of the line's width."""


def format_report_sample(run: int) -> str:
    """Return the line of a run for a page with the CSS of :mod:`dtkit.dashboard.svg_chart`, in the page's colors."""
    path = _draw(f'class="series s{run % NUM_COLORS} dash{choose_dash(run)}"')
    return f'<svg class="chart sample" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true">{path}</svg>'


def format_notebook_sample(run: int) -> str:
    """Return the line of a run as an image, in the colors of the picture.

    A notebook that isn't trusted shows no ``<svg>``.
    """
    from dtkit.dashboard.figures.style import COLORS  # imports matplotlib

    look = f'stroke="{COLORS[run % NUM_COLORS]}" stroke-width="1.8" stroke-dasharray="{_DASHES[choose_dash(run)]}"'
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_draw(look)}</svg>'
    data = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" {size} style="display: inline; vertical-align: middle" alt="">'


def _draw(look: str) -> str:
    return f'<path {look} d="M0,{_HEIGHT // 2}H{_WIDTH}"/>'
