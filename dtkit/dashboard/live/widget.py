"""The live view in a notebook: an anywidget over a :class:`~dtkit.dashboard.make_row_batches.MessageBuilder`.

The model is opened with a snapshot in the trait ``opening`` (it arrives even while a cell blocks the
kernel); from then on messages are custom ones, at most four a second. Its half in the browser,
``static/dashboard.js`` with its modules, has a file per panel and no build step (see :mod:`dtkit.dashboard.live.bundle`).

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

from dtkit._util.guard import run_guarded
from dtkit.dashboard.figures.custom_panels import MIN_PICTURE_INTERVAL_S, CustomPanelRenderer
from dtkit.dashboard.live.bundle import bundle_modules
from dtkit.dashboard.live.commands import CommandHandler
from dtkit.dashboard.live.messages import Message, MessageBuilder
from dtkit.dashboard.throttle import Throttle, start_timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.run_view import RunView

STATIC_FOLDER = Path(__file__).parent / "static"

UPDATE_INTERVAL_S = 0.25
"""Seconds between two updates."""


class Dashboard(anywidget.AnyWidget):
    """A live view of `source` for JupyterLab and its relatives; closes with :meth:`close`.

    Several displays of one Dashboard, and several pages, show the same. With `fault_injection` a page may slow nodes down and
    end them. `clock` and `later` are seams for tests.
    """

    _esm = bundle_modules(STATIC_FOLDER / "dashboard.js")
    _css = STATIC_FOLDER / "dashboard.css"

    opening = traitlets.Dict().tag(sync=True)
    """The first message: ``{"content": ..., "buffers": [...]}``."""

    def __init__(
        self,
        run: RunView,
        *,
        fault_injection: bool = False,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], None] = start_timer,
    ) -> None:
        self._message_builder = MessageBuilder(run)
        self._command_handler = CommandHandler(run, self._report_command, fault_injection=fault_injection)
        self._message_builder.extra_controls = self._command_handler.extra_controls
        self._panel_renderer = CustomPanelRenderer(run.history, clock)
        # locks: while a message is made and sent
        self._send_lock = threading.Lock()  # a message is composed and sent under it, so that they leave in order
        self._is_page_ready = False
        self._num_opened_pages = 0
        self._num_updates = 0
        self._unsubscribe: Callable[[], None] = _do_nothing
        self._throttle = Throttle(self._send_update, UPDATE_INTERVAL_S, clock=clock, call_later=call_later)
        self._picture_throttle = Throttle(
            self._send_pictures, MIN_PICTURE_INTERVAL_S, clock=clock, call_later=call_later
        )
        first = self._message_builder.build_snapshot()
        super().__init__(opening={"content": first.content, "buffers": first.buffers})
        self.on_msg(self._on_page_message)
        self._unsubscribe = run.subscribe(self._request_update)
        self._request_update()  # what happened between the snapshot and the subscription

    def enable_fault_injection(self) -> None:
        """Have all pages offer drills from now on."""
        with self._send_lock:
            self._command_handler.fault_injection = True
            self._message_builder.extra_controls = self._command_handler.extra_controls
            if self.comm is not None:
                self._send_message(self._message_builder.build_snapshot())

    def _request_update(self) -> None:
        self._throttle.trigger()
        if self._panel_renderer.is_outdated:
            self._picture_throttle.trigger()

    def close(self) -> None:
        """End the view: nothing is sent any more, and pages drop the model."""
        self._stop_updates()
        with self._send_lock:
            super().close()

    def close_or_freeze(self) -> None:
        """End the view of a run that has ended and whose output was replaced by a picture.

        A page that was opened anew, or a second tab, takes no part in that replacement: a front end knows the
        displays of cells that it ran itself. For it the model stays, at the last state and silent.
        """
        if self._num_opened_pages < 2:
            self.close()
            return
        with self._send_lock:
            self._send_message(self._message_builder.build_snapshot())
        self._stop_updates()

    def _stop_updates(self) -> None:
        unsubscribe, self._unsubscribe = self._unsubscribe, _do_nothing  # closing twice does no harm
        unsubscribe()
        self._throttle.close()
        self._picture_throttle.close()

    def _send_update(self) -> None:
        """Send what changed since the last message. Runs on the throttle's thread."""
        with self._send_lock:
            if self.comm is None:
                return
            self._num_updates += 1
            unheard = not self._is_page_ready and self._num_updates & (self._num_updates - 1) == 0
            self._send_message(
                self._message_builder.build_snapshot() if unheard else self._message_builder.build_change()
            )
            more = self._message_builder.has_pending
        if more:
            self._throttle.trigger()

    def _send_pictures(self) -> None:
        """Send the pictures of the user's own panels that are due. Drawn without the lock: it may take long."""
        for picture in self._panel_renderer.draw_due_panels():
            with self._send_lock:
                if self.comm is None:
                    return
                content = {"kind": "picture", "name": picture.name, "error": picture.error}
                self.send(content, [picture.png])
        if self._panel_renderer.is_outdated:  # not due yet, or newer by now
            self._picture_throttle.trigger()

    def _send_message(self, message: Message) -> None:
        self.send(message.content, message.buffers)

    def _on_page_message(self, _widget: object, content: Any, _buffers: object) -> None:
        """A page said something: hello, or a command. Runs on the kernel's thread."""
        if not isinstance(content, dict):
            return
        if "hello" in content:
            self._on_hello(page_opened=content["hello"] == "opened")
        elif "select" in content:
            self._select_node(content["select"])
        elif isinstance(content.get("command"), str):
            self._handle_command(content["command"], content.get("value"))

    def _on_hello(self, *, page_opened: bool) -> None:
        with self._send_lock:
            self._is_page_ready = True
            self._num_opened_pages += page_opened
            self._send_message(self._message_builder.build_snapshot())
        self._panel_renderer.reset()
        self._request_update()

    def _select_node(self, rank: Any) -> None:
        """Highlight a node on all pages, or with None no node any more."""
        with self._send_lock:
            known = isinstance(rank, int) and 0 <= rank < len(self._message_builder)
            self._message_builder.selected_rank = rank if known else None
            self._send_message(self._message_builder.build_change())

    def _handle_command(self, command: str, value: Any) -> None:
        """Pass a command on. What the run says against it is shown where the button is."""
        run_guarded(
            lambda: self._command_handler.handle(command, value),
            lambda error: self._report_command("refused", command, str(error)),
        )

    def _report_command(self, kind: str, command: str, text: str) -> None:
        """Have pages say that a command took effect, or why not. Called on any thread, with no lock held."""
        if kind == "effect":
            self._message_builder.last_effect = {"count": self._message_builder.last_effect["count"] + 1, "text": text}
            self._throttle.trigger()
        else:
            self.send({"kind": "refused", "command": command, "text": text})


def _do_nothing() -> None:
    pass
