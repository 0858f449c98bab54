"""Several runs beside each other while they train: one chart with a shared axis, and a table that is its legend.

All runs are drawn in buckets of the same width, so that a point of the axis means the same in each. A message is the
whole of it (a kilobyte a run, twice a second at most). When no run goes on any more, the kept picture takes its place.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from dtkit._util import formatting
from dtkit.dashboard.bundle import bundle
from dtkit.dashboard.live import STATIC
from dtkit.dashboard.series import LOSS, Chart, Curves
from dtkit.dashboard.source import Source
from dtkit.dashboard.throttle import Throttle, on_timer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.compare import Comparison
    from dtkit.dashboard.feed import Message

POINTS = 256
INTERVAL = 0.5
_OVER_ALL = Chart("loss", None, LOSS.of_totals)


class CompareFeed:
    """Composes messages about a comparison. Not thread-safe: one caller at a time."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._curves = [Curves((_OVER_ALL,), 1, POINTS) for _ in comparison.histories]
        self._seq = 0

    def snapshot(self) -> Message:
        """Everything that a page needs, in the form of a run's snapshot, so that the same store takes it."""
        from dtkit.dashboard.feed import Message

        self._seq += 1
        values, width, origin = self._aligned()
        runs, steps = self._runs(), [history.totals()["step"][-1:] for history in self._comparison.histories]
        last = int(max((step[0] for step in steps if len(step)), default=0))
        content = {
            "kind": "snapshot",
            "seq": self._seq,
            "status": {"state": "running" if any(run["state"] == "running" for run in runs) else "ended", "step": last},
            "head": {
                "columns": len(runs) + 1,
                "charts": {"loss": {"name": "loss", "first": 0, "nodes": len(runs), "banded": False}},
                "ranks": len(runs),
                "runs": runs,
            },
            "curves": {"width": width, "origin": origin, "first": 0, "flat": False, "buckets": len(values)},
            "effect": {"count": 0, "text": ""},
            "lr": None,
            "error": None,
        }
        content |= {name: [] for name in ("tiles", "remarks", "nodes", "marks", "evaluations", "events")}
        return Message(content, [np.ascontiguousarray(values, "<f4").tobytes(), b""])

    def _aligned(self) -> tuple[np.ndarray, int, int]:
        """(buckets, runs + 1, 3), with one width and one origin; the last column, of all nodes, is empty here."""
        for curves, history in zip(self._curves, self._comparison.histories, strict=True):
            curves.update(history)
        width = max(curves.width for curves in self._curves)
        for curves in self._curves:
            curves.widen(width)
        parts = [curves.part() for curves in self._curves]
        begun = [part.origin for part in parts if len(part.values)]
        origin = min(begun, default=0)
        places = [(part.origin - origin) // width for part in parts]
        length = max(place + len(part.values) for place, part in zip(places, parts, strict=True))
        values = np.full((max(0, length), len(parts) + 1, 3), np.nan, "f4")
        for k, (place, part) in enumerate(zip(places, parts, strict=True)):
            if len(part.values):
                values[place : place + len(part.values), k] = part.values[:, 0]
        return values, width, origin

    def _runs(self) -> list[dict[str, str]]:
        """A row of the table each: what people read, as text."""
        sources = self._comparison.sources
        return [
            {
                "label": row.label,
                "state": source.status.state.value if isinstance(source, Source) else "kept",
                "steps": f"{row.steps:,}",
                "loss": formatting.loss(row.loss) if row.steps else formatting.NOTHING,
                "rate": formatting.rate(row.samples_per_s),
                "sent": formatting.size(row.sent_bytes),
            }
            for row, source in zip(self._comparison.rows, sources, strict=True)
        ]


class CompareView(anywidget.AnyWidget):
    """The live view of a comparison; closes with :meth:`close`."""

    _esm = bundle(STATIC / "compare.js")
    _css = STATIC / "dashboard.css"

    opening = traitlets.Dict().tag(sync=True)
    """The first message: ``{"content": ..., "buffers": [...]}``."""

    def __init__(
        self,
        comparison: Comparison,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = on_timer,
    ) -> None:
        self._feed = CompareFeed(comparison)
        # locks: while a message is made and sent
        self._order = threading.Lock()
        self._throttle = Throttle(self._update, INTERVAL, clock=clock, later=later)
        first = self._feed.snapshot()
        super().__init__(opening={"content": first.content, "buffers": first.buffers})
        self.on_msg(lambda *_: self._throttle.poke())  # a page said hello
        self._ends = [source.subscribe(self._throttle.poke) for source in _live(comparison.sources)]

    def close(self) -> None:
        """End the view."""
        for end in self._ends:
            end()
        self._throttle.close()
        with self._order:
            super().close()

    def _update(self) -> None:
        with self._order:
            if self.comm is not None:
                message = self._feed.snapshot()
                self.send(message.content, message.buffers)


def _live(sources: Sequence[object]) -> list[Source]:
    return [source for source in sources if isinstance(source, Source) and not source.status.state.ended]


def show(comparison: Comparison) -> bool:
    """Show a comparison live in the cell that runs now; False where none of its runs goes on."""
    from IPython.display import display

    running = _live(comparison.sources)
    if not running:
        return False
    view = CompareView(comparison)
    handle: Any = display(view, display_id=True)  # type: ignore[no-untyped-call]

    def replace() -> None:
        if not _live(running) and view.comm is not None:
            handle.update(comparison.bundle(), raw=True)
            view.close()

    throttle = Throttle(replace, 0.0)
    for source in running:
        source.subscribe(throttle.poke)
    throttle.poke()
    return True
