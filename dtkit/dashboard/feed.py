"""What a page is sent of a run: one snapshot, then changes only, numbered so that they apply in order.

Every message has a ``seq``. A *change* applies to the state that its ``base`` numbers and to no other; a
page that finds a gap (it was opened late, or its module was still loading) says hello, and the answer is a
*snapshot*, which any page may take at any time. All pages of one model get every message, so they stay in
step.

A change is bounded: at most ``CHANGE_BYTES`` of curves and ``CHANGE_EVENTS`` lines of log. What is left
over follows with the next (:attr:`Feed.pending`), oldest first, so nothing is lost and nothing is coarser
for it.

A message is JSON and five buffers, little-endian: the buckets of the curves; per rank loss, throughput and
memory; per bar of the time panel the seconds in each phase; the lines of single nodes among many, all of these
float32; and the boxes of the timeline, in uint16. What did not change since is empty. Numbers that people read are
formatted here, once; text is sent as text.

The node that somebody selected is kept here, so that all pages agree on it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting
from dtkit._util.guard import attempt
from dtkit.dashboard.fates import begun, follow
from dtkit.dashboard.glance import epoch, glance, tiles
from dtkit.dashboard.outliers import outliers
from dtkit.dashboard.remarks import remarks
from dtkit.dashboard.series import CHARTS, MAX_LINES, Curves, overall_rate
from dtkit.dashboard.spotlight import CHARTS as SPOT_CHARTS
from dtkit.dashboard.spotlight import Spotlight
from dtkit.dashboard.strip import KINDS, strip
from dtkit.dashboard.stuck import halted
from dtkit.dashboard.timing import PHASES, bars

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.fates import Lost
    from dtkit.dashboard.source import Source
    from dtkit.dashboard.strip import Strip
    from dtkit.types import Event, NodeInfo

CHANGE_BYTES = 4800
CHANGE_EVENTS = 12
LOG = 200
"""Lines of the log that a page keeps."""
MARKS = 60
"""Events that a page marks on the step axis."""
MARKED = frozenset({"pause", "resume", "lr", "error", "stop", "stuck", "lost", "repair", "save"})
"""The kinds of events that get a mark; the others are in the log alone."""
STRIP_S = 1.0
"""Seconds between two timelines: its boxes are most of the bytes, and it is looked at and not watched."""


@dataclasses.dataclass(frozen=True)
class Message:
    """JSON-able content and its buffers."""

    content: dict[str, Any]
    buffers: list[bytes]


class Feed:
    """Composes messages about a source. Not thread-safe: one caller at a time."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._ranks = begun(source)  # a run that goes on without some had lines of theirs
        self._curves = Curves(CHARTS, self._ranks)
        self._limit = max(1, CHANGE_BYTES // (12 * self._curves.columns))  # a bucket: three float32 a column
        self._spotlight = Spotlight(self._ranks) if self._ranks > MAX_LINES else None
        self._seq = self._events = self._evaluations = self._followed = 0
        self._packed: tuple[int, int | None] = -1, None  # of how many rows the last message was, and who was selected
        self._lost: Lost = {}
        self._nodes: list[NodeInfo] = []
        self._world = self._ranks
        self._strip_at, self._strip_step, self._strip_known = -math.inf, -1, False
        self.selected: int | None = None
        """The node that is highlighted."""
        self.offers: Sequence[str] = ()
        """The controls that not every run has."""
        self.effect: dict[str, Any] = {"count": 0, "text": ""}
        """How many commands took effect, and the last of them in words."""

    def __len__(self) -> int:
        """How many nodes it is about."""
        return self._ranks

    @property
    def seq(self) -> int:
        """The number of the last message."""
        return self._seq

    @property
    def pending(self) -> bool:
        """Whether the last change left something over for the next."""
        late = self._strip_known and self._strip_step != self._source.status.step
        return late or self._curves.pending or self._events < len(self._source.history.events)

    def snapshot(self) -> Message:
        """Everything that a page needs, complete and down-sampled."""
        source = self._source
        self._read()
        self._evaluations, self._events = len(source.history.evaluations), len(source.history.events)
        events = source.history.events[: self._events]
        content = self._now("snapshot") | {
            "head": self._head(),
            "nodes": self._told_nodes(),
            "events": [_line(event) for event in events[-LOG:]],
            "marks": [_line(event) for event in events if event.kind in MARKED][-MARKS:],
            "evaluations": self._evaluated(max(0, self._evaluations - LOG)),
        }
        part = self._curves.take_all()
        return self._pack(content, part.values, part.width, part.origin, part.first)

    def change(self) -> Message:
        """What changed since the last message."""
        history = self._source.history
        self._read()
        content = self._now("change")
        if self._nodes != list(self._source.nodes):  # an engine was replaced, or left out
            content["nodes"] = self._told_nodes()
        if self._world != self._source.spec.world_size:
            content["head"] = self._head()
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

    def _read(self) -> None:
        """Take in what the history gained."""
        history = self._source.history
        self._curves.update(history)
        if self._spotlight is not None:
            self._spotlight.update(history)
        events = history.events[self._followed :]
        self._followed += len(events)
        self._lost = follow(self._lost, events)

    def _now(self, kind: str) -> dict[str, Any]:
        """What every message has: the state and the figures of now."""
        source, status = self._source, self._source.status
        base, self._seq = self._seq, self._seq + 1
        stuck = halted(source)
        self._glance = glance(source.history, self._ranks, self._lost)
        halt = [] if stuck is None or stuck.rank is None else [stuck.rank]
        self._outliers = outliers(self._glance, {*self._lost, *halt})
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
                "message": "" if stuck else formatting.plain(status.message),  # a remark says it, with the same words
            },
            "lr": _finite(source.lr),
            "tiles": [dataclasses.asdict(tile) for tile in tiles(source, self._glance)],
            "error": None if error is None else _error(error),
            "remarks": [dataclasses.asdict(remark) for remark in remarks(source, self._lost)],
            "nodes_now": {
                "world": source.spec.world_size,
                "lost": sorted(self._lost),
                "stuck": halt,
                "outliers": self._outliers,
                "slow": list(self._glance.timing.straggler.ranks) if self._glance.timing.straggler else [],
                "slowed": sorted(source.delay_factors),
            },
            "selected": self.selected,
            "effect": self.effect,
        }

    def _told_nodes(self) -> list[dict[str, Any]]:
        self._nodes = list(self._source.nodes)
        return [dataclasses.asdict(node) for node in self._nodes]

    def _head(self) -> dict[str, Any]:
        spec = self._source.spec
        self._world = spec.world_size
        return {
            "name": formatting.plain(spec.name, 80),
            "strategy": formatting.plain(spec.strategy, 120),
            "ranks": self._ranks,
            "overall": overall_rate(spec.world_size, self._source.history.ranks_per_replica, self._ranks),
            "batch": spec.batch_size,
            "charts": {layout.name: dataclasses.asdict(layout) for layout in self._curves.layouts},
            "columns": self._curves.columns,
            "phases": PHASES,
            "kinds": KINDS,
            "offers": list(self.offers),
        }

    def _evaluated(self, start: int) -> list[dict[str, Any]]:
        """Evaluations from `start` on, at most a page's worth."""
        return [
            {"step": e.step, "values": {formatting.plain(k, 40): _finite(v) for k, v in e.values.items()}}
            for e in self._source.history.evaluations[start : start + LOG]
        ]

    def _pack(self, content: dict[str, Any], values: np.ndarray, width: int, origin: int, first: int) -> Message:
        content["curves"] = {"width": width, "origin": origin, "first": first, "flat": values.ndim == 2}
        content["curves"]["buckets"] = len(values)
        rows = len(self._source.history)
        fresh = (rows, self.selected) != self._packed or content["kind"] == "snapshot"
        self._packed = rows, self.selected
        by_rank = self._glance.by_rank if fresh else self._glance.by_rank[:0]
        parts = self._bars(content) if fresh else np.empty(0)
        lines = self._spot(content)
        floats = [np.ascontiguousarray(a, "<f4").tobytes() for a in (values, by_rank, parts, lines)]
        return Message(content, [*floats, self._strip(content).astype("<u2").tobytes()])

    def _spot(self, content: dict[str, Any]) -> np.ndarray:
        """Single nodes among many: the words into `content`; returns their means, (buckets, charts, ranks)."""
        if self._spotlight is None:
            return np.empty(0)
        wanted = list(dict.fromkeys([*self._outliers, *([] if self.selected is None else [self.selected])]))
        found = self._spotlight.take(wanted, whole=content["kind"] == "snapshot")
        if found is None:
            return np.empty(0)
        content["spot"] = {
            "ranks": found.ranks,
            "width": found.width,
            "origin": found.origin,
            "first": found.first,
            "charts": [chart.name for chart in SPOT_CHARTS],
            "buckets": len(found.means),
        }
        return found.means

    def _strip(self, content: dict[str, Any]) -> np.ndarray:
        """The timeline: the words into `content`; returns its boxes, and then the plan's, as (boxes, 5).

        That is the rank's place, begin and end in 1/60,000 of the step, the kind + 16 times (micro-batch + 1), and the
        stage + 1.
        """
        now, step = self._clock(), self._source.status.step
        whole = content["kind"] == "snapshot"
        if not whole and (step == self._strip_step or now - self._strip_at < STRIP_S):
            return np.empty(0)
        wanted = [self.selected] if self.selected is not None else []
        self._strip_at, self._strip_step = now, step

        def draw() -> np.ndarray:
            found = strip(getattr(self._source, "timeline", None), [*wanted, *self._outliers])
            self._strip_known = found is not None
            return np.empty(0) if found is None else self._pack_strip(content, found)

        def say(error: Exception) -> np.ndarray:
            content["strip"] = {"error": _error(error)}
            return np.empty(0)

        return attempt(draw, say)

    def _pack_strip(self, content: dict[str, Any], found: Strip) -> np.ndarray:
        content["strip"] = {
            "error": None,
            "step": found.step,
            "seconds": found.seconds,
            "ranks": found.ranks,
            "boxes": len(found.boxes),
            "piped": found.piped,
            "note": found.note,
        }
        return np.concatenate([_boxes(found, found.boxes), _boxes(found, found.plan)])

    def _bars(self, content: dict[str, Any]) -> np.ndarray:
        """Where a step's time goes: the words into `content`; returns the bars' seconds, (bars, phases)."""
        parts = self._glance.timing
        shown = bars(parts, self.selected) if parts.measured else []
        content["time"] = {
            "steps": parts.steps,
            "bars": [{"rank": bar.rank, "label": bar.label, "slow": bar.slow} for bar in shown],
            "straggler": None if parts.straggler is None else parts.straggler.text,
        }
        return np.array([bar.seconds for bar in shown])


def _boxes(found: Strip, boxes: np.ndarray) -> np.ndarray:
    """Boxes of a timeline as five uint16 each."""
    packed = np.zeros((len(boxes), 5), "u2")
    packed[:, 0] = np.searchsorted(found.ranks, boxes["rank"])
    for column, name in ((1, "begin"), (2, "end")):
        packed[:, column] = np.clip(boxes[name] / found.seconds * 60_000, 0, 65_535)
    packed[:, 3] = boxes["kind"] + 16 * np.clip(boxes["micro_batch"] + 1, 0, 4095)
    packed[:, 4] = boxes["stage"] + 1
    return packed


def _line(event: Event) -> dict[str, Any]:
    """One event as a line of the log. Text stays text: the page never reads it as markup."""
    return {
        "step": event.step,
        "kind": event.kind,
        "text": formatting.plain(event.text, 200),
        "time": event.time,
        "rank": event.rank,
    }


def _error(error: BaseException) -> str:
    """The first lines of an error, for the banner; the whole of it is raised where the user waits."""
    lines = str(error).strip().splitlines() or [""]
    text = "\n".join(formatting.plain(line) for line in lines[:6])
    return f"{type(error).__name__}: {text}"[:1000]


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
