"""The live view of a comparison: one chart with a shared axis, and a table that is its legend.

All runs have buckets of the same width, so that a point of the axis means the same in each. Each message has the whole
view: a kilobyte for each run, twice a second at most. The view stays after the runs' end; the figure is in the saved
notebook.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import anywidget
import numpy as np
import traitlets

from dtkit._util import formatting, timeouts
from dtkit.dashboard.live.bundle import bundle_modules
from dtkit.dashboard.live.messages import Message
from dtkit.dashboard.live.placement import make_place_name, place_view
from dtkit.dashboard.live.widget import STATIC_FOLDER
from dtkit.dashboard.summary.curves import LOSS, Chart, Curves
from dtkit.dashboard.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.summary.comparison import ComparisonRow
    from dtkit.history.history import History
    from dtkit.types import Status

NUM_BUCKETS = 256
_MEAN_LOSS = Chart("loss", None, LOSS.from_totals)


class ComparisonView(Protocol):
    """All that the live view reads of a comparison."""

    @property
    def histories(self) -> Sequence[History]:
        """The histories, in the order of the runs."""
        ...

    @property
    def runs(self) -> Sequence[object]:
        """The runs, or the histories that were given."""
        ...

    @property
    def rows(self) -> list[ComparisonRow]:
        """A row for each run, as of now."""
        ...

    def make_mime_bundle(self) -> dict[str, str]:
        """Return the output for a saved notebook."""
        ...


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


class ComparisonMessageBuilder:
    """Builds messages about a comparison. Not thread-safe: one caller at a time."""

    def __init__(self, comparison: ComparisonView) -> None:
        self._comparison = comparison
        self._curves = [Curves((_MEAN_LOSS,), 1, NUM_BUCKETS) for _ in comparison.histories]
        self._seq = 0

    def build_snapshot(self) -> Message:
        """Return everything that a page needs, in the form of a run's snapshot, so that the same store reads it."""
        self._seq += 1
        values, width, origin = self._align_curves()
        runs = self._build_rows()
        last_steps = [history.totals()["step"][-1:] for history in self._comparison.histories]
        step = int(max((steps[0] for steps in last_steps if len(steps)), default=0))
        is_running = any(run["state"] == "running" for run in runs)
        content: dict[str, Any] = {
            "kind": "snapshot",
            "seq": self._seq,
            "status": {"state": "running" if is_running else "ended", "step": step},
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
        content |= {name: [] for name in ("tiles", "notices", "nodes", "marks", "evaluations", "events")}
        return Message(content, [np.ascontiguousarray(values, "<f4").tobytes(), b""])

    def _align_curves(self) -> tuple[np.ndarray, int, int]:
        """Return values of shape (buckets, runs + 1, 3), with their width and origin; the last column is empty."""
        for curves, history in zip(self._curves, self._comparison.histories, strict=True):
            curves.update(history)
        width = max(curves.width for curves in self._curves)
        for curves in self._curves:
            curves.widen(width)
        parts = [curves.get_all() for curves in self._curves]
        origin = min((part.origin for part in parts if len(part.values)), default=0)
        starts = [(part.origin - origin) // width for part in parts]
        length = max(start + len(part.values) for start, part in zip(starts, parts, strict=True))
        values = np.full((max(0, length), len(parts) + 1, 3), np.nan, "f4")
        for k, (start, part) in enumerate(zip(starts, parts, strict=True)):
            if len(part.values):
                values[start : start + len(part.values), k] = part.values[:, 0]
        return values, width, origin

    def _build_rows(self) -> list[dict[str, str]]:
        """Return the rows of the table as text."""
        runs = self._comparison.runs
        return [
            {
                "label": row.label,
                "state": run.status.state.value if isinstance(run, ChangingRun) else "kept",
                "steps": f"{row.steps:,}",
                "loss": formatting.format_loss(row.loss) if row.steps else formatting.UNKNOWN,
                "rate": formatting.format_rate(row.samples_per_s),
                "sent": formatting.format_bytes(row.sent_bytes),
            }
            for row, run in zip(self._comparison.rows, runs, strict=True)
        ]


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
    """Show a comparison live in the current cell. Return False if none of its runs goes on."""
    running = _select_running(comparison.runs)
    if not running:
        return False
    view = place_view(ComparisonWidget(comparison), (comparison.make_mime_bundle(), {}))
    unsubscribers: list[Callable[[], None]] = []

    def draw_when_ended() -> None:
        if not _select_running(running):
            view.update((comparison.make_mime_bundle(), {}))
            throttle.close()
            for unsubscribe in unsubscribers:
                unsubscribe()

    throttle = Throttle(draw_when_ended, 0.0)
    unsubscribers += [run.subscribe(throttle.trigger) for run in running]
    throttle.trigger()
    return True
