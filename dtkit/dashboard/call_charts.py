"""Charts of the numbers that a call logs, in a notebook's cell: live, and at the end as a picture.

The last views stay alive as long as the kernel; older ones are closed, so that their memory is freed.
"""

from __future__ import annotations

import base64
import collections
from typing import TYPE_CHECKING

from dtkit.dashboard.text.call_text import format_headline

if TYPE_CHECKING:
    from dtkit.dashboard.live.call_widget import CallWidget
    from dtkit.dashboard.live.placement import Output, PlacedView
    from dtkit.dashboard.run_view import CallView

_MAX_VIEWS = 16
_views: collections.deque[CallWidget] = collections.deque()


class CallCharts:
    """The charts of one call. Not thread-safe: one caller at a time."""

    def __init__(self, call: CallView) -> None:
        self._call = call
        self._widget: CallWidget | None = None
        self._placed: PlacedView | None = None
        self._is_final = False

    def update(self) -> None:
        """Show the charts, or send what is new. After the call's end, draw the picture."""
        if self._widget is None:
            self._widget, self._placed = _place(self._call)
        self._widget.update()
        if self._call.state != "running" and not self._is_final and self._placed is not None:
            self._is_final = True
            self._placed.update(_draw(self._call))


def _place(call: CallView) -> tuple[CallWidget, PlacedView]:
    """Show live charts in the cell that runs."""
    from dtkit.dashboard.live.call_widget import CallWidget
    from dtkit.dashboard.live.placement import place_view

    widget = CallWidget(call)
    _views.append(widget)
    if len(_views) > _MAX_VIEWS:
        _views.popleft().close()
    return widget, place_view(widget, ({"text/plain": format_headline(call)}, {}))


def _draw(call: CallView) -> Output:
    """Return the charts as a picture."""
    from dtkit.dashboard.figures.call_figure import draw_call
    from dtkit.dashboard.figures.render import get_css_width, render_card_png

    figure = draw_call(call)
    png = base64.b64encode(render_card_png(figure)).decode("ascii")
    return {"image/png": png, "text/plain": format_headline(call)}, {"image/png": {"width": get_css_width(figure)}}
