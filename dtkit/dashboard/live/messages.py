"""What a page is sent of a run: one snapshot, then changes only, numbered so that they apply in order.

Every message has a ``seq``. A *change* applies to the state that its ``base`` numbers and to no other; a
page that finds a gap (it was opened late, or its module was still loading) says hello, and the answer is a
*snapshot*, which any page may take at any time. All pages of one model get every message, so they stay in
step.

A change is bounded: at most ``MAX_CHANGE_BYTES`` of curves and ``MAX_CHANGE_EVENTS`` lines of log. What is left
over follows with the next (:attr:`MessageBuilder.pending`), oldest first, so nothing is lost and nothing is coarser
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
from dtkit._util.guard import run_guarded
from dtkit.dashboard.summary.curves import CHARTS, MAX_NODE_LINES, Curves, format_overall_label
from dtkit.dashboard.summary.lost_nodes import count_initial_nodes, update_lost_nodes
from dtkit.dashboard.summary.metrics import build_tiles, compute_epoch, compute_run_metrics
from dtkit.dashboard.summary.node_series import NODE_CHARTS as SPOT_CHARTS
from dtkit.dashboard.summary.node_series import NodeSeries
from dtkit.dashboard.summary.notices import collect_notices
from dtkit.dashboard.summary.outliers import find_outliers
from dtkit.dashboard.summary.stall import find_stall
from dtkit.dashboard.summary.step_strip import BOX_KINDS, make_step_strip
from dtkit.dashboard.summary.timing import PHASES, select_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.lost_nodes import LostNodes
    from dtkit.dashboard.summary.step_strip import StepStrip
    from dtkit.types import Event, NodeInfo

MAX_CHANGE_BYTES = 4800
MAX_CHANGE_EVENTS = 12
MAX_LOG_LINES = 200
"""Lines of the log that a page keeps."""
MAX_MARKS = 60
"""Events that a page marks on the step axis."""
MARKED_EVENTS = frozenset({"pause", "resume", "lr", "error", "stop", "stuck", "lost", "repair", "save"})
"""The kinds of events that get a mark; the others are in the log alone."""
STRIP_INTERVAL_S = 1.0
"""Seconds between two timelines: its boxes are most of the bytes, and it is looked at and not watched."""


@dataclasses.dataclass(frozen=True)
class Message:
    """JSON-able content and its buffers."""

    content: dict[str, Any]
    buffers: list[bytes]


class MessageBuilder:
    """Composes messages about a source. Not thread-safe: one caller at a time."""

    def __init__(self, run: RunView, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._num_ranks = count_initial_nodes(run)  # a run that goes on without some had lines of theirs
        self._curves = Curves(CHARTS, self._num_ranks)
        self._max_change_buckets = max(
            1, MAX_CHANGE_BYTES // (12 * self._curves.num_columns)
        )  # a bucket: three float32 a column
        self._node_series = NodeSeries(self._num_ranks) if self._num_ranks > MAX_NODE_LINES else None
        self._seq = self._num_events_sent = self._num_evaluations_sent = self._num_events_read = 0
        self._packed_state: tuple[int, int | None] = (
            -1,
            None,
        )  # of how many rows the last message was, and who was selected
        self._lost_nodes: LostNodes = {}
        self._sent_nodes: list[NodeInfo] = []
        self._sent_world_size = self._num_ranks
        self._strip_sent_at, self._strip_step, self._has_strip = -math.inf, -1, False
        self.selected_rank: int | None = None
        """The node that is highlighted."""
        self.extra_controls: Sequence[str] = ()
        """The controls that not every run has."""
        self.last_effect: dict[str, Any] = {"count": 0, "text": ""}
        """How many commands took effect, and the last of them in words."""

    def __len__(self) -> int:
        """How many nodes it is about."""
        return self._num_ranks

    @property
    def seq(self) -> int:
        """The number of the last message."""
        return self._seq

    @property
    def has_pending(self) -> bool:
        """Whether the last change left something over for the next."""
        late = self._has_strip and self._strip_step != self._run.status.step
        return late or self._curves.has_changes or self._num_events_sent < len(self._run.history.events)

    def build_snapshot(self) -> Message:
        """Everything that a page needs, complete and down-sampled."""
        source = self._run
        self._read_history()
        self._num_evaluations_sent, self._num_events_sent = len(source.history.evaluations), len(source.history.events)
        events = source.history.events[: self._num_events_sent]
        content = self._build_current_state("snapshot") | {
            "head": self._build_header(),
            "nodes": self._build_nodes(),
            "events": [_build_log_line(event) for event in events[-MAX_LOG_LINES:]],
            "marks": [_build_log_line(event) for event in events if event.kind in MARKED_EVENTS][-MAX_MARKS:],
            "evaluations": self._build_evaluations(max(0, self._num_evaluations_sent - MAX_LOG_LINES)),
        }
        part = self._curves.take_all()
        return self._pack_message(content, part.values, part.width, part.origin, part.first)

    def build_change(self) -> Message:
        """What changed since the last message."""
        history = self._run.history
        self._read_history()
        content = self._build_current_state("change")
        if self._sent_nodes != list(self._run.nodes):  # an engine was replaced, or left out
            content["nodes"] = self._build_nodes()
        if self._sent_world_size != self._run.spec.world_size:
            content["head"] = self._build_header()
        if self._num_events_sent < len(history.events):
            # A flood of prints is cut to what the page would keep anyway.
            self._num_events_sent = max(self._num_events_sent, len(history.events) - MAX_LOG_LINES)
            new = history.events[self._num_events_sent : self._num_events_sent + MAX_CHANGE_EVENTS]
            self._num_events_sent += len(new)
            content["events"] = [_build_log_line(event) for event in new]
        if self._num_evaluations_sent < len(history.evaluations):
            content["evaluations"] = self._build_evaluations(self._num_evaluations_sent)
            self._num_evaluations_sent += len(content["evaluations"])
        part = self._curves.take_changes(self._max_change_buckets)
        values = part.values[..., 1] if part.is_flat else part.values
        return self._pack_message(content, values, part.width, part.origin, part.first)

    # -- parts of a message ---------------------------------------------------------------------------

    def _read_history(self) -> None:
        """Take in what the history gained."""
        history = self._run.history
        self._curves.update(history)
        if self._node_series is not None:
            self._node_series.update(history)
        events = history.events[self._num_events_read :]
        self._num_events_read += len(events)
        self._lost_nodes = update_lost_nodes(self._lost_nodes, events)

    def _build_current_state(self, kind: str) -> dict[str, Any]:
        """What every message has: the state and the figures of now."""
        source, status = self._run, self._run.status
        base, self._seq = self._seq, self._seq + 1
        stuck = find_stall(source)
        self._metrics = compute_run_metrics(source.history, self._num_ranks, self._lost_nodes)
        halt = [] if stuck is None or stuck.rank is None else [stuck.rank]
        self._outliers = find_outliers(self._metrics, {*self._lost_nodes, *halt})
        at, of = compute_epoch(source.spec, status.step)
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
                "elapsed": _replace_nonfinite(status.elapsed_s),
                "remaining": _replace_nonfinite(status.remaining_s),
                "message": ""
                if stuck
                else formatting.sanitize_text(status.message),  # a remark says it, with the same words
            },
            "lr": _replace_nonfinite(source.lr),
            "tiles": [dataclasses.asdict(tile) for tile in build_tiles(source, self._metrics)],
            "error": None if error is None else _format_error(error),
            "remarks": [dataclasses.asdict(remark) for remark in collect_notices(source, self._lost_nodes)],
            "nodes_now": {
                "world": source.spec.world_size,
                "lost": sorted(self._lost_nodes),
                "stuck": halt,
                "outliers": self._outliers,
                "slow": list(self._metrics.timing.straggler.ranks) if self._metrics.timing.straggler else [],
                "slowed": sorted(source.delay_factors),
            },
            "selected": self.selected_rank,
            "effect": self.last_effect,
        }

    def _build_nodes(self) -> list[dict[str, Any]]:
        self._sent_nodes = list(self._run.nodes)
        return [dataclasses.asdict(node) for node in self._sent_nodes]

    def _build_header(self) -> dict[str, Any]:
        spec = self._run.spec
        self._sent_world_size = spec.world_size
        return {
            "name": formatting.sanitize_text(spec.name, 80),
            "strategy": formatting.sanitize_text(spec.strategy, 120),
            "ranks": self._num_ranks,
            "overall": format_overall_label(spec.world_size, self._run.history.ranks_per_replica, self._num_ranks),
            "batch": spec.batch_size,
            "charts": {layout.name: dataclasses.asdict(layout) for layout in self._curves.chart_layouts},
            "columns": self._curves.num_columns,
            "phases": PHASES,
            "kinds": BOX_KINDS,
            "offers": list(self.extra_controls),
        }

    def _build_evaluations(self, start: int) -> list[dict[str, Any]]:
        """Evaluations from `start` on, at most a page's worth."""
        return [
            {
                "step": e.step,
                "values": {formatting.sanitize_text(k, 40): _replace_nonfinite(v) for k, v in e.values.items()},
            }
            for e in self._run.history.evaluations[start : start + MAX_LOG_LINES]
        ]

    def _pack_message(
        self, content: dict[str, Any], values: np.ndarray, width: int, origin: int, first: int
    ) -> Message:
        content["curves"] = {"width": width, "origin": origin, "first": first, "flat": values.ndim == 2}
        content["curves"]["buckets"] = len(values)
        rows = len(self._run.history)
        fresh = (rows, self.selected_rank) != self._packed_state or content["kind"] == "snapshot"
        self._packed_state = rows, self.selected_rank
        by_rank = self._metrics.by_rank if fresh else self._metrics.by_rank[:0]
        parts = self._pack_phase_bars(content) if fresh else np.empty(0)
        lines = self._pack_node_series(content)
        floats = [np.ascontiguousarray(a, "<f4").tobytes() for a in (values, by_rank, parts, lines)]
        return Message(content, [*floats, self._pack_strip_if_due(content).astype("<u2").tobytes()])

    def _pack_node_series(self, content: dict[str, Any]) -> np.ndarray:
        """Single nodes among many: the words into `content`; returns their means, (buckets, charts, ranks)."""
        if self._node_series is None:
            return np.empty(0)
        wanted = list(dict.fromkeys([*self._outliers, *([] if self.selected_rank is None else [self.selected_rank])]))
        found = self._node_series.take_changes(wanted, full=content["kind"] == "snapshot")
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

    def _pack_strip_if_due(self, content: dict[str, Any]) -> np.ndarray:
        """The timeline: the words into `content`; returns its boxes, and then the plan's, as (boxes, 5).

        That is the rank's place, begin and end in 1/60,000 of the step, the kind + 16 times (micro-batch + 1), and the
        stage + 1.
        """
        now, step = self._clock(), self._run.status.step
        whole = content["kind"] == "snapshot"
        if not whole and (step == self._strip_step or now - self._strip_sent_at < STRIP_INTERVAL_S):
            return np.empty(0)
        wanted = [self.selected_rank] if self.selected_rank is not None else []
        self._strip_sent_at, self._strip_step = now, step

        def draw() -> np.ndarray:
            found = make_step_strip(getattr(self._run, "timeline", None), [*wanted, *self._outliers])
            self._has_strip = found is not None
            return np.empty(0) if found is None else self._pack_strip(content, found)

        def say(error: Exception) -> np.ndarray:
            content["strip"] = {"error": _format_error(error)}
            return np.empty(0)

        return run_guarded(draw, say)

    def _pack_strip(self, content: dict[str, Any], step_strip: StepStrip) -> np.ndarray:
        content["strip"] = {
            "error": None,
            "step": step_strip.step,
            "seconds": step_strip.duration_s,
            "ranks": step_strip.ranks,
            "boxes": len(step_strip.boxes),
            "piped": step_strip.is_pipelined,
            "note": step_strip.note,
        }
        return np.concatenate([_pack_boxes(step_strip, step_strip.boxes), _pack_boxes(step_strip, step_strip.plan)])

    def _pack_phase_bars(self, content: dict[str, Any]) -> np.ndarray:
        """Where a step's time goes: the words into `content`; returns the bars' seconds, (bars, phases)."""
        parts = self._metrics.timing
        shown = select_bars(parts, self.selected_rank) if parts.is_measured else []
        content["time"] = {
            "steps": parts.num_steps,
            "bars": [{"rank": bar.rank, "label": bar.label, "slow": bar.is_straggler} for bar in shown],
            "straggler": None if parts.straggler is None else parts.straggler.text,
        }
        return np.array([bar.seconds for bar in shown])


def _pack_boxes(step_strip: StepStrip, boxes: np.ndarray) -> np.ndarray:
    """Boxes of a timeline as five uint16 each."""
    packed = np.zeros((len(boxes), 5), "u2")
    packed[:, 0] = np.searchsorted(step_strip.ranks, boxes["rank"])
    for column, name in ((1, "begin"), (2, "end")):
        packed[:, column] = np.clip(boxes[name] / step_strip.duration_s * 60_000, 0, 65_535)
    packed[:, 3] = boxes["kind"] + 16 * np.clip(boxes["micro_batch"] + 1, 0, 4095)
    packed[:, 4] = boxes["stage"] + 1
    return packed


def _build_log_line(event: Event) -> dict[str, Any]:
    """One event as a line of the log. Text stays text: the page never reads it as markup."""
    return {
        "step": event.step,
        "kind": event.kind,
        "text": formatting.sanitize_text(event.text, 200),
        "time": event.time,
        "rank": event.rank,
    }


def _format_error(error: BaseException) -> str:
    """The first lines of an error, for the banner; the whole of it is raised where the user waits."""
    lines = str(error).strip().splitlines() or [""]
    text = "\n".join(formatting.sanitize_text(line) for line in lines[:6])
    return f"{type(error).__name__}: {text}"[:1000]


def _replace_nonfinite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
