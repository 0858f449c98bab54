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

from dtkit._util.guard import attempt
from dtkit.dashboard import text
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from dtkit.dashboard.live import Dashboard
    from dtkit.dashboard.source import Source


def show(source: Source, *, drills: bool = False) -> None:
    """Show a run where the user sits: live in a notebook, the kept picture when it has ended, else text.

    With `drills` all its displays offer to slow nodes down and to end them.
    """
    if not in_notebook():
        sys.stdout.write(text.summary(source) + "\n")
    elif source.status.state.ended or not _shown(source, drills=drills):
        from IPython.display import display

        data, metadata = _kept_or_text(source)
        display(data, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def settle(source: Source, timeout: float = 10.0) -> bool:
    """Wait until an ended run's live displays are replaced; whether they were, within `timeout` seconds.

    For what is about to end the kernel or to say that the run is done; without displays it returns at once.
    """
    with _lock:
        found = _displays.get(source)
    return found is None or found.replaced.wait(timeout)


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, whose front end can show a widget; a terminal can't."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def kept(source: Source) -> tuple[dict[str, str], dict[str, Any]]:
    """The run as it stays in a notebook: (data, metadata) of a MIME bundle with a PNG and text."""
    from dtkit.dashboard import figures

    figure = figures.run_figure(source)
    picture = base64.b64encode(figures.png(figure)).decode("ascii")
    data = {"image/png": picture, "text/plain": text.summary(source)}
    return data, {"image/png": {"width": figures.width(figure)}}


class _Displays:
    """The live displays of one run: one model, any number of handles, replaced once when the run ends."""

    def __init__(self, source: Source) -> None:
        from dtkit.dashboard.live import Dashboard

        self.replaced = threading.Event()
        self._source = source
        self._handles: list[Any] = []
        # locks: while a handle is noted, or a picture made
        self._lock = threading.Lock()  # a handle is added before the replacement, or not at all
        self._over = False
        self._model: Dashboard = Dashboard(source)
        self._throttle = Throttle(self._replace_when_ended, 0.0)
        self._unsubscribe = source.subscribe(self._poke_when_ended)

    def show(self, *, drills: bool) -> bool:
        """One more display, in the cell that runs now; False when the run has ended and was replaced."""
        from IPython.display import display

        with self._lock:
            if self._over:
                return False
            if drills:
                self._model.allow_drills()
            self._handles.append(display(self._model, display_id=True))  # type: ignore[no-untyped-call]
        self._poke_when_ended()  # it may have ended before this display was subscribed
        return True

    def _poke_when_ended(self) -> None:
        if self._source.status.state.ended:
            self._throttle.poke()

    def _replace_when_ended(self) -> None:
        """Put the kept picture in the place of every display. Runs on a view's thread."""
        if self._over or not self._source.status.state.ended:
            return  # extended in the meantime: it is live again
        data, metadata = _kept_or_text(self._source)
        with self._lock:
            self._over = True
            for handle in self._handles:
                handle.update(data, metadata=metadata, raw=True)
        self._unsubscribe()
        self._throttle.close()
        self._model.retire()
        with _lock:
            _displays.pop(self._source, None)
        self.replaced.set()


def _kept_or_text(source: Source) -> tuple[dict[str, str], dict[str, Any]]:
    """The kept picture; where it can't be drawn, the text with the reason."""

    def say(error: Exception) -> tuple[dict[str, str], dict[str, Any]]:
        return {"text/plain": f"{text.summary(source)}\nno picture: {type(error).__name__}: {error}"}, {}

    return attempt(lambda: kept(source), say)


# locks: while a handle is noted, or a picture made
_lock = threading.Lock()
_displays: dict[Source, _Displays] = {}
"""The live displays by run, so that showing a run again makes one more view and not one more model."""


def _shown(source: Source, *, drills: bool) -> bool:
    """Show a live run; False when it ended on the way."""
    with _lock:
        displays = _displays.get(source)
        if displays is None:
            displays = _displays[source] = _Displays(source)
    return displays.show(drills=drills)
