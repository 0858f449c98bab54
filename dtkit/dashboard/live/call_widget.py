"""The live view of a call of the user's function: a chart of each number that it logs.

Each message has the whole view, since a page whose cell blocks the kernel can't ask for what it missed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from dtkit._util import timeouts
from dtkit.dashboard.live.bundle import STATIC_FOLDER, bundle_modules
from dtkit.dashboard.live.messages import Message
from dtkit.dashboard.live.placement import make_place_name
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.dashboard.summary.logged_rows import LoggedRows
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import CallView


class CallMessageBuilder:
    """Builds messages about a call. Not thread-safe: one caller at a time."""

    def __init__(self, call: CallView) -> None:
        self._call, self._rows = call, LoggedRows()
        self._feed = SeriesFeed(self._rows)
        self._seq = 0

    def build_messages(self) -> list[Message]:
        """Return a snapshot without curves of a run, and all logged numbers."""
        self._rows.update(self._call.rows)
        self._seq += 1
        self._feed.reset()
        messages = [self._build_snapshot()]
        while (message := self._feed.build_message(is_last=True)) is not None:
            messages.append(message)
        return messages

    def _build_snapshot(self) -> Message:
        world_size, num_rows = self._call.world_size, self._rows.num_steps
        content: dict[str, Any] = {
            "kind": "snapshot",
            "seq": self._seq,
            "status": {"state": "running" if self._call.state == "running" else "ended", "step": num_rows},
            "head": {"columns": 1, "charts": {}, "ranks": world_size, "runs": []},
            "curves": {"width": max(1, num_rows), "origin": 0, "first": 0, "flat": False, "buckets": 1},
            "nodes_now": {"world": world_size} | {name: [] for name in ("lost", "stuck", "outliers", "slow", "slowed")},
            "effect": {"count": 0, "text": ""},
            "lr": None,
            "error": None,
        }
        content |= {name: [] for name in ("tiles", "notices", "nodes", "marks", "evaluations", "events")}
        return Message(content, [np.full(3, np.nan, "<f4").tobytes(), b""])


class CallWidget(anywidget.AnyWidget):
    """The live charts of a call, until :meth:`close`."""

    _esm = bundle_modules(STATIC_FOLDER / "call.js")
    _css = STATIC_FOLDER / "dashboard.css"

    opening: traitlets.List[dict[str, Any]] = traitlets.List().tag(sync=True)
    """The first messages: ``[{"content": ..., "buffers": [...]}]``."""
    place = traitlets.Unicode().tag(sync=True)
    """Name of the view's places in the page."""

    def __init__(self, call: CallView) -> None:
        self._message_builder = CallMessageBuilder(call)
        # locks: while messages are made and sent
        self._send_lock = threading.Lock()
        self._throttle = Throttle(self._send_messages, timeouts.COMPARISON_INTERVAL_S)
        messages = self._message_builder.build_messages()
        opening = [{"content": message.content, "buffers": message.buffers} for message in messages]
        super().__init__(opening=opening, place=make_place_name())
        self.on_msg(lambda *_: self._throttle.trigger())  # a page sent hello

    def update(self) -> None:
        """Send what is new, soon."""
        self._throttle.trigger()

    def close(self) -> None:
        """End the view."""
        self._throttle.close()
        with self._send_lock:
            super().close()

    def _send_messages(self) -> None:
        with self._send_lock:
            if self.comm is not None:
                for message in self._message_builder.build_messages():
                    self.send(message.content, message.buffers)
