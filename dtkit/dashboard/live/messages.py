"""Messages to the page of a run: one snapshot, then changes, numbered so that they apply in order.

Every message has a ``seq``. A *change* applies only to the state that its ``base`` numbers. A page may find a gap,
because it was opened late or its module was still loading. It then sends hello and gets a *snapshot*. Any page may
apply a snapshot at any time. A *text* has no number: it replaces what is above the charts, and nothing else. All pages
of one model get every message, so they stay in step.

A change has at most ``MAX_CHANGE_BYTES`` of curves and ``MAX_CHANGE_EVENTS`` lines of the log. The rest follows with
the next change (:attr:`MessageBuilder.has_pending`), oldest first, so nothing is lost.

A message is JSON and five little-endian buffers. Four are float32: curves' buckets; loss, throughput and memory by
rank; seconds of each phase by bar; lines of single nodes. The fifth is uint16: the boxes of the timeline. A buffer
without changes is empty. Numbers that people read are formatted here.

The selected node is kept here, so that all pages agree on it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit._util import formatting, timeouts
from dtkit._util.guard import run_guarded
from dtkit.dashboard.live.evaluation_feed import EvaluationFeed
from dtkit.dashboard.live.head_numbers import describe_head
from dtkit.dashboard.live.last_effect import LastEffect
from dtkit.dashboard.live.last_numbers import read_last_numbers
from dtkit.dashboard.live.log_lines import MAX_MARKS, build_log_line, select_log_events
from dtkit.dashboard.live.pressing_state import PressingState
from dtkit.dashboard.live.step_parts import describe_bars, describe_range, describe_strip
from dtkit.dashboard.summary.curves import (
    CHARTS,
    MAX_NODE_LINES,
    Curves,
    count_replicas,
    format_overall_label,
)
from dtkit.dashboard.summary.ended_engines import describe_ended_engines, find_ended_engines
from dtkit.dashboard.summary.event_marks import MARKED_EVENTS
from dtkit.dashboard.summary.lost_nodes import count_initial_nodes, update_lost_nodes
from dtkit.dashboard.summary.metrics import compute_run_metrics
from dtkit.dashboard.summary.node_series import NODE_CHARTS, NodeSeries
from dtkit.dashboard.summary.notices import collect_notices, list_error_lines
from dtkit.dashboard.summary.outliers import find_outliers
from dtkit.dashboard.summary.spare_core import has_spare_core
from dtkit.dashboard.summary.stall import find_stall
from dtkit.dashboard.summary.steady_verdict import SteadyVerdict, is_at_rest
from dtkit.dashboard.summary.step_range import clip_range
from dtkit.dashboard.summary.step_strip import BOX_KINDS, read_step_strip
from dtkit.dashboard.summary.timing import PHASES, compute_range_timing
from dtkit.dashboard.summary.verdict import find_shown_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.curves import CurveBuckets
    from dtkit.dashboard.summary.lost_nodes import LostNodes
    from dtkit.types import Event, NodeInfo

MAX_CHANGE_BYTES = 4200
MAX_CHANGE_EVENTS = 12


@dataclasses.dataclass(frozen=True)
class Message:
    """Content for JSON, and buffers."""

    content: dict[str, Any]
    buffers: list[bytes]


class MessageBuilder:
    """Builds messages about a run. Not thread-safe: one caller at a time."""

    def __init__(self, run: RunView, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._num_ranks = count_initial_nodes(run)  # with lines of nodes that were left out
        self._curves = Curves(CHARTS, self._num_ranks)
        self._max_change_buckets = max(
            1, MAX_CHANGE_BYTES // (12 * self._curves.num_columns)
        )  # a bucket: three float32 a column
        self._node_series = NodeSeries(self._num_ranks) if self._num_ranks > MAX_NODE_LINES else None
        self._seq = self._num_events_read = self._num_returns_sent = 0
        self._evaluation_feed = EvaluationFeed(run.history)
        self._unsent_events: list[Event] = []
        self._packed_state: tuple[int, int | None] = (
            -1,
            None,
        )  # of how many rows the last message was, and who was selected
        self._lost_nodes: LostNodes = {}
        self._outliers: list[int] = []
        self._sent_nodes: list[NodeInfo] = []
        self._sent_world_size = self._num_ranks
        self._strip_sent_at, self._strip_step, self._has_strip = -math.inf, -1, False
        self._steady_verdict = SteadyVerdict()
        self._verdict_due_at = -math.inf
        self.selected_rank: int | None = None
        """The highlighted node."""
        self.ended_ranks: list[int] = []
        """Nodes whose engines had ended at the last message, since the run ended."""
        self.extra_controls: Sequence[str] = ()
        """Controls that not every run has."""
        self._last_effect = LastEffect(clock)
        self._pressing_state = PressingState(run)

    def __len__(self) -> int:
        """Return the number of nodes."""
        return self._num_ranks

    @property
    def seq(self) -> int:
        """Number of the last message."""
        return self._seq

    @property
    def has_pending(self) -> bool:
        """Whether the last change left data for the next one."""
        return self.pending_delay_s is not None

    @property
    def has_pending_curves(self) -> bool:
        """Whether the last change left curves for the next one."""
        return self._curves.has_changes

    @property
    def pending_delay_s(self) -> float | None:
        """In how many seconds data is due that the last change left for the next one. None without such data."""
        has_unread_events = self._num_events_read < len(self._run.history.events)
        if self._curves.has_changes or has_unread_events or self._unsent_events:
            return 0.0
        is_strip_late = self._has_strip and self._strip_step != self._run.status.step
        return max(0.0, self._strip_sent_at + timeouts.TIMELINE_INTERVAL_S - self._clock()) if is_strip_late else None

    @property
    def is_pressing(self) -> bool:
        """Whether the next message has what a person waits for, or must see at once."""
        return self._pressing_state.is_outdated(self._num_events_read, self._last_effect.count)

    def note_effect(self, text: str) -> None:
        """Put a command that took effect into the messages of the next seconds."""
        self._last_effect.note(text, self._run.history.events)

    def build_snapshot(self) -> Message:
        """Return everything that a page needs, downsampled."""
        self._num_returns_sent = len(self._run.history.returns)
        self._read_history()
        self._unsent_events = []
        events = self._run.history.events[: self._num_events_read]
        content = self._build_current_state("snapshot") | {
            "head": self._build_header(),
            "nodes": self._build_nodes(),
            "events": [build_log_line(event) for event in select_log_events(events)],
            "marks": [build_log_line(event) for event in events if event.kind in MARKED_EVENTS][-MAX_MARKS:],
            "evaluations": self._evaluation_feed.build_all(),
        }
        return self._pack_message(content, self._curves.take_all(), is_whole=True)

    def build_change(self) -> Message:
        """Return the changes since the last message; after the run went back to a snapshot, everything."""
        if len(self._run.history.returns) != self._num_returns_sent:  # a page can't take values out of its buckets
            return self.build_snapshot()
        self._read_history()
        content = self._build_current_state("change")
        if self._sent_nodes != list(self._run.nodes):  # an engine was replaced or left out
            content["nodes"] = self._build_nodes()
        if self._sent_world_size != self._run.spec.world_size:
            content["head"] = self._build_header()
        if self._unsent_events:
            unsent = select_log_events(self._unsent_events)
            self._unsent_events = unsent[MAX_CHANGE_EVENTS:]
            content["events"] = [build_log_line(event) for event in unsent[:MAX_CHANGE_EVENTS]]
        content |= self._evaluation_feed.build_changes()
        return self._pack_message(content, self._curves.take_changes(self._max_change_buckets))

    def build_rest(self) -> Message:
        """Return curves that the last change left, without the state, which takes most of a change's time."""
        content: dict[str, Any] = {"kind": "rest", "base": self._seq, "seq": self._seq + 1}
        self._seq += 1
        values = _describe_curves(content, self._curves.take_changes(self._max_change_buckets))
        return Message(content, [np.ascontiguousarray(values, "<f4").tobytes()])

    def build_text(self) -> Message:
        """Return the numbers above the charts, and those in their titles, which cost little. It applies at any time."""
        metrics = compute_run_metrics(self._run.history, self._num_ranks, self._lost_nodes)
        metrics = self._steady_verdict.match(metrics, self._clock())
        run, status = self._run, self._run.status
        numbers = read_last_numbers(run.history, status.step)
        newest = {"evaluations": self._evaluation_feed.build_newest(), "numbers": numbers}
        head = describe_head(run, status, metrics, self._lost_nodes)
        return Message({"kind": "text", **head, "newest": newest}, [])

    def build_detail(self, first_step: int, last_step: int) -> Message:
        """Return what a page shows of a range of steps: finer curves, the time of a step, and a timeline."""
        steps = clip_range(self._run.history, first_step, last_step)
        curves, values = describe_range(self._run.history, self._num_ranks, self._curves.width, *steps)
        timing = compute_range_timing(self._run.history, self._num_ranks, *steps)
        content: dict[str, Any] = {"kind": "detail", "range": [first_step, last_step], "curves": curves}
        bars = np.empty(0)
        if timing.is_measured:
            content["time"], bars = describe_bars(timing, self.selected_rank)
        buffers = [np.ascontiguousarray(array, "<f4").tobytes() for array in (values, bars)]
        return Message(content, [*buffers, self._pack_strip(content, steps).astype("<u2").tobytes()])

    # -- parts of a message ---------------------------------------------------------------------------

    def _read_history(self) -> None:
        """Read the new rows and events of the history."""
        history = self._run.history
        self._curves.update(history)
        if self._node_series is not None:
            self._node_series.update(history)
        events = history.events[self._num_events_read :]
        self._num_events_read += len(events)
        self._unsent_events += events
        self._lost_nodes = update_lost_nodes(self._lost_nodes, events)

    def _build_current_state(self, kind: str) -> dict[str, Any]:
        """Return the part of every message: the state, notices and metrics."""
        run = self._run
        notices = collect_notices(run, self._lost_nodes)  # before the status: no notice names a step beyond the present
        status = run.status
        base, self._seq = self._seq, self._seq + 1
        is_first_step = self._pressing_state.note_sent(status, self._num_events_read, self._last_effect.count)
        stall = find_stall(run)
        now = self._clock()
        verdict = self._build_verdict(
            now, changed_only=kind == "change"
        )  # before the metrics, which must agree with it
        self._num_rows = len(run.history)  # rows that arrive from here on are for the next message
        metrics = compute_run_metrics(run.history, self._num_ranks, self._lost_nodes)
        self._metrics = self._steady_verdict.match(metrics, now)
        self.ended_ranks = find_ended_engines(run)
        stuck_ranks = [] if stall is None or stall.rank is None else [stall.rank]
        self._outliers = find_outliers(self._metrics, {*self._lost_nodes, *stuck_ranks})
        error = run.exception
        return {
            "kind": kind,
            "seq": self._seq,
            "base": base,
            **describe_head(run, status, self._metrics, self._lost_nodes),
            "error": None if error is None else "\n".join(list_error_lines(error, has_ended=status.state.has_ended)),
            "notices": [dataclasses.asdict(notice) for notice in notices],
            "nodes_now": {
                "world": run.spec.world_size,
                "lost": sorted(self._lost_nodes),
                "stuck": stuck_ranks,
                "stopped": stuck_ranks if stall and stall.is_stopped else [],
                "outliers": self._outliers,
                "slow": list(self._metrics.timing.straggler.ranks) if self._metrics.timing.straggler else [],
                "slowed": sorted(run.delay_factors),
                **({"ended": self.ended_ranks, "reasons": describe_ended_engines(run)} if self.ended_ranks else {}),
            },
            **verdict,
            "selected": self.selected_rank,
            "effect": self._last_effect.describe(run.history.events),
            **({"is_first_step": True} if is_first_step else {}),
        }

    def _build_verdict(self, now: float, *, changed_only: bool) -> dict[str, Any]:
        """Return the verdict on the last seconds; empty if the page already has it."""
        steady = self._steady_verdict
        before, is_last = steady.shown, is_at_rest(self._run.status.state)
        if self._run.exception is not None or self._lost_nodes or self._run.stall_report is not None:
            steady.update(None, now)
            self._verdict_due_at = now  # no later change may come to take it back
        elif now >= self._verdict_due_at or is_last:  # the last word is that of run.verdict
            steady.update(find_shown_verdict(self._run), now, is_final=is_last)
            self._verdict_due_at = now + timeouts.VERDICT_INTERVAL_S
        if changed_only and steady.shown == before:
            return {}
        return {"verdict": (verdict := steady.shown) and {"text": verdict.text, "arithmetic": verdict.arithmetic}}

    def _build_nodes(self) -> list[dict[str, Any]]:
        self._sent_nodes = list(self._run.nodes)
        return [dataclasses.asdict(node) for node in self._sent_nodes]

    def _build_header(self) -> dict[str, Any]:
        spec = self._run.spec
        self._sent_world_size = spec.world_size
        return {
            "name": formatting.sanitize_text(spec.name, 80),
            "id": _name_run(self._run),
            "strategy": formatting.sanitize_text(spec.strategy, 120),
            "ranks": self._num_ranks,
            "overall": format_overall_label(spec.world_size, self._run.history.ranks_per_replica, self._num_ranks),
            "replicas": count_replicas(self._num_ranks, self._run.history.ranks_per_replica),
            "batch": spec.batch_size,
            "steps_per_epoch": spec.steps_per_epoch,
            "charts": {layout.name: dataclasses.asdict(layout) for layout in self._curves.chart_layouts},
            "columns": self._curves.num_columns,
            "phases": PHASES,
            "kinds": BOX_KINDS,
            "offers": list(self.extra_controls),
            "has_spare_core": has_spare_core(self._run),
        }

    def _pack_message(self, content: dict[str, Any], part: CurveBuckets, *, is_whole: bool = False) -> Message:
        values = _describe_curves(content, part, is_whole=is_whole)
        packed_state = self._num_rows, self.selected_rank
        is_new = packed_state != self._packed_state or content["kind"] == "snapshot"
        self._packed_state = packed_state
        by_rank = self._metrics.by_rank if is_new else self._metrics.by_rank[:0]
        bars = self._pack_phase_bars(content) if is_new else np.empty(0)
        lines = self._pack_node_series(content)
        buffers = [np.ascontiguousarray(array, "<f4").tobytes() for array in (values, by_rank, bars, lines)]
        return Message(content, [*buffers, self._pack_strip_if_due(content).astype("<u2").tobytes()])

    def _pack_node_series(self, content: dict[str, Any]) -> np.ndarray:
        """Describe the lines of single nodes in `content`; return their means, of shape (buckets, charts, ranks)."""
        if self._node_series is None:
            return np.empty(0)
        ranks = list(dict.fromkeys([*self._outliers, *self._list_selected()]))
        lines = self._node_series.take_changes(ranks, full=content["kind"] == "snapshot")
        if lines is None:
            return np.empty(0)
        content["spot"] = {
            "ranks": lines.ranks,
            "width": lines.width,
            "origin": lines.origin,
            "first": lines.first,
            "charts": [chart.name for chart in NODE_CHARTS],
            "buckets": len(lines.means),
        }
        return lines.means

    def _list_selected(self) -> list[int]:
        return [] if self.selected_rank is None else [self.selected_rank]

    def _pack_strip_if_due(self, content: dict[str, Any]) -> np.ndarray:
        """Describe the timeline in `content`; return its boxes, and then those of the plan, of shape (boxes, 5)."""
        now, step = self._clock(), self._run.status.step
        is_due = step != self._strip_step and now - self._strip_sent_at >= timeouts.TIMELINE_INTERVAL_S
        if not is_due and content["kind"] != "snapshot":
            return np.empty(0)
        self._strip_sent_at, self._strip_step = now, step
        return self._pack_strip(content)

    def _pack_strip(self, content: dict[str, Any], steps: tuple[int, int] | None = None) -> np.ndarray:
        def pack() -> np.ndarray:
            step_strip = read_step_strip(self._run, [*self._list_selected(), *self._outliers], steps)
            self._has_strip = step_strip is not None
            if step_strip is None:
                return np.empty(0)
            content["strip"], boxes = describe_strip(step_strip)
            return boxes

        def report(error: Exception) -> np.ndarray:
            content["strip"] = {"error": "\n".join(list_error_lines(error))}
            return np.empty(0)

        return run_guarded(pack, report)

    def _pack_phase_bars(self, content: dict[str, Any]) -> np.ndarray:
        """Describe the time of a step in `content`; return the bars' seconds, of shape (bars, phases)."""
        content["time"], seconds = describe_bars(self._metrics.timing, self.selected_rank)
        return seconds


def _describe_curves(content: dict[str, Any], part: CurveBuckets, *, is_whole: bool = False) -> np.ndarray:
    """Describe the buckets in `content`, and return their values: the means alone, where extremes add nothing."""
    is_flat = part.is_flat and not is_whole
    content["curves"] = {"width": part.width, "origin": part.origin, "first": part.first, "last": part.last_step}
    content["curves"] |= {"flat": is_flat, "buckets": len(part.values)}
    return part.values[..., 1] if is_flat else part.values


def _name_run(run: RunView) -> str | None:
    """Return what identifies a run in a page, also after another notebook took it over; None before its first event."""
    events = run.history.events[run.history.num_inherited_events :]
    return f"{run.spec.name} {events[0].time}" if events else None
