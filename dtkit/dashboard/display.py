"""The display of a run as the last line of a cell: a live view, and a picture for the saved notebook.

The live view works as long as the kernel, also after the run's end (:mod:`dtkit.dashboard.live.placement`). The picture
next to it is drawn when the run ends, and now and then before, on a view's thread. Words and charts of a picture are of
one moment. So the notebook may be saved at any time. Front ends without widgets show only the picture, with a note.

All displays of one run share one model.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import sys
import threading
import time
from typing import TYPE_CHECKING

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded
from dtkit._util.notebook import in_notebook
from dtkit.dashboard.live.placement import PlacedView, place_view
from dtkit.dashboard.summary.activity import name_state
from dtkit.dashboard.summary.spare_core import has_spare_core
from dtkit.dashboard.text import run_text
from dtkit.dashboard.throttle import Throttle, start_prompt_timer, start_timer
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.live.placement import Output
    from dtkit.dashboard.live.widget import Dashboard
    from dtkit.dashboard.run_view import RunView

MAX_DRAWING_SHARE = 0.002
"""Largest share of a core for the pictures of a run that goes on. Those of its first minutes take more."""
MAX_AGE_FACTOR = 3.0
"""Until a young run's next picture, its time may grow by this factor, so that no picture is of its beginning only."""
_CHARTS_FOLLOW = "The charts are being drawn. A notebook that is saved now has none of this run's end."
_OLDER_CHARTS = "These charts are of step {:,}. Those of the run's end are being drawn."
_URGENT_EVENTS = frozenset({"diverged", "error", "lost", "repair", "stuck"})
"""Kinds of events with a picture of their own amid a run."""
MAX_ENDED_VIEWS = 16
"""Live views of ended runs that stay; older ones are closed, so that their memory is freed."""


def show(run: RunView, *, fault_injection: bool = False) -> None:
    """Show a run: live and as a picture in a notebook, and as text elsewhere.

    With `fault_injection`, all its displays have controls that slow nodes down and end them.
    """
    if not in_notebook():
        sys.stdout.write(run_text.format_run(run) + "\n")
        return
    with _lock:
        displays = _displays.get(run)
        if displays is None:
            displays = _displays[run] = _LiveDisplays(run)
            _close_old_displays()
    displays.show(fault_injection=fault_injection)


def is_shown(run: RunView) -> bool:
    """Return whether a live view shows the run."""
    with _lock:
        return run in _displays


def wait_until_replaced(run: RunView, timeout: float = timeouts.REPLACE_TIMEOUT_S) -> bool:
    """Wait until the displays of an ended run have its last picture. Return whether they have, after `timeout` seconds.

    A caller that ends the kernel, or reports the end of the run, waits first. Without displays it returns at once.
    """
    with _lock:
        displays = _displays.get(run)
    return displays is None or displays.final_event.wait(timeout)


def make_static_output(run: RunView, show_page: Callable[[str], None] | None = None) -> Output:
    """Return the output for a saved notebook: (data, metadata) of a MIME bundle with HTML, a PNG and text.

    `show_page` gets the HTML before the PNG is drawn.
    """
    from dtkit.dashboard.kept_picture import draw_kept_picture

    picture = draw_kept_picture(run, show_page)
    png = base64.b64encode(picture.png).decode("ascii")
    data = {"text/html": picture.page, "image/png": png, "text/plain": run_text.format_run(run)}
    return data, {"image/png": {"width": picture.width}}  # or as wide as a narrower cell


def _make_static_or_text_output(run: RunView, show_page: Callable[[str], None] | None = None) -> Output:
    """Return the static output, or text with the error that prevents the picture."""

    def make_text_output(error: Exception) -> Output:
        return {"text/plain": _describe_without_picture(run, error)}, {}

    return run_guarded(lambda: make_static_output(run, show_page), make_text_output)


def _describe_without_picture(run: RunView, error: Exception) -> str:
    return f"{run_text.format_run(run)}\nno picture: {type(error).__name__}: {error}"


@dataclasses.dataclass(frozen=True)
class _DrawnPage:
    """The picture of a run that goes on: its words and charts are of one step."""

    step: int
    page: str
    """The picture in HTML; a text instead of one that could not be drawn."""
    cards: str
    """Its charts; nothing without a picture."""
    drawn_at: str
    """The time of day."""


def _draw_page(run: RunView) -> _DrawnPage:
    def draw() -> tuple[int, str, str]:
        from dtkit.dashboard.kept_picture import draw_page

        return draw_page(run)

    def describe(error: Exception) -> tuple[int, str, str]:
        return step, _format_preformatted(_describe_without_picture(run, error)), ""

    step, drawn_at = run.status.step, _format_time()
    return _DrawnPage(*run_guarded(draw, describe), drawn_at)


def _make_meanwhile_output(run: RunView, drawn: _DrawnPage | None) -> Output:
    """Return the present step of a run that goes on with its last picture, or its text before there is one."""
    sentence, text = _describe_picture(run), run_text.format_run(run)
    if drawn is None:
        below = _format_preformatted(text)
    else:
        below = drawn.page
        if drawn.step != run.status.step:
            sentence += f" The picture below is of step {drawn.step:,} at {drawn.drawn_at}."
    return {"text/html": f"<div><p><em>{sentence}</em></p>{below}</div>", "text/plain": f"{sentence}\n{text}"}, {}


def _make_ending_output(run: RunView, drawn: _DrawnPage | None) -> Output:
    """Return the words of a run that has ended, until its charts are drawn, and meanwhile those of its second half."""
    if drawn is not None and drawn.cards and 2 * drawn.step >= run.status.step:
        charts = f"<p><em>{_OLDER_CHARTS.format(drawn.step)}</em></p>{drawn.cards}"
    else:
        charts = f"<p><em>{_CHARTS_FOLLOW}</em></p>"

    def format_words() -> str:
        from dtkit.dashboard.kept_picture import format_page

        return format_page(run, charts)

    text = run_text.format_run(run)
    # silent: the picture that follows has the error
    page = run_guarded(format_words, lambda _: _format_preformatted(text))
    return {"text/html": page, "text/plain": text}, {}


def _format_preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _describe_picture(run: RunView) -> str:
    status = run.status
    return (
        f"{name_state(run).capitalize()}, step {status.step:,} of {status.steps:,} at {_format_time()}, refreshed now "
        "and then until the page is loaded again. The live view needs this notebook's kernel, and a front end that "
        "loads Jupyter widgets (anywidget)."
    )


def _format_time() -> str:
    return time.strftime("%H:%M:%S")


def choose_interval_s(drawing_s: float, age_s: float) -> float:
    """Return the time until the next picture of a run, `age_s` after its first display."""
    sparing_s = min(drawing_s / MAX_DRAWING_SHARE, (MAX_AGE_FACTOR - 1) * age_s)
    return max(timeouts.KEPT_PICTURE_INTERVAL_S, sparing_s)


class _LiveDisplays:
    """The displays of one run: one model, and any number of pictures."""

    def __init__(self, run: RunView) -> None:
        from dtkit.dashboard.live.widget import Dashboard

        self.final_event = threading.Event()
        """Set while the picture is that of the run's end."""
        self._run, self._created_at = run, time.monotonic()
        self._views: list[PlacedView] = []
        # locks: while a handle is noted, or a picture made
        self._lock = threading.Lock()  # a display gets the picture at its creation, or with the others
        self._widget: Dashboard = Dashboard(run)
        # The training is over, so its last picture takes nothing from it, and people save the notebook now.
        self._final_throttle = Throttle(self._draw_final_picture, 0.0, call_later=start_prompt_timer)
        self._throttle = Throttle(
            self._draw_picture,
            timeouts.KEPT_PICTURE_INTERVAL_S,
            pressing_interval=timeouts.KEPT_PICTURE_FIRST_S,
        )
        self._text_throttle = Throttle(self._refresh_text, timeouts.KEPT_TEXT_INTERVAL_S)
        self._drawn: _DrawnPage | None = None
        self._may_draw = self._is_drawing_delayed = False
        self._num_events_seen = 0
        self._unsubscribe = run.subscribe(self._on_change)
        start_timer(timeouts.KEPT_PICTURE_FIRST_S, self._start_drawing)
        start_timer(timeouts.KEPT_PICTURE_BUSY_FIRST_S, self._start_drawing)

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, and its pictures with it."""
        return self.final_event.is_set()

    def show(self, *, fault_injection: bool) -> None:
        """Add a display in the current cell."""
        if fault_injection:
            self._widget.enable_fault_injection()
        with self._lock:
            has_ended = self._run.status.state.has_ended
            output = _make_static_or_text_output(self._run) if has_ended else _make_meanwhile_output(self._run, None)
            self._views.append(place_view(self._widget, output))
            if has_ended:
                self.final_event.set()
        self._on_change()  # the run may have ended before this display was noted

    def close(self) -> None:
        """End the live view; its pictures stay."""
        self._unsubscribe()
        self._throttle.close()
        self._text_throttle.close()
        self._final_throttle.close()
        self._widget.close()

    def _on_change(self) -> None:
        if not self._run.status.state.has_ended:
            self.final_event.clear()  # it may have been extended
            self._draw_soon()
        elif not self.final_event.is_set():
            self._final_throttle.trigger()

    def _start_drawing(self) -> None:
        """Draw pictures from now on. The first time, a run without a core to spare gets a text while it runs."""
        self._is_drawing_delayed = not self._may_draw and not has_spare_core(self._run)
        self._may_draw = True
        if not self._run.status.state.has_ended:
            self._draw_soon()

    def _draw_soon(self) -> None:
        has_urgent_event = self._find_urgent_event()
        if not self._may_draw:
            return
        status = self._run.status
        is_running = status.state is State.RUNNING
        if is_running and (self._is_drawing_delayed or self._drawn is not None):
            self._text_throttle.trigger()
        if not (is_running and self._is_drawing_delayed):
            has_changed = self._drawn is None or self._drawn.step != status.step
            is_pressing = has_urgent_event if is_running else has_changed  # a pause lets a picture cost nothing
            self._throttle.trigger(is_pressing=is_pressing)

    def _find_urgent_event(self) -> bool:
        """Return whether something that a reader of the saved notebook looks for has happened since the last call."""
        events = self._run.history.events
        first, self._num_events_seen = self._num_events_seen, len(events)
        return any(event.kind in _URGENT_EVENTS for event in events[first : self._num_events_seen])

    def _refresh_text(self) -> None:
        """Show the present step, with the last picture if there is one. Runs on a view's thread."""
        with self._lock:
            if not self._run.status.state.has_ended:
                self._update(self._list_refreshed_views(), _make_meanwhile_output(self._run, self._drawn))

    def _list_refreshed_views(self) -> list[PlacedView]:
        return [view for view in self._views if view.shows_pictures_meanwhile]

    def _draw_picture(self) -> None:
        """Refresh the picture during the run. Runs on a view's thread."""
        if self._list_refreshed_views():
            self._is_drawing_delayed = False  # also after a pause: no text replaces the picture
            started_at = time.thread_time()
            self._drawn = _draw_page(self._run)
            drawing_s = time.thread_time() - started_at
            self._throttle.interval = choose_interval_s(drawing_s, time.monotonic() - self._created_at)
            self._refresh_text()

    def _draw_final_picture(self) -> None:
        """Show the words of the end, then its picture in HTML, and then with a PNG. Runs on a thread of its own."""
        if self.final_event.is_set() or not self._run.status.state.has_ended:
            return
        self._show_meanwhile(
            _make_ending_output(self._run, self._drawn)
        )  # the notebook may be saved before the picture is there
        output = _make_static_or_text_output(self._run, self._show_page_of_end)
        with self._lock:
            self._update(self._views, output)
        self.final_event.set()

    def _show_page_of_end(self, page: str) -> None:
        self._show_meanwhile(({"text/html": page, "text/plain": run_text.format_run(self._run)}, {}))

    def _show_meanwhile(self, output: Output) -> None:
        """Replace the pictures, but not the views that only the last one replaces."""
        with self._lock:
            self._update(self._list_refreshed_views(), output)

    def _update(self, views: list[PlacedView], output: Output) -> None:
        for view in views:
            view.update(output)


def _close_old_displays() -> None:
    """Close the oldest views of ended runs beyond those that stay. The caller holds the lock."""
    ended = [run for run, displays in _displays.items() if displays.has_ended]
    for run in ended[: len(ended) - MAX_ENDED_VIEWS]:
        _displays.pop(run).close()


# locks: while a model is made or closed
_lock = threading.Lock()
_displays: dict[RunView, _LiveDisplays] = {}
"""Displays by run: a run that is shown again gets another view of the same model."""
