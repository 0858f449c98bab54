"""The user's own panels in a run's report.

Matplotlib draws them, and takes longer than all the rest of a report. So it is loaded only for a run that has some.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from dtkit.dashboard.figures.custom_panels import get_panels
from dtkit.dashboard.live.panel_renderer import CustomPanelRenderer
from dtkit.dashboard.report_page import escape
from dtkit.history.run_log import TAKEN_OVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.live.panel_renderer import PanelPicture
    from dtkit.history.history import History


def format_custom_panels(history: History) -> Iterator[str]:
    """Return the panels as pictures for any theme; nothing without one. Panels without numbers are left out.

    A notebook that took the run over has the panels of its own cells alone, so without one the report says so.
    """
    pictures = CustomPanelRenderer(history).draw_due_panels()
    figures = [_format_picture(picture) for picture in pictures if picture.note is None]
    if figures:
        yield f'<h2>Your panels</h2><div class="charts">{"".join(figures)}</div>'
    elif not get_panels() and any(event.text.startswith(TAKEN_OVER) for event in history.events):
        yield (
            "<p><small>Another notebook began this run. If it had panels of its own, they are not in this report: run "
            "their cells (@dtkit.panel) in the present notebook, and write the report again.</small></p>"
        )


def _format_picture(picture: PanelPicture) -> str:
    """Return a panel under its title, or its error in the panel's place."""
    title = escape(picture.name)
    if picture.error is not None:
        content = f'<p class="error">this panel failed: {escape(picture.error)}</p>'
    else:
        data = base64.b64encode(picture.png).decode("ascii")
        content = f'<img src="data:image/png;base64,{data}" alt="{title}">'
    return f'<figure class="panel{" wide" if picture.is_wide else ""}"><h3>{title}</h3>{content}</figure>'
