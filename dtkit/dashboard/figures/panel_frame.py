"""Drawing of the user's panels: with a title and with errors in their place, or as a PNG of their own."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from matplotlib.text import Text

from dtkit._util import formatting
from dtkit._util.guard import run_guarded
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure, render_transparent_png
from dtkit.history.scalars import NothingLoggedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtkit.dashboard.figures.custom_panels import PanelFunction
    from dtkit.history.history import History

_HEIGHT_IN = 2.3
_CSS_PIXELS_PER_INCH, _MIN_WIDTH_IN, _MAX_WIDTH_IN = 100, 3.0, 15.0
_ERROR_CHARS = 26  # of a line, in the narrowest panel


def wrap_panel(name: str, function: PanelFunction) -> PanelFunction:
    """Return a panel for the figure of a run, which has a title and shows an error in its place."""

    def draw(ax: Axes, history: History) -> None:
        def show_error(error: Exception) -> None:
            ax.clear()
            ax.set_axis_off()
            text = describe_missing(error) or f"this panel failed: {format_error(error)}"
            style.show_placeholder(ax, textwrap.fill(text, _ERROR_CHARS))

        run_guarded(lambda: _draw_in_small_text(function, ax, history), show_error)
        style.set_title(ax, formatting.sanitize_text(name, 60))

    return draw


def _draw_in_small_text(function: PanelFunction, ax: Axes, history: History) -> None:
    """Let a user's function draw, with texts of the size of dtkit's panels unless it sets others."""
    style.style_axes(ax)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_fontsize(style.SMALL_FONT_SIZE)
        label.set_color(style.MUTED_COLOR)
    function(ax, history)
    usual = Text().get_fontsize()
    legend = ax.get_legend()
    for text in [*ax.texts, *([] if legend is None else [*legend.get_texts(), legend.get_title()])]:
        if text.get_fontsize() == usual:
            text.set_fontsize(style.SMALL_FONT_SIZE)


def draw_png(function: PanelFunction, history: History, width: int = 600) -> bytes:
    """Return a panel as a PNG of its own, for a page of any theme that shows it `width` CSS pixels wide."""
    figure = create_figure(min(_MAX_WIDTH_IN, max(_MIN_WIDTH_IN, width / _CSS_PIXELS_PER_INCH)), _HEIGHT_IN)
    ax = figure.subplots()
    _draw_in_small_text(function, ax, history)
    return render_transparent_png(figure)


def describe_missing(error: Exception) -> str | None:
    """Return a note instead of an error if a panel reads what this run has not logged, as another run did."""
    return f"nothing was logged as {error.name!r} in this run" if isinstance(error, NothingLoggedError) else None


def format_error(error: Exception) -> str:
    """Return an error of a panel in one line."""
    return formatting.sanitize_text(f"{type(error).__name__}: {error}", 200)
