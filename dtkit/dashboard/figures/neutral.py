"""Figures for a notebook of any theme: without a background, and with grays readable on white and on black.

A picture in a notebook doesn't know the theme in which it will be seen. Text with a box of its own, or on a box, keeps
its color. Figures that a user draws or saves keep their white background, and so do the cards of saved notebooks.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter
from PIL import Image

from dtkit.dashboard.figures.style import GRID_COLOR, MUTED_COLOR, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NEUTRAL_COLOR = "#767676"
"""Gray with a contrast of 4.5 on white and 4.6 on black."""
_FAINT_COLOR, _FAINT_ALPHA = "#808080", 0.33
_INKS = (TEXT_COLOR, MUTED_COLOR, "#000000", "#9a9a9a")
_PALES = ("#f4f4f4", "#ffffff", GRID_COLOR)
_NUM_COLORS = 256


def make_neutral(figure: Figure) -> None:
    """Change the figure's colors to those for any theme."""
    _remove_backgrounds(figure)
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            _make_future_ticks_neutral(axis)
    for line in figure.findobj(Line2D):
        if to_hex(line.get_color()) in _INKS:
            line.set_color(NEUTRAL_COLOR)
            if line.get_markerfacecolor() == "white":
                line.set_markerfacecolor("none")  # white would be the brightest spot of a dark page
        elif to_hex(line.get_color()) == GRID_COLOR:
            line.set_color(_FAINT_COLOR)
            line.set_alpha(_FAINT_ALPHA)  # a grid's own alpha would hide the color's
    for text in figure.findobj(Text):
        if to_hex(text.get_color()) in _INKS and not _is_on_box(text):
            text.set_color(NEUTRAL_COLOR)


def _make_future_ticks_neutral(axis: Axis) -> None:
    """Give the colors to ticks that a later layout adds, which has room for more of them. Names are never added."""
    axis.set_tick_params(grid_color=_FAINT_COLOR, grid_alpha=_FAINT_ALPHA)
    if not isinstance(axis.get_major_formatter(), FixedFormatter):
        axis.set_tick_params(color=NEUTRAL_COLOR, labelcolor=NEUTRAL_COLOR)


def shrink_png(png: bytes) -> bytes:
    """Return a PNG with a palette, which makes a saved notebook three times as small."""
    small = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.quantize(_NUM_COLORS, method=Image.Quantize.FASTOCTREE).save(small, format="png")
    return small.getvalue()


def _remove_backgrounds(figure: Figure) -> None:
    figure.patch.set_facecolor("none")
    for ax in figure.axes:
        ax.set_facecolor("none")
        for spine in ax.spines.values():
            spine.set_edgecolor(NEUTRAL_COLOR)
        for patch in (patch for patch in ax.findobj(Patch) if patch is not ax.patch):
            if to_hex(patch.get_facecolor()) in _PALES and not _is_box_of_text(patch):
                patch.set_facecolor((*to_rgb(_FAINT_COLOR), _FAINT_ALPHA / 2))
        for collection in ax.findobj(PolyCollection):
            faces = collection.get_facecolor()
            if len(faces) == 1 and to_hex(faces[0]) in _PALES:
                collection.set_facecolor((*to_rgb(_FAINT_COLOR), _FAINT_ALPHA / 2))


def _is_box_of_text(patch: Patch) -> bool:
    return isinstance(patch, FancyBboxPatch)


def _is_on_box(text: Text) -> bool:
    """Return whether a text has a box of its own, or is in the middle of a drawn object."""
    if text.get_bbox_patch() is not None:
        return True
    is_centered = text.get_horizontalalignment() == text.get_verticalalignment() == "center"
    return is_centered and text.axes is not None and text.get_transform() == text.axes.transData
