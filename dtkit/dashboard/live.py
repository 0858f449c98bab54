"""The live view in a notebook: an anywidget over a :class:`~dtkit.dashboard.feed.Feed`.

The model is opened with a snapshot in the trait ``opening`` (it arrives even while a cell blocks the
kernel); from then on messages are custom ones, at most four a second. Its half in the browser,
``static/dashboard.js`` with its modules, has a file per panel and no build step (see :mod:`dtkit.dashboard.bundle`).

Between opening and the moment when the page's module has loaded, messages are lost to it. It then says
hello and is answered with a snapshot. A kernel that is busy with a blocking cell can't hear that, so until
the first hello the 1st, 2nd, 4th, 8th ... message is a snapshot by itself.

What is clicked comes in on the kernel's thread and is posted to the run, which never waits there.
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from dtkit.dashboard.bundle import bundle
from dtkit.dashboard.feed import Feed, Message
from dtkit.dashboard.throttle import Throttle, on_timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.source import Source

STATIC = Path(__file__).parent / "static"

COMMANDS = frozenset({"pause", "resume", "step", "stop", "lr"})
"""What a page may ask for; anything else is ignored."""

INTERVAL = 0.25
"""Seconds between two updates."""


class Dashboard(anywidget.AnyWidget):
    """A live view of `source` for JupyterLab and its relatives; closes with :meth:`close`.

    Several displays of one Dashboard, and several pages, show the same. `clock` and `later` are seams
    for tests.
    """

    _esm = bundle(STATIC / "dashboard.js")
    _css = STATIC / "dashboard.css"

    opening = traitlets.Dict().tag(sync=True)
    """The first message: ``{"content": ..., "buffers": [...]}``."""

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = on_timer,
    ) -> None:
        self._source = source
        self._feed = Feed(source)
        self._order = threading.Lock()  # a message is composed and sent under it, so that they leave in order
        self._greeted = False
        self._opened = 0
        self._sent = 0
        self._unsubscribe: Callable[[], None] = _nothing
        self._throttle = Throttle(self._update, INTERVAL, clock=clock, later=later)
        first = self._feed.snapshot()
        super().__init__(opening={"content": first.content, "buffers": first.buffers})
        self.on_msg(self._receive)
        self._unsubscribe = source.subscribe(self._throttle.poke)
        self._throttle.poke()  # what happened between the snapshot and the subscription

    def close(self) -> None:
        """End the view: nothing is sent any more, and pages drop the model."""
        self._silence()
        with self._order:
            super().close()

    def retire(self) -> None:
        """End the view of a run that has ended and whose output was replaced by a picture.

        A page that was opened anew, or a second tab, takes no part in that replacement: a front end knows the
        displays of cells that it ran itself. For it the model stays, at the last state and silent.
        """
        if self._opened < 2:
            self.close()
            return
        with self._order:
            self._post(self._feed.snapshot())
        self._silence()

    def _silence(self) -> None:
        unsubscribe, self._unsubscribe = self._unsubscribe, _nothing  # closing twice does no harm
        unsubscribe()
        self._throttle.close()

    def _update(self) -> None:
        """Send what changed since the last message. Runs on the throttle's thread."""
        with self._order:
            if self.comm is None:
                return
            self._sent += 1
            unheard = not self._greeted and self._sent & (self._sent - 1) == 0
            self._post(self._feed.snapshot() if unheard else self._feed.change())
            more = self._feed.pending
        if more:
            self._throttle.poke()

    def _post(self, message: Message) -> None:
        self.send(message.content, message.buffers)

    def _receive(self, _widget: object, content: Any, _buffers: object) -> None:
        """A page said something: hello, or a command. Runs on the kernel's thread."""
        if not isinstance(content, dict):
            return
        if "hello" in content:
            self._greet(opened=content["hello"] == "opened")
        elif content.get("command") in COMMANDS:
            self._ask(content["command"], content.get("value"))

    def _greet(self, *, opened: bool) -> None:
        with self._order:
            self._greeted = True
            self._opened += opened
            self._post(self._feed.snapshot())

    def _ask(self, command: str, value: Any) -> None:
        """Post a command. What the run says against it is shown where the button is."""
        try:
            self._source.post(command, _number(value) if command == "lr" else None)
        except Exception as error:  # noqa: BLE001 - the boundary between a page and the run; the page shows it
            self.send({"kind": "refused", "command": command, "text": str(error)})


def _nothing() -> None:
    pass


def _number(value: Any) -> float:
    """A learning rate as the page sent it."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"a learning rate of {value!r}: it must be a number of 0 or more, such as 0.01")
    return float(value)
