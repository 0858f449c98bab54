"""The live view without JupyterLab: its module on an empty page, fed by a source that a test drives.

The page gets what anywidget would give it (a model with an opening, custom messages with buffers); what it sends comes
back through `sent`. So a picture of 256 nodes costs a second, and no kernel. Nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import itertools
import json
from typing import TYPE_CHECKING, Any

from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.live.widget import STATIC_FOLDER, Dashboard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from playwright.sync_api import Locator, Page

    from dtkit.dashboard.live.messages import Message
    from tests.support.fake_source import FakeSource

_PAGE = """<!doctype html><meta charset="utf-8"><body data-jp-theme-light="{light}"
style="margin: 8px; background: {background}; --jp-ui-font-family: 'DejaVu Sans', sans-serif">
<style>{css}</style><div id="view"></div>"""

# A model as anywidget has it. Buffers arrive as DataViews.
_START = """
async ([code, content, buffers]) => {
  const decode = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const heard = [];
  window.sent = [];
  const model = {
    get: () => ({ content, buffers: buffers.map(decode) }),
    on: (_name, callback) => heard.push(callback),
    send: (message) => window.sent.push(message),
  };
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const widget = (await import(url)).default();
  widget.initialize({ model });
  widget.render({ model, el: document.getElementById("view") });
  window.hear = (content, buffers) => { for (const callback of heard) callback(content, buffers.map(decode)); };
}
"""


class Still:
    """A dashboard of `source` on `page`; `update` sends what changed since."""

    def __init__(self, page: Page, source: FakeSource, theme: str = "light", *, offers: Sequence[str] = ()) -> None:
        self.page = page
        self._feed = MessageBuilder(source, itertools.count().__next__)  # each look is a second after the last
        self._feed.extra_controls = offers
        put(page, str(Dashboard._esm), self._feed.build_snapshot(), theme)
        self.root: Locator = page.get_by_test_id("dtkit-dashboard")
        self._wait()

    def update(self) -> None:
        """Send all that changed, and wait until it is drawn."""
        while True:
            self.page.evaluate(
                "([content, buffers]) => window.hear(content, buffers)", plain(self._feed.build_change())
            )
            if not self._feed.has_pending:
                break
        self._wait()

    @property
    def sent(self) -> list[dict[str, Any]]:
        """What the page sent, hellos left out."""
        said: list[dict[str, Any]] = self.page.evaluate("() => window.sent")
        return [message for message in said if "hello" not in message and "select" not in message]

    def choose(self, rank: int | None) -> None:
        """What the kernel does when a page selects a node."""
        self._feed.selected_rank = rank
        self.update()

    def effect(self, text: str) -> None:
        """What the kernel does when a command took effect."""
        self._feed.last_effect = {"count": self._feed.last_effect["count"] + 1, "text": text}
        self.update()

    def show(self, name: str, png: bytes, error: str | None = None) -> None:
        """Send the picture of a user's panel."""
        content = {"kind": "picture", "name": name, "error": error}
        self.page.evaluate(
            "([content, buffers]) => window.hear(content, buffers)", [content, [base64.b64encode(png).decode()]]
        )

    def screenshot(self, path: Path) -> None:
        """Write the whole view to a PNG file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, full_page=True, animations="disabled")

    def _wait(self) -> None:
        shown = f"() => document.querySelector('.dtkit').dataset.seq === '{self._feed.seq}'"
        self.page.wait_for_function(shown, timeout=10_000)


def plain(message: Message) -> list[Any]:
    json.dumps(message.content, allow_nan=False)  # what the wire would refuse is refused here
    return [message.content, [base64.b64encode(buffer).decode() for buffer in message.buffers]]


def put(page: Page, module: str, opening: Message, theme: str) -> None:
    """Load a widget's module on an empty page, with the message that it opens with."""
    dark = theme == "dark"
    css = (STATIC_FOLDER / "dashboard.css").read_text(encoding="utf-8")
    page.set_content(_PAGE.format(light=str(not dark).lower(), background="#111" if dark else "#fff", css=css))
    page.evaluate(_START, [module, *plain(opening)])
