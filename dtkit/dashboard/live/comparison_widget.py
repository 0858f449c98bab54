"""The live view of a comparison: losses against steps and time, validation metrics, and a table that is the legend.

It gets a message twice a second at most. The view stays after the runs' end; the figure is in the saved notebook.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import anywidget
import traitlets

from dtkit._util import timeouts
from dtkit.dashboard.live.bundle import STATIC_FOLDER, bundle_modules
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.placement import make_place_name, needs_widget_views, place_view
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.live.comparison_messages import ComparisonView
    from dtkit.types import Status

MAX_VIEWS = 16
"""Live views that stay; older ones are closed, so that their memory is freed."""


@runtime_checkable
class ChangingRun(Protocol):
    """A run that may still go on; a history is not one."""

    @property
    def status(self) -> Status:
        """A snapshot of state, step and times."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change. Return a function that ends the subscription."""
        ...


class ComparisonWidget(anywidget.AnyWidget):
    """The live view of a comparison, until :meth:`close`."""

    _esm = bundle_modules(STATIC_FOLDER / "compare.js")
    _css = STATIC_FOLDER / "dashboard.css"

    opening = traitlets.Dict().tag(sync=True)
    """The first message: ``{"content": ..., "buffers": [...]}``."""
    place = traitlets.Unicode().tag(sync=True)
    """Name of the view's places in the page."""

    def __init__(self, comparison: ComparisonView) -> None:
        self._message_builder = ComparisonMessageBuilder(comparison)
        # locks: while a message is made and sent
        self._send_lock = threading.Lock()
        self._throttle = Throttle(self._send_update, timeouts.COMPARISON_INTERVAL_S)
        opening = self._message_builder.build_snapshot()
        super().__init__(opening={"content": opening.content, "buffers": opening.buffers}, place=make_place_name())
        self.on_msg(lambda *_: self._throttle.trigger())  # a page sent hello
        self._unsubscribers = [run.subscribe(self._throttle.trigger) for run in _select_running(comparison.runs)]

    def close(self) -> None:
        """End the view."""
        for unsubscribe in self._unsubscribers:
            unsubscribe()
        self._throttle.close()
        with self._send_lock:
            super().close()

    def _send_update(self) -> None:
        with self._send_lock:
            if self.comm is not None:
                message = self._message_builder.build_snapshot()
                self.send(message.content, message.buffers)


def _select_running(runs: Sequence[object]) -> list[ChangingRun]:
    return [run for run in runs if isinstance(run, ChangingRun) and not run.status.state.has_ended]


def try_show(comparison: ComparisonView) -> bool:
    """Show a comparison live in the current cell, with its figure for the saved notebook.

    Return False without showing it where the figure would replace the live view at once.
    """
    running = _select_running(comparison.runs)
    if not running and needs_widget_views():
        return False
    widget = ComparisonWidget(comparison)
    view = place_view(widget, (comparison.make_mime_bundle(), {}))
    _keep(widget)
    unsubscribers: list[Callable[[], None]] = []

    def draw_when_ended() -> None:
        if not _select_running(running):
            view.update((comparison.make_mime_bundle(), {}))
            throttle.close()
            for unsubscribe in unsubscribers:
                unsubscribe()

    throttle = Throttle(draw_when_ended, 0.0)
    if running:
        unsubscribers += [run.subscribe(throttle.trigger) for run in running]
        throttle.trigger()
    return True


def _keep(widget: ComparisonWidget) -> None:
    """Keep a live view, and close the oldest one beyond those that stay; its figure stays."""
    with _lock:
        _kept.append(widget)
        oldest = _kept.pop(0) if len(_kept) > MAX_VIEWS else None
    if oldest is not None:
        oldest.close()


# locks: while a view is kept or closed
_lock = threading.Lock()
_kept: list[ComparisonWidget] = []
