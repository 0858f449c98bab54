"""Where a live view appears in a notebook, so that the saved file always shows a picture.

A saved widget view without its kernel reads "Error displaying widget: model not found". So no cell holds a widget view.
Its output has two parts. The first is an empty place. The widget's module puts the view there as soon as the front end
has the model (``static/mount.js``). The second is a picture with text, refreshed through its display handle. The module
hides the picture while the view exists. Without the kernel or without anywidget, the picture remains.

The charts of the picture are white cards. The place has a rule that makes cards dark in a dark theme. A mounted view
replaces the rule, since one with ``:has`` makes a browser compute the view's styles again and again. A front end that
removes styles, as for a notebook that nobody trusts, shows white cards.

VS Code and Colab load a widget's module only for a widget view. There the view is the output, and the final picture
replaces it.
"""

from __future__ import annotations

import dataclasses
import html
import os
import sys
import time
import uuid
from typing import Any, Protocol

DARK_FILTER = "invert(0.93) hue-rotate(180deg) brightness(1.1)"
"""Makes a white card dark. It keeps the hue of a color of which no part is cut off at 0 or at 1, as those of the first
nodes' colors are not."""
DARK_WORDS = {"accent": "#4da3e0", "good": "#2fc69a", "bad": "#ff8548"}
"""Colors of a picture's words in a dark theme, by the end of their class; as in ``static/dashboard.css``."""
_DARK_RULE = (
    "[data-jp-theme-light=false] .jp-OutputArea-child:has(.dtkit-live) + .jp-OutputArea-child img"
    f"{{filter: {DARK_FILTER}}}"
) + "".join(
    f"[data-jp-theme-light=false] .dtkit-{name}{{color: {color} !important}}" for name, color in DARK_WORDS.items()
)

Output = tuple[dict[str, str], dict[str, Any]]
"""Data and metadata of a MIME bundle."""


class Placeable(Protocol):
    """A widget whose module looks for its place."""

    place: str
    """Name of the place."""


def make_place_name() -> str:
    """Return a new name for a place."""
    return uuid.uuid4().hex


@dataclasses.dataclass(frozen=True)
class PlacedView:
    """A live view in a cell, with the handle of its picture."""

    handle: Any
    shows_pictures_meanwhile: bool
    """Whether the picture is next to the view, so that it can be refreshed during the run."""

    def update(self, output: Output) -> None:
        """Replace the picture."""
        data, metadata = output
        self.handle.update(data, metadata=metadata, raw=True)


def place_view(widget: Placeable, output: Output) -> PlacedView:
    """Show a widget in the current cell, with `output` for front ends that can't."""
    from IPython.display import display

    if needs_widget_views():
        return PlacedView(display(widget, display_id=True), shows_pictures_meanwhile=False)  # type: ignore[no-untyped-call]
    name, rule = html.escape(widget.place), f"<style>{_DARK_RULE}</style>"
    shown_at = round(time.time())
    place = f'<div class="dtkit-live" data-dtkit-live="{name}" data-dtkit-shown="{shown_at}">{rule}</div>'
    display({"text/html": place, "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]
    data, metadata = output
    handle = display(data, metadata=metadata, raw=True, display_id=True)  # type: ignore[no-untyped-call]
    return PlacedView(handle, shows_pictures_meanwhile=True)


def needs_widget_views() -> bool:
    """Return whether the front end loads widgets only where a cell shows them."""
    return "VSCODE_PID" in os.environ or "google.colab" in sys.modules
