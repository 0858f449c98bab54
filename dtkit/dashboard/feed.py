"""What a page is sent of a run: one snapshot, then changes only, numbered so that they apply in order.

Every message has a ``seq``. A *change* applies to the state that its ``base`` numbers and to no other; a
page that finds a gap (it was opened late, or its module was still loading) says hello, and the answer is a
*snapshot*, which any page may take at any time. All pages of one model get every message, so they stay in
step.

A change is bounded: at most ``CHANGE_BYTES`` of curves and ``CHANGE_EVENTS`` lines of log. What is left
over follows with the next (:attr:`Feed.pending`), oldest first, so nothing is lost and nothing is coarser
for it.

A message is JSON and three buffers of little-endian float32: the buckets of the curves; per rank loss,
throughput and memory; and per bar of the time panel the seconds in each phase. The last two are empty where
no step was taken since. Numbers that people read are formatted here, once; text is sent as text.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit import units
from dtkit.dashboard.glance import epoch, glance, tiles
from dtkit.dashboard.remarks import remarks
from dtkit.dashboard.series import CHARTS, Curves, overall_rate
from dtkit.dashboard.timing import PHASES, bars

if TYPE_CHECKING:
    from dtkit.dashboard.source import Source
    from dtkit.records import Event

CHANGE_BYTES = 4800
CHANGE_EVENTS = 12
LOG = 200
"""Lines of the log that a page keeps."""
MARKS = 60
"""Events that a page marks on the step axis."""
MARKED = frozenset({"pause", "resume", "lr", "error", "stop"})
"""The kinds of events that get a mark; the others are in the log alone."""


@dataclasses.dataclass(frozen=True)
class Message:
    """JSON-able content and its buffers."""

    content: dict[str, Any]
    buffers: list[bytes]


class Feed:
    """Composes messages about a source. Not thread-safe: one caller at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ranks = source.spec.world_size
        self._curves = Curves(CHARTS, self._ranks)
        self._limit = max(1, CHANGE_BYTES // (12 * self._curves.columns))  # a bucket: three float32 a column
        self._seq = self._events = self._evaluations = 0
        self._rows = -1

    @property
    def seq(self) -> int:
        """The number of the last message."""
        return self._seq

    @property
    def pending(self) -> bool:
        """Whether the last change left something over for the next."""
        return self._curves.pending or self._events < len(self._source.history.events)

    def snapshot(self) -> Message:
        """Everything that a page needs, complete and down-sampled."""
        source = self._source
        self._curves.update(source.history)
        self._evaluations, self._events = len(source.history.evaluations), len(source.history.events)
        events = source.history.events[: self._events]
        content = self._now("snapshot") | {
            "head": self._head(),
            "nodes": [dataclasses.asdict(node) for node in source.nodes],
            "events": [_line(event) for event in events[-LOG:]],
            "marks": [_line(event) for event in events if event.kind in MARKED][-MARKS:],
            "evaluations": self._evaluated(max(0, self._evaluations - LOG)),
        }
        part = self._curves.take_all()
        return self._pack(content, part.values, part.width, part.origin, part.first)

    def change(self) -> Message:
        """What changed since the last message."""
        history = self._source.history
        self._curves.update(history)
        content = self._now("change")
        if self._events < len(history.events):
            # A flood of prints is cut to what the page would keep anyway.
            self._events = max(self._events, len(history.events) - LOG)
            new = history.events[self._events : self._events + CHANGE_EVENTS]
            self._events += len(new)
            content["events"] = [_line(event) for event in new]
        if self._evaluations < len(history.evaluations):
            content["evaluations"] = self._evaluated(self._evaluations)
            self._evaluations += len(content["evaluations"])
        part = self._curves.take(self._limit)
        values = part.values[..., 1] if part.flat else part.values
        return self._pack(content, values, part.width, part.origin, part.first)

    # -- parts of a message ---------------------------------------------------------------------------

    def _now(self, kind: str) -> dict[str, Any]:
        """What every message has: the state and the figures of now."""
        source, status = self._source, self._source.status
        base, self._seq = self._seq, self._seq + 1
        self._glance = glance(source.history, self._ranks)
        at, of = epoch(source.spec, status.step)
        error = source.exception
        return {
            "kind": kind,
            "seq": self._seq,
            "base": base,
            "status": {
                "state": status.state.value,
                "step": status.step,
                "steps": status.steps,
                "epoch": at,
                "epochs": of,
                "elapsed": _finite(status.elapsed_s),
                "remaining": _finite(status.remaining_s),
                "message": units.plain(status.message),
            },
            "lr": _finite(source.lr),
            "tiles": [dataclasses.asdict(tile) for tile in tiles(source, self._glance)],
            "error": None if error is None else _error(error),
            "remarks": [dataclasses.asdict(remark) for remark in remarks(source)],
        }

    def _head(self) -> dict[str, Any]:
        spec = self._source.spec
        return {
            "name": units.plain(spec.name, 80),
            "strategy": units.plain(spec.strategy, 120),
            "ranks": self._ranks,
            "overall": overall_rate(self._ranks, self._source.history.copies),
            "batch": spec.batch_size,
            "charts": {layout.name: dataclasses.asdict(layout) for layout in self._curves.layouts},
            "columns": self._curves.columns,
            "phases": PHASES,
        }

    def _evaluated(self, start: int) -> list[dict[str, Any]]:
        """Evaluations from `start` on, at most a page's worth."""
        return [
            {"step": e.step, "values": {units.plain(k, 40): _finite(v) for k, v in e.values.items()}}
            for e in self._source.history.evaluations[start : start + LOG]
        ]

    def _pack(self, content: dict[str, Any], values: np.ndarray, width: int, origin: int, first: int) -> Message:
        content["curves"] = {"width": width, "origin": origin, "first": first, "flat": values.ndim == 2}
        content["curves"]["buckets"] = len(values)
        rows = len(self._source.history)
        fresh = rows != self._rows or content["kind"] == "snapshot"
        self._rows = rows
        by_rank = self._glance.by_rank if fresh else self._glance.by_rank[:0]
        parts = self._bars(content) if fresh else np.empty(0)
        return Message(content, [np.ascontiguousarray(a, "<f4").tobytes() for a in (values, by_rank, parts)])

    def _bars(self, content: dict[str, Any]) -> np.ndarray:
        """Where a step's time goes: the words into `content`; returns the bars' seconds, (bars, phases)."""
        parts = self._glance.timing
        shown = bars(parts) if parts.measured else []
        content["time"] = {
            "steps": parts.steps,
            "bars": [{"rank": bar.rank, "label": bar.label, "slow": bar.slow} for bar in shown],
            "straggler": None if parts.straggler is None else parts.straggler.text,
        }
        return np.array([bar.seconds for bar in shown])


def _line(event: Event) -> dict[str, Any]:
    """One event as a line of the log. Text stays text: the page never reads it as markup."""
    return {
        "step": event.step,
        "kind": event.kind,
        "text": units.plain(event.text, 200),
        "time": event.time,
        "rank": event.rank,
    }


def _error(error: BaseException) -> str:
    """The first lines of an error, for the banner; the whole of it is raised where the user waits."""
    lines = str(error).strip().splitlines() or [""]
    text = "\n".join(units.plain(line) for line in lines[:6])
    return f"{type(error).__name__}: {text}"[:1000]


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
