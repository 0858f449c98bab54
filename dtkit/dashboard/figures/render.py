"""Empty figures, and figures as PNG.

Only ``Figure`` and the Agg canvas are used, never pyplot: figures are drawn on threads other than the user's.
"""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from dtkit.dashboard.figures.neutral import make_neutral, shrink_png
from dtkit.dashboard.live.placement import DARK_FILTER

if TYPE_CHECKING:
    from collections.abc import Sequence

FIT_WIDTH_IN = 6.0
"""Width of a figure whose texts of 8 points are 9 pixels high in a window of 600 px."""

_MIN_DPI, _PIXELS_PER_CSS_PIXEL = 160, 1.75
_CSS_PIXELS_PER_INCH = 92
_MIN_CSS_WIDTH = 688
"""Fills JupyterLab's cell in a window of 800 px. A narrower figure is enlarged, so that its text stays readable in one
of 600 px."""
_MIN_SCALE = 0.665  # the least width fits a window of 600 px; wider figures scroll there, or no text could be read

CARD_PADDING = 6
"""CSS pixels around the figure on a card."""
_CARD_RADIUS = 8
_CARD_BASIS, _MIN_CARD_WIDTH = 460, 340  # CSS pixels of a card: with others in a row, and where the page is narrower
_CARD_EDGE_COLOR = "#d4d4d4"


class ShownFigure(Figure):
    """A figure that a notebook of any theme shows as a picture, whether or not pyplot is imported.

    The picture is a white card, which a rule makes dark in a dark theme: gray text is hard to read on both. A front end
    that removes rules, or that shows no HTML, has the white card. The figure keeps its own colors, for a user who draws
    into it or saves it.
    """

    def _ipython_display_(self) -> None:  # IPython prefers pyplot's printer of figures to any other method
        from IPython.display import display

        # unpickles: a copy of this figure, made here; formatters of axes may be lambdas
        copied = cloudpickle.loads(cloudpickle.dumps(self))
        png, width = base64.b64encode(render_card_png(copied)).decode("ascii"), get_css_width(self)
        page = format_themed_card(png, width, ", ".join(filter(None, (ax.get_title(loc="left") for ax in self.axes))))
        bundle = {"text/html": page, "image/png": png, "text/plain": repr(self)}
        display(bundle, metadata={"image/png": {"width": width}}, raw=True)  # type: ignore[no-untyped-call]


def create_figure(width: float, height: float) -> Figure:
    """Return an empty white figure, in inches, that pyplot doesn't know of."""
    figure = ShownFigure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def render_png(figure: Figure) -> bytes:
    """Return the figure as a PNG that is sharp on a dense screen at the width of :func:`get_css_width`."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_get_dpi(figure), facecolor="white")
    return file.getvalue()


def render_notebook_png(figure: Figure) -> bytes:
    """Return the figure as a small PNG for a notebook of any theme. Changes the figure's colors."""
    return shrink_png(render_transparent_png(figure))


def render_card_png(figure: Figure) -> bytes:
    """Return the figure as the small PNG of its card, see :func:`draw_card`."""
    return encode_small_png(draw_card(figure))


def draw_card(figure: Figure) -> Image.Image:
    """Return the figure in its own colors on a white card, which is :func:`get_css_width` wide.

    Saved notebooks keep cards: a text that has to be readable on white and on black can only be gray.
    """
    image = _draw_pixels(figure)
    scale = image.width / (get_css_width(figure) - 2 * CARD_PADDING)
    padding = round(CARD_PADDING * scale)
    card = Image.new("RGBA", (image.width + 2 * padding, image.height + 2 * padding))
    edges = (0, 0, card.width - 1, card.height - 1)
    ImageDraw.Draw(card).rounded_rectangle(
        edges, _CARD_RADIUS * scale, fill="white", outline=_CARD_EDGE_COLOR, width=round(scale)
    )
    card.paste(image, (padding, padding))
    return card


def _draw_pixels(figure: Figure) -> Image.Image:
    """Return the figure as an image. Matplotlib would draw it twice for a file, the first time for its layout."""
    canvas, dpi = FigureCanvasAgg(figure), figure.dpi
    figure.dpi = _get_dpi(figure)
    try:
        canvas.draw()  # type: ignore[no-untyped-call]
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
    finally:
        figure.dpi = dpi


def encode_small_png(image: Image.Image) -> bytes:
    """Return an image as a PNG with a palette."""
    file = io.BytesIO()
    image.save(file, format="png", compress_level=1)  # it is compressed once more
    return shrink_png(file.getvalue())


def render_transparent_png(figure: Figure) -> bytes:
    """Return the figure as a PNG for a page of any theme. Changes the figure's colors."""
    make_neutral(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_get_dpi(figure), facecolor="none")
    return file.getvalue()


def get_css_width(figure: Figure) -> int:
    """Return the figure's width in CSS pixels."""
    return max(_MIN_CSS_WIDTH, round(figure.get_figwidth() * _CSS_PIXELS_PER_INCH))


def _get_dpi(figure: Figure) -> float:
    """Return the pixels an inch of a PNG: more for a figure that is enlarged."""
    return max(_MIN_DPI, _PIXELS_PER_CSS_PIXEL * get_css_width(figure) / figure.get_figwidth())


def format_img_tag(figure: Figure, alt: str) -> str:
    """Return the figure as an ``<img>``; `alt` describes it."""
    data = base64.b64encode(render_notebook_png(figure)).decode("ascii")
    return format_png_tag(data, get_css_width(figure), alt)


def format_card_tags(figures: Sequence[Figure], alt: str) -> str:
    """Return figures on cards, as many in a row as the page has room for; `alt` describes them together."""
    return format_cards([(render_card_png(figure), get_css_width(figure)) for figure in figures], alt)


def format_cards(cards: Sequence[tuple[bytes, int]], alt: str) -> str:
    """Return cards, each a PNG and its largest width in CSS pixels, as many in a row as the page has room for."""
    tags = []
    for k, (png, widest) in enumerate(cards):
        data = base64.b64encode(png).decode("ascii")
        style = (
            f"flex: 1 1 {_CARD_BASIS}px; min-width: {_MIN_CARD_WIDTH}px; max-width: min(100%, {widest}px); height: auto"
        )
        described = html.escape("" if k else alt)
        tags.append(f'<img src="data:image/png;base64,{data}" width="{_CARD_BASIS}" style="{style}" alt="{described}">')
    row = "display: flex; flex-wrap: wrap; gap: 8px; align-items: flex-start; overflow-x: auto"
    return f'<div style="{row}">{"".join(tags)}</div>'


def format_themed_card(data: str, width: int, alt: str) -> str:
    """Return a card, a PNG in base64, that is dark in a dark theme of JupyterLab or VS Code."""
    themes = ("[data-jp-theme-light=false]", "[data-vscode-theme-kind$=dark]")
    selectors = ", ".join(f"{theme} .dtkit-picture img" for theme in themes)
    rule = f"<style>{selectors} {{filter: {DARK_FILTER}}}</style>"
    return f'{rule}<div class="dtkit-picture">{format_png_tag(data, width, alt)}</div>'


def format_png_tag(data: str, width: int, alt: str) -> str:
    """Return a PNG in base64 as an ``<img>`` of `width` CSS pixels, or as wide as its container.

    The container scrolls where the text would become too small.
    """
    style = f"max-width: 100%; min-width: {round(_MIN_SCALE * width)}px"
    image = f'<img src="data:image/png;base64,{data}" width="{width}" style="{style}" alt="{html.escape(alt)}">'
    return f'<div style="overflow-x: auto">{image}</div>'
