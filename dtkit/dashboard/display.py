"""The display of a run as the last line of a cell, and the picture that replaces it when the run ends.

A saved notebook can't show a widget without its kernel. So the output is shown through a display handle. When the run
ends, the handle replaces it by a PNG and text, which every viewer of notebooks shows. This happens on a view's thread,
also long after the cell has ended. Only then is the widget's model closed.

All displays of one run share one model, and are replaced together.
"""

from __future__ import annotations

import base64
import sys
import threading
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded
from dtkit._util.notebook import in_notebook
from dtkit.dashboard.text import run_text
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from dtkit.dashboard.live.widget import Dashboard
    from dtkit.dashboard.run_view import RunView

    Output = tuple[dict[str, str], dict[str, Any]]


def show(run: RunView, *, fault_injection: bool = False) -> None:
    """Show a run: live in a notebook, as a picture when it has ended, and as text elsewhere.

    With `fault_injection`, all its displays have controls that slow nodes down and end them.
    """
    if not in_notebook():
        sys.stdout.write(run_text.format_run(run) + "\n")
    elif run.status.state.has_ended or not _try_show_live(run, fault_injection=fault_injection):
        from IPython.display import display

        data, metadata = _make_static_or_text_output(run)
        display(data, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def wait_until_replaced(run: RunView, timeout: float = timeouts.REPLACE_TIMEOUT_S) -> bool:
    """Wait until the live displays of an ended run are replaced. Return whether they are, after `timeout` seconds.

    A caller that ends the kernel, or reports the end of the run, waits first. Without displays it returns at once.
    """
    with _lock:
        displays = _displays.get(run)
    return displays is None or displays.replaced_event.wait(timeout)


def make_static_output(run: RunView) -> Output:
    """Return what a saved notebook shows: (data, metadata) of a MIME bundle with a PNG and text."""
    from dtkit.dashboard.figures.render import get_css_width, render_png
    from dtkit.dashboard.figures.run_figure import draw_run

    figure = draw_run(run)
    png = base64.b64encode(render_png(figure)).decode("ascii")
    return {"image/png": png, "text/plain": run_text.format_run(run)}, {"image/png": {"width": get_css_width(figure)}}


def _make_static_or_text_output(run: RunView) -> Output:
    """Return the static output, or text with the error that prevents the picture."""

    def make_text_output(error: Exception) -> Output:
        return {"text/plain": f"{run_text.format_run(run)}\nno picture: {type(error).__name__}: {error}"}, {}

    return run_guarded(lambda: make_static_output(run), make_text_output)


class _LiveDisplays:
    """The live displays of one run: one model and any number of handles, replaced once when the run ends."""

    def __init__(self, run: RunView) -> None:
        from dtkit.dashboard.live.widget import Dashboard

        self.replaced_event = threading.Event()
        self._run = run
        self._handles: list[Any] = []
        # locks: while a handle is noted, or a picture made
        self._lock = threading.Lock()  # a handle is added before the replacement, or not at all
        self._is_replaced = False
        self._widget: Dashboard = Dashboard(run)
        self._throttle = Throttle(self._replace_when_ended, 0.0)
        self._unsubscribe = run.subscribe(self._trigger_when_ended)

    def try_show(self, *, fault_injection: bool) -> bool:
        """Add a display in the current cell. Return False if the run has ended and was replaced."""
        from IPython.display import display

        with self._lock:
            if self._is_replaced:
                return False
            if fault_injection:
                self._widget.enable_fault_injection()
            self._handles.append(display(self._widget, display_id=True))  # type: ignore[no-untyped-call]
        self._trigger_when_ended()  # the run may have ended before this display was subscribed
        return True

    def _trigger_when_ended(self) -> None:
        if self._run.status.state.has_ended:
            self._throttle.trigger()

    def _replace_when_ended(self) -> None:
        """Replace every display by the static output. Runs on a view's thread."""
        if self._is_replaced or not self._run.status.state.has_ended:
            return  # the run was extended in the meantime, so it is live again
        data, metadata = _make_static_or_text_output(self._run)
        with self._lock:
            self._is_replaced = True
            for handle in self._handles:
                handle.update(data, metadata=metadata, raw=True)
        self._unsubscribe()
        self._throttle.close()
        self._widget.close_or_freeze()
        with _lock:
            _displays.pop(self._run, None)
        self.replaced_event.set()


# locks: while a handle is noted, or a picture made
_lock = threading.Lock()
_displays: dict[RunView, _LiveDisplays] = {}
"""Live displays by run: a run that is shown again gets another view of the same model."""


def _try_show_live(run: RunView, *, fault_injection: bool) -> bool:
    """Show a live run. Return False if it ended meanwhile."""
    with _lock:
        displays = _displays.get(run)
        if displays is None:
            displays = _displays[run] = _LiveDisplays(run)
    return displays.try_show(fault_injection=fault_injection)
