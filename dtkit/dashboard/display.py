"""What `run` shows as the last line of a cell, and the picture that takes its place when the run ends.

A widget's view is worth nothing in a saved notebook: without its kernel it is an error message. So the
output is shown through a display handle, and when the run ends the handle replaces it by a PNG and text
alone, which every viewer of notebooks can show. Drawing happens on a view's thread, also long after the
cell has ended. Only then is the widget's model closed.

All displays of one run share one model, and are replaced together.
"""

from __future__ import annotations

import base64
import sys
import threading
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded
from dtkit.dashboard.text import run_text
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from dtkit.dashboard.live.widget import Dashboard
    from dtkit.dashboard.run_view import RunView


def show(run: RunView, *, fault_injection: bool = False) -> None:
    """Show a run where the user sits: live in a notebook, the kept picture when it has ended, else text.

    With `fault_injection` all its displays offer to slow nodes down and to end them.
    """
    if not in_notebook():
        sys.stdout.write(run_text.format_run(run) + "\n")
    elif run.status.state.has_ended or not _try_show_live(run, fault_injection=fault_injection):
        from IPython.display import display

        data, metadata = _make_static_or_text_output(run)
        display(data, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def wait_until_replaced(run: RunView, timeout: float = 10.0) -> bool:
    """Wait until an ended run's live displays are replaced; whether they were, within `timeout` seconds.

    For what is about to end the kernel or to say that the run is done; without displays it returns at once.
    """
    with _lock:
        found = _displays.get(run)
    return found is None or found.replaced_event.wait(timeout)


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, whose front end can show a widget; a terminal can't."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def make_static_output(run: RunView) -> tuple[dict[str, str], dict[str, Any]]:
    """The run as it stays in a notebook: (data, metadata) of a MIME bundle with a PNG and text."""
    from dtkit.dashboard.figures import run_figure

    figure = run_figure.draw_run(run)
    picture = base64.b64encode(run_figure.render_png(figure)).decode("ascii")
    data = {"image/png": picture, "text/plain": run_text.format_run(run)}
    return data, {"image/png": {"width": run_figure.get_css_width(figure)}}


class _LiveDisplays:
    """The live displays of one run: one model, any number of handles, replaced once when the run ends."""

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
        """One more display, in the cell that runs now; False when the run has ended and was replaced."""
        from IPython.display import display

        with self._lock:
            if self._is_replaced:
                return False
            if fault_injection:
                self._widget.enable_fault_injection()
            self._handles.append(display(self._widget, display_id=True))  # type: ignore[no-untyped-call]
        self._trigger_when_ended()  # it may have ended before this display was subscribed
        return True

    def _trigger_when_ended(self) -> None:
        if self._run.status.state.has_ended:
            self._throttle.trigger()

    def _replace_when_ended(self) -> None:
        """Put the kept picture in the place of every display. Runs on a view's thread."""
        if self._is_replaced or not self._run.status.state.has_ended:
            return  # extended in the meantime: it is live again
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


def _make_static_or_text_output(run: RunView) -> tuple[dict[str, str], dict[str, Any]]:
    """The kept picture; where it can't be drawn, the text with the reason."""

    def say(error: Exception) -> tuple[dict[str, str], dict[str, Any]]:
        return {"text/plain": f"{run_text.format_run(run)}\nno picture: {type(error).__name__}: {error}"}, {}

    return run_guarded(lambda: make_static_output(run), say)


# locks: while a handle is noted, or a picture made
_lock = threading.Lock()
_displays: dict[RunView, _LiveDisplays] = {}
"""The live displays by run, so that showing a run again makes one more view and not one more model."""


def _try_show_live(run: RunView, *, fault_injection: bool) -> bool:
    """Show a live run; False when it ended on the way."""
    with _lock:
        displays = _displays.get(run)
        if displays is None:
            displays = _displays[run] = _LiveDisplays(run)
    return displays.try_show(fault_injection=fault_injection)
