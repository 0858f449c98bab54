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
from dtkit.dashboard.live.bundle import bundle_modules
from dtkit.dashboard.live.widget import STATIC_FOLDER
from dtkit.dashboard.run_view import RunView
from dtkit.dashboard.summary.curves import LOSS, Chart, Curves
from dtkit.dashboard.throttle import Throttle, start_timer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.compare import Comparison
    from dtkit.dashboard.live.messages import Message

NUM_BUCKETS = 256
UPDATE_INTERVAL_S = 0.5
_MEAN_LOSS = Chart("loss", None, LOSS.from_totals)


class ComparisonMessageBuilder:
    """Composes messages about a comparison. Not thread-safe: one caller at a time."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._curves = [Curves((_MEAN_LOSS,), 1, NUM_BUCKETS) for _ in comparison.histories]
        self._seq = 0

    def build_snapshot(self) -> Message:
        """Everything that a page needs, in the form of a run's snapshot, so that the same store takes it."""
        from dtkit.dashboard.live.messages import Message

        self._seq += 1
        values, width, origin = self._align_curves()
        runs, steps = self._build_rows(), [history.totals()["step"][-1:] for history in self._comparison.histories]
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

    def _align_curves(self) -> tuple[np.ndarray, int, int]:
        """(buckets, runs + 1, 3), with one width and one origin; the last column, of all nodes, is empty here."""
        for curves, history in zip(self._curves, self._comparison.histories, strict=True):
            curves.update(history)
        width = max(curves.width for curves in self._curves)
        for curves in self._curves:
            curves.widen(width)
        parts = [curves.get_all() for curves in self._curves]
        begun = [part.origin for part in parts if len(part.values)]
        origin = min(begun, default=0)
        places = [(part.origin - origin) // width for part in parts]
        length = max(place + len(part.values) for place, part in zip(places, parts, strict=True))
        values = np.full((max(0, length), len(parts) + 1, 3), np.nan, "f4")
        for k, (place, part) in enumerate(zip(places, parts, strict=True)):
            if len(part.values):
                values[place : place + len(part.values), k] = part.values[:, 0]
        return values, width, origin

    def _build_rows(self) -> list[dict[str, str]]:
        """A row of the table each: what people read, as text."""
        sources = self._comparison.runs
        return [
            {
                "label": row.label,
                "state": source.status.state.value if isinstance(source, RunView) else "kept",
                "steps": f"{row.steps:,}",
                "loss": formatting.format_loss(row.loss) if row.steps else formatting.UNKNOWN,
                "rate": formatting.format_rate(row.samples_per_s),
                "sent": formatting.format_bytes(row.sent_bytes),
            }
            for row, source in zip(self._comparison.rows, sources, strict=True)
        ]


class ComparisonWidget(anywidget.AnyWidget):
    """The live view of a comparison; closes with :meth:`close`."""

    _esm = bundle_modules(STATIC_FOLDER / "compare.js")
    _css = STATIC_FOLDER / "dashboard.css"

    opening = traitlets.Dict().tag(sync=True)
    """The first message: ``{"content": ..., "buffers": [...]}``."""

    def __init__(
        self,
        comparison: Comparison,
        *,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], None] = start_timer,
    ) -> None:
        self._message_builder = ComparisonMessageBuilder(comparison)
        # locks: while a message is made and sent
        self._send_lock = threading.Lock()
        self._throttle = Throttle(self._send_update, UPDATE_INTERVAL_S, clock=clock, call_later=call_later)
        first = self._message_builder.build_snapshot()
        super().__init__(opening={"content": first.content, "buffers": first.buffers})
        self.on_msg(lambda *_: self._throttle.trigger())  # a page said hello
        self._unsubscribers = [source.subscribe(self._throttle.trigger) for source in _select_running(comparison.runs)]

    def close(self) -> None:
        """End the view."""
        for end in self._unsubscribers:
            end()
        self._throttle.close()
        with self._send_lock:
            super().close()

    def _send_update(self) -> None:
        with self._send_lock:
            if self.comm is not None:
                message = self._message_builder.build_snapshot()
                self.send(message.content, message.buffers)


def _select_running(runs: Sequence[object]) -> list[RunView]:
    return [source for source in runs if isinstance(source, RunView) and not source.status.state.has_ended]


def try_show(comparison: Comparison) -> bool:
    """Show a comparison live in the cell that runs now; False where none of its runs goes on."""
    from IPython.display import display

    running = _select_running(comparison.runs)
    if not running:
        return False
    view = ComparisonWidget(comparison)
    handle: Any = display(view, display_id=True)  # type: ignore[no-untyped-call]

    def replace() -> None:
        if not _select_running(running) and view.comm is not None:
            handle.update(comparison.make_mime_bundle(), raw=True)
            view.close()

    throttle = Throttle(replace, 0.0)
    for source in running:
        source.subscribe(throttle.trigger)
    throttle.trigger()
    return True
