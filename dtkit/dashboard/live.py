"""The live view in a notebook: an anywidget over a :class:`~dtkit.dashboard.make_row_batches.Feed`.

The model is opened with a snapshot in the trait ``opening`` (it arrives even while a cell blocks the
kernel); from then on messages are custom ones, at most four a second. Its half in the browser,
``static/dashboard.js`` with its modules, has a file per panel and no build step (see :mod:`dtkit.dashboard.bundle`).

Between opening and the moment when the page's module has loaded, messages are lost to it. It then says
hello and is answered with a snapshot. A kernel that is busy with a blocking cell can't hear that, so until
the first hello the 1st, 2nd, 4th, 8th ... message is a snapshot by itself.

What is clicked comes in on the kernel's thread and is posted to the run, which never waits there.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from dtkit._util.guard import attempt
from dtkit.dashboard.asks import Desk
from dtkit.dashboard.bundle import bundle
from dtkit.dashboard.custom import LEAST_S, Gallery
from dtkit.dashboard.feed import Feed, Message
from dtkit.dashboard.throttle import Throttle, on_timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.source import Source

STATIC = Path(__file__).parent / "static"

INTERVAL = 0.25
"""Seconds between two updates."""


class Dashboard(anywidget.AnyWidget):
    """A live view of `source` for JupyterLab and its relatives; closes with :meth:`close`.

    Several displays of one Dashboard, and several pages, show the same. With `drills` a page may slow nodes down and
    end them. `clock` and `later` are seams for tests.
    """

    _esm = bundle(STATIC / "dashboard.js")
    _css = STATIC / "dashboard.css"

    opening = traitlets.Dict().tag(sync=True)
    """The first message: ``{"content": ..., "buffers": [...]}``."""

    def __init__(
        self,
        source: Source,
        *,
        drills: bool = False,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = on_timer,
    ) -> None:
        self._feed = Feed(source)
        self._desk = Desk(source, self._say, drills=drills)
        self._feed.offers = self._desk.offers
        self._gallery = Gallery(source.history, clock)
        # locks: while a message is made and sent
        self._order = threading.Lock()  # a message is composed and sent under it, so that they leave in order
        self._greeted = False
        self._opened = 0
        self._sent = 0
        self._unsubscribe: Callable[[], None] = _nothing
        self._throttle = Throttle(self._update, INTERVAL, clock=clock, later=later)
        self._pictures = Throttle(self._draw, LEAST_S, clock=clock, later=later)
        first = self._feed.snapshot()
        super().__init__(opening={"content": first.content, "buffers": first.buffers})
        self.on_msg(self._receive)
        self._unsubscribe = source.subscribe(self._poke)
        self._poke()  # what happened between the snapshot and the subscription

    def allow_drills(self) -> None:
        """Have all pages offer drills from now on."""
        with self._order:
            self._desk.drills = True
            self._feed.offers = self._desk.offers
            if self.comm is not None:
                self._post(self._feed.snapshot())

    def _poke(self) -> None:
        self._throttle.poke()
        if self._gallery.pending:
            self._pictures.poke()

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
        self._pictures.close()

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

    def _draw(self) -> None:
        """Send the pictures of the user's own panels that are due. Drawn without the lock: it may take long."""
        for picture in self._gallery.draw():
            with self._order:
                if self.comm is None:
                    return
                content = {"kind": "picture", "name": picture.name, "error": picture.error}
                self.send(content, [picture.png])
        if self._gallery.pending:  # not due yet, or newer by now
            self._pictures.poke()

    def _post(self, message: Message) -> None:
        self.send(message.content, message.buffers)

    def _receive(self, _widget: object, content: Any, _buffers: object) -> None:
        """A page said something: hello, or a command. Runs on the kernel's thread."""
        if not isinstance(content, dict):
            return
        if "hello" in content:
            self._greet(opened=content["hello"] == "opened")
        elif "select" in content:
            self._select(content["select"])
        elif isinstance(content.get("command"), str):
            self._ask(content["command"], content.get("value"))

    def _greet(self, *, opened: bool) -> None:
        with self._order:
            self._greeted = True
            self._opened += opened
            self._post(self._feed.snapshot())
        self._gallery.forget()
        self._poke()

    def _select(self, rank: Any) -> None:
        """Highlight a node on all pages, or with None no node any more."""
        with self._order:
            known = isinstance(rank, int) and 0 <= rank < len(self._feed)
            self._feed.selected = rank if known else None
            self._post(self._feed.change())

    def _ask(self, command: str, value: Any) -> None:
        """Pass a command on. What the run says against it is shown where the button is."""
        attempt(lambda: self._desk.ask(command, value), lambda error: self._say("refused", command, str(error)))

    def _say(self, kind: str, command: str, text: str) -> None:
        """Have pages say that a command took effect, or why not. Called on any thread, with no lock held."""
        if kind == "effect":
            self._feed.effect = {"count": self._feed.effect["count"] + 1, "text": text}
            self._throttle.poke()
        else:
            self.send({"kind": "refused", "command": command, "text": text})


def _nothing() -> None:
    pass
