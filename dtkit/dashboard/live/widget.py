"""The live view of a run: an anywidget over a :class:`~dtkit.dashboard.live.messages.MessageBuilder`.

The model opens with a snapshot in the trait ``opening``, which arrives even while a cell blocks the kernel. Later
messages are custom ones, at most four a second, each in as many parts as its curves need. Where a training pays for
them, they are fewer, above all while nobody is at the page, but what a person waits for is sent at once. The browser's
half is ``static/dashboard.js`` with a module for each panel; it has no build step (see
:mod:`dtkit.dashboard.live.bundle`).

A page loses messages until its module has loaded. Then it sends hello and gets a snapshot. A kernel that is busy with
a blocking cell doesn't receive the hello. So until the first hello, the 1st, 2nd, 4th, 8th ... message is a snapshot.

Commands of a page arrive on the kernel's thread and are posted to the run, which never waits there.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from dtkit._util import timeouts
from dtkit._util.guard import run_guarded
from dtkit.dashboard.figures import custom_panels
from dtkit.dashboard.live.attention import Level, PageAttention
from dtkit.dashboard.live.bundle import STATIC_FOLDER, bundle_modules
from dtkit.dashboard.live.commands import CommandHandler
from dtkit.dashboard.live.heartbeat import Heartbeat
from dtkit.dashboard.live.messages import Message, MessageBuilder
from dtkit.dashboard.live.panel_renderer import CustomPanelRenderer
from dtkit.dashboard.live.placement import make_place_name
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.dashboard.live.sight import PageSight
from dtkit.dashboard.summary.ended_engines import find_ended_engines
from dtkit.dashboard.summary.spare_core import has_spare_core
from dtkit.dashboard.throttle import Throttle, start_timer
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.run_view import RunView

_BUSY_FACTOR = 3
"""How much longer intervals are where a training pays for each message."""
_PRESSING_FACTOR = 5
"""How much shorter they are for what a person waits for, such as a new state."""
_HIDDEN_FACTOR = 2
"""How much longer the unwatched one is where no view is in sight. A blocking cell hides that one is in sight again."""


class Dashboard(anywidget.AnyWidget):
    """A live view of a run for JupyterLab and its relatives, until :meth:`close`, also after the run's end.

    All displays and pages of one Dashboard show the same. With `fault_injection` a page may slow nodes down and end
    them. Tests replace `clock` and `call_later`.
    """

    _esm = bundle_modules(STATIC_FOLDER / "dashboard.js")
    _css = STATIC_FOLDER / "dashboard.css"

    opening = traitlets.Dict().tag(sync=True)
    """The first message: ``{"content": ..., "buffers": [...]}``."""
    place = traitlets.Unicode().tag(sync=True)
    """Name of the view's places in the page."""

    def __init__(
        self,
        run: RunView,
        *,
        fault_injection: bool = False,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], None] = start_timer,
    ) -> None:
        self._run, self._clock = run, clock
        self._sent_at = self._charts_sent_at = -math.inf  # of the last message, and of the last with curves
        self._message_builder = MessageBuilder(run)
        self._command_handler = CommandHandler(run, self._report_command, fault_injection=fault_injection)
        self._message_builder.extra_controls = self._command_handler.extra_controls
        self._sight, self._attention = PageSight(clock), PageAttention()
        self._panel_renderer = CustomPanelRenderer(
            run.history, clock, is_away=self._sight.is_away, get_width=self._sight.get_width
        )
        # locks: while a message is made and sent
        self._send_lock = threading.Lock()  # messages leave in the order in which they are built
        self._is_page_ready = False
        self._knows_heartbeat = False  # a page misses signs of life once it has had one
        self._num_updates = 0
        self._unsubscribe: Callable[[], None] = _do_nothing
        self._unsubscribe_panels: Callable[[], None] = _do_nothing
        self._throttle = Throttle(
            self._send_update,
            timeouts.LIVE_INTERVAL_S,
            pressing_interval=timeouts.LIVE_INTERVAL_S / _PRESSING_FACTOR,
            clock=clock,
            call_later=call_later,
        )
        self._picture_throttle = Throttle(
            self._send_pictures, timeouts.LIVE_INTERVAL_S, clock=clock, call_later=call_later
        )
        self._series_feed = SeriesFeed(run.history, clock)
        self._series_throttle = Throttle(
            self._send_series, timeouts.LIVE_INTERVAL_S, clock=clock, call_later=call_later
        )
        self._heartbeat = Heartbeat(self._send_sign_of_life)
        self._set_intervals()
        message = self._message_builder.build_snapshot()
        super().__init__(opening={"content": message.content, "buffers": message.buffers}, place=make_place_name())
        self.on_msg(self._on_page_message)
        self._unsubscribe = run.subscribe(self._request_update)
        self._unsubscribe_panels = custom_panels.subscribe(self._request_pictures)
        self._request_update()  # for changes between the snapshot and the subscription

    def enable_fault_injection(self) -> None:
        """Show the controls of fault injection on all pages."""
        with self._send_lock:
            self._command_handler.fault_injection = True
            self._message_builder.extra_controls = self._command_handler.extra_controls
            if self.comm is not None:
                self._send_message(self._message_builder.build_snapshot())

    def _request_update(self) -> None:
        has_no_later_one = self._attention.refresh_s > 0 and self._is_at_rest()  # a run at rest changes rarely
        self._throttle.trigger(is_pressing=self._message_builder.is_pressing or has_no_later_one)
        if self._is_page_ready:  # the run may have been extended
            self._heartbeat.start()
        self._request_pictures()
        self._request_series()

    def _request_series(self) -> None:
        """Schedule the numbers that a page lacks while the run rests. Otherwise they follow each update."""
        if self._is_page_ready and self._series_feed.is_outdated and self._is_at_rest():
            self._series_throttle.trigger(is_pressing=True)

    def _is_at_rest(self) -> bool:
        """Whether the run has ended or pauses."""
        state = self._run.status.state
        return state.has_ended or state is State.PAUSED

    def close(self) -> None:
        """End the view: nothing more is sent, and pages drop the model."""
        self._stop_updates()
        with self._send_lock:
            super().close()

    def _stop_updates(self) -> None:
        unsubscribe, self._unsubscribe = self._unsubscribe, _do_nothing  # a second call does nothing
        unsubscribe()
        self._unsubscribe_panels()
        self._heartbeat.stop()
        self._throttle.close()
        self._picture_throttle.close()
        self._series_throttle.close()

    def _send_update(self) -> None:
        """Send the changes since the last message. Runs on the throttle's thread."""
        builder = self._message_builder
        with self._send_lock:
            if self.comm is None:
                return
            text_for_s = self._charts_sent_at + self._find_charts_interval() - self._clock()
            if self._is_page_ready and text_for_s > timeouts.TIMER_TOLERANCE_S and not builder.is_pressing:
                self._send_message(builder.build_text())
                self._throttle.trigger(delay_s=text_for_s)
                return
            self._num_updates += 1
            self._charts_sent_at = self._clock()
            needs_snapshot = not self._is_page_ready and self._num_updates & (self._num_updates - 1) == 0
            self._send_message(builder.build_snapshot() if needs_snapshot else builder.build_change())
            while builder.has_pending_curves:  # charts must not lag behind the numbers above them
                self._send_message(builder.build_rest())
            delay_s = builder.pending_delay_s
        if self._is_page_ready and self._series_feed.is_outdated:
            self._send_series()  # their charts end where the others do
        if delay_s is not None:
            self._throttle.trigger(delay_s=delay_s)

    def _send_sign_of_life(self) -> bool:
        """Send a sign of life, unless another message just was one. Return False if the page needs no more signs."""
        if self._run.status.state.has_ended:
            return self._watch_engines()
        with self._send_lock:
            silence_s = self._clock() - self._sent_at
            if self.comm is not None and (silence_s >= timeouts.LIVE_HEARTBEAT_S or not self._knows_heartbeat):
                self.send({"kind": "alive"})
                self._sent_at, self._knows_heartbeat = self._clock(), True
            return self.comm is not None

    def _watch_engines(self) -> bool:
        """Report engines that have ended since the run did. Return False once nobody watches them, or the view ends."""
        if find_ended_engines(self._run) != self._message_builder.ended_ranks:
            self._request_update()
        return self.comm is not None and self._run.ended_engines is not None

    def _send_pictures(self) -> None:
        """Send the due pictures of the user's panels, drawn without the lock because drawing may take long."""
        for title in self._panel_renderer.take_removed():
            with self._send_lock:
                if self.comm is not None:
                    self.send({"kind": "no picture", "name": title})
        for picture in self._panel_renderer.draw_due_panels():
            with self._send_lock:
                if self.comm is None:
                    return
                self.send(picture.content, [picture.png])
        self._request_pictures()  # not due yet, or outdated again

    def _request_pictures(self, *, is_pressing: bool = False) -> None:
        """Schedule the user's panels that lack rows, for when the first of them is due."""
        if self._panel_renderer.is_outdated:
            if is_at_rest := self._is_at_rest():
                self._panel_renderer.hurry()  # no newer rows follow
            is_pressing |= is_at_rest
            self._picture_throttle.trigger(is_pressing=is_pressing, delay_s=self._panel_renderer.due_in_s)

    def _send_series(self) -> None:
        """Send numbers of the user's own and of the machines, in a share of the time."""
        with self._send_lock:  # one caller of the feed at a time
            message = self._series_feed.build_message(is_last=self._is_at_rest())
            if self.comm is not None and message is not None:
                self._send_message(message)
        self._request_series()

    def _send_message(self, message: Message) -> None:
        self._sent_at = self._clock()
        self.send(message.content, message.buffers)

    def _on_page_message(self, _widget: object, content: Any, _buffers: object) -> None:
        """Handle a page's hello, selection, or command. Runs on the kernel's thread."""
        if not isinstance(content, dict):
            return
        if "hello" in content:
            self._on_hello(is_new=content["hello"] == "opened")
        elif "select" in content:
            self._select_node(content["select"])
        elif "zoom" in content:
            self._send_detail(content["zoom"])
        elif "sight" in content:
            self._note_sight(content["sight"])
        elif "attention" in content:
            self._note_attention(content["attention"])
        elif isinstance(content.get("command"), str):
            self._handle_command(content["command"], content.get("value"))

    def _on_hello(self, *, is_new: bool) -> None:
        if is_new:
            self._attention.begin()
            self._set_intervals()
            self._sight.forget()
        with self._send_lock:
            self._is_page_ready, self._knows_heartbeat = True, False
            self._send_message(self._message_builder.build_snapshot())
        self._heartbeat.start()
        self._panel_renderer.reset()
        self._series_feed.reset()
        self._request_update()

    def _note_sight(self, report: Any) -> None:
        """Note which pictures a page has out of sight; draw at once what has come into sight."""
        was_outdated = self._panel_renderer.is_outdated
        self._sight.note(report)
        is_back = self._panel_renderer.is_outdated and not was_outdated
        if is_back:
            self._panel_renderer.hurry()
        self._request_pictures(is_pressing=is_back)

    def _select_node(self, rank: Any) -> None:
        """Highlight a node on all pages; None ends the highlight."""
        with self._send_lock:
            is_known = isinstance(rank, int) and 0 <= rank < len(self._message_builder)
            self._message_builder.selected_rank = rank if is_known else None
            self._send_message(self._message_builder.build_change())

    def _send_detail(self, steps: Any) -> None:
        """Send the curves between two steps in more detail than a page has. Anything but two integers is ignored."""
        if isinstance(steps, list) and len(steps) == 2 and all(type(step) is int for step in steps):
            with self._send_lock:
                self._send_message(self._message_builder.build_detail(*steps))

    def _note_attention(self, report: Any) -> None:
        """Note what a person may see of a page; send at once what the page of one who comes back lacks."""
        level, interval = self._attention.level, self._throttle.interval
        self._attention.note(report)
        self._set_intervals()
        if self._attention.level > level:
            self._charts_sent_at = -math.inf
        if self._attention.level > level or self._throttle.interval < interval:
            self._request_update()

    def _set_intervals(self) -> None:
        self._throttle.interval = self._find_interval()
        self._picture_throttle.interval = max(timeouts.LIVE_INTERVAL_S, self._attention.refresh_s)

    def _find_interval(self) -> float:
        """Return the shortest time between two messages that nobody waits for, as in ``static/pacing.js``."""
        if self._attention.level is Level.HIDDEN:
            usual_s = _HIDDEN_FACTOR * timeouts.LIVE_UNWATCHED_INTERVAL_S
        else:
            usual_s = timeouts.LIVE_INTERVAL_S * (1 if has_spare_core(self._run) else _BUSY_FACTOR)
        return max(usual_s, self._attention.refresh_s)

    def _find_charts_interval(self) -> float:
        """Return the shortest time between two messages with curves; those between them have the text only."""
        if self._attention.refresh_s:
            return 0.0  # somebody chose how often all of it comes
        is_saving = self._attention.level is Level.OPEN and not (self._is_at_rest() or has_spare_core(self._run))
        return timeouts.LIVE_UNWATCHED_INTERVAL_S if is_saving else 0.0

    def _handle_command(self, command: str, value: Any) -> None:
        """Pass a command to the run. A refusal is shown next to the button."""
        run_guarded(
            lambda: self._command_handler.handle(command, value),
            lambda error: self._report_command("refused", command, str(error)),
        )

    def _report_command(self, kind: str, command: str, text: str) -> None:
        """Report on all pages that a command took effect, or why not. Any thread may call this without the lock."""
        if kind == "effect":
            self._message_builder.note_effect(text)
            self._request_update()
        else:
            self.send({"kind": "refused", "command": command, "text": text})


def _do_nothing() -> None:
    pass
