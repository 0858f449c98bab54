"""The live view without JupyterLab: its module on an empty page, fed by a source that a test drives.

The page gets the same as from anywidget: a model with a first message, then custom messages with buffers. `sent` has
the messages that the page sends. No kernel is needed, and nothing is loaded from the network.
"""

from __future__ import annotations

import base64
import itertools
import json
from typing import TYPE_CHECKING, Any

from dtkit.dashboard.live.bundle import STATIC_FOLDER
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.live.panel_renderer import PanelPicture
from dtkit.dashboard.live.widget import Dashboard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from playwright.sync_api import Locator, Page

    from dtkit.dashboard.live.messages import Message
    from tests.support.fake_source import FakeSource

_PAGE = """<!doctype html><meta charset="utf-8"><body data-jp-theme-light="{light}"
style="margin: 8px; background: {background}; --jp-ui-font-family: 'DejaVu Sans', sans-serif">
<style>{css}</style><div id="view"></div>"""

# A model with anywidget's methods. Buffers arrive as DataViews.
_START = """
async ([code, content, buffers]) => {
  const decode = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const listeners = {};
  window.sent = [];
  const model = {
    get: () => ({ content, buffers: buffers.map(decode) }),
    on: (name, callback) => (listeners[name] ??= []).push(callback),
    send: (message) => window.sent.push(message),
  };
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const widget = (await import(url)).default();
  widget.initialize({ model });
  widget.render({ model, el: document.getElementById("view") });
  window.receive = (content, buffers) => {
    for (const callback of listeners["msg:custom"]) callback(content, buffers.map(decode));
  };
  window.cutOff = () => { for (const callback of listeners.comm_live_update) callback(); };
}
"""


class StaticView:
    """Dashboard of `source` on `page`; `update` sends the changes since the last call."""

    def __init__(self, page: Page, source: FakeSource, theme: str = "light", *, offers: Sequence[str] = ()) -> None:
        self.page = page
        self._feed = MessageBuilder(source, itertools.count().__next__)  # one second between messages
        self._feed.extra_controls = offers
        load_widget(page, str(Dashboard._esm), self._feed.build_snapshot(), theme)
        self.root: Locator = page.get_by_test_id("dtkit-dashboard")
        self._wait()

    def update(self, *, is_drawn: bool = True) -> None:
        """Send all changes, and wait until they are drawn unless told not to."""
        while True:
            self.page.evaluate(
                "([content, buffers]) => window.receive(content, buffers)", encode_message(self._feed.build_change())
            )
            if not self._feed.has_pending:
                break
        if is_drawn:
            self._wait()

    def send_text(self) -> None:
        """Send the numbers above the charts and in their titles alone, as between two messages with curves."""
        self.page.evaluate(
            "([content, buffers]) => window.receive(content, buffers)", encode_message(self._feed.build_text())
        )

    def send_snapshot(self) -> None:
        """Send everything again, as after the run went back to an earlier step."""
        self.page.evaluate(
            "([content, buffers]) => window.receive(content, buffers)", encode_message(self._feed.build_snapshot())
        )

    @property
    def sent(self) -> list[dict[str, Any]]:
        """Commands that the page sent."""
        messages: list[dict[str, Any]] = self.page.evaluate("() => window.sent")
        return [message for message in messages if not {"hello", "select", "attention", "sight"} & message.keys()]

    def select_rank(self, rank: int | None) -> None:
        """Answer as the kernel does when a page selects a node."""
        self._feed.selected_rank = rank
        self.update()

    def answer_zoom(self) -> None:
        """Answer as the kernel does when a page zooms in and asks for finer data."""
        (zoom,) = [message["zoom"] for message in self.sent if "zoom" in message][-1:]
        detail = encode_message(self._feed.build_detail(*zoom))
        self.page.evaluate("([content, buffers]) => window.receive(content, buffers)", detail)

    def report_effect(self, text: str) -> None:
        """Answer as the kernel does when a command took effect."""
        self._feed.note_effect(text)
        self.update()

    def show_picture(
        self, name: str, png: bytes, error: str | None = None, note: str | None = None, *, is_wide: bool = False
    ) -> None:
        """Send the picture of a custom panel, or what takes its place."""
        content = PanelPicture(name, png, error, is_wide, note).content
        self.page.evaluate(
            "([content, buffers]) => window.receive(content, buffers)", [content, [base64.b64encode(png).decode()]]
        )

    def screenshot(self, path: Path) -> None:
        """Write the whole view to a PNG file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, full_page=True, animations="disabled")

    def _wait(self) -> None:
        shown = f"() => document.querySelector('.dtkit').dataset.seq === '{self._feed.seq}'"
        self.page.wait_for_function(shown, timeout=10_000)


def encode_message(message: Message) -> list[Any]:
    json.dumps(message.content, allow_nan=False)  # Jupyter refuses NaN in messages, too
    return [message.content, [base64.b64encode(buffer).decode() for buffer in message.buffers]]


def load_widget(page: Page, module: str, first_message: Message, theme: str) -> None:
    """Load a widget's module on an empty page, with its first message."""
    dark = theme == "dark"
    css = (STATIC_FOLDER / "dashboard.css").read_text(encoding="utf-8")
    page.set_content(_PAGE.format(light=str(not dark).lower(), background="#111" if dark else "#fff", css=css))
    add_widget(page, module, first_message)


def add_widget(page: Page, module: str, first_message: Message) -> None:
    """Load a widget's module, once more, into the element `view` of a page."""
    page.evaluate(_START, [module, *encode_message(first_message)])


def list_overflowing(page: Page) -> list[str]:
    """Return the texts that extend beyond the dashboard or are cut off."""
    texts: list[str] = page.evaluate("""() => {
      const root = document.querySelector(".dtkit").getBoundingClientRect();
      const out = [...document.querySelectorAll(".dtkit :is(text, button, li, h2, h3, p, .dtk-value, .dtk-note)")]
        .filter((el) => el.getClientRects().length && !el.closest(".dtk-scroll, .dtk-hidden"))
        .filter((el) => {
          const box = el.getBoundingClientRect();
          const cut = !el.closest("svg") && el.clientWidth && el.scrollWidth > el.clientWidth + 1;
          return cut || box.left < root.left || box.right > root.right;
        });
      return out.map((el) => el.textContent);
    }""")
    return texts
